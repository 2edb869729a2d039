"""Runs each unit under its activation policy: keep, offload or recompute, or in slices (floor 2).

The choice changes no number. It is made when a unit's forward begins; backward passes and the
model's own checkpoints are left as they are.
"""

from __future__ import annotations

from collections import Counter, UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from hetero.internals import in_backward, is_faking
from hetero.interrupts import theirs
from hetero.modes import in_own_mode, own_mode
from hetero.plan.activations import KEEP, OFFLOAD, RECOMPUTE, Policy
from hetero.train.activations.caches import has_rows, is_cache
from hetero.train.activations.cut import Checked, check_unit, find_cut
from hetero.train.activations.offload import Offload
from hetero.train.activations.proof import Proofs
from hetero.train.activations.reach import Reach
from hetero.train.activations.recompute import BeforeNode, Call, Forward, ProofTrial
from hetero.train.activations.saved import SavedTensors, inside_foreign_hooks
from hetero.train.activations.slices import Each, Sliced, batch_of, one_by_one
from hetero.train.activations.structure import leaves_of
from hetero.train.model.graph import versions
from hetero.train.model.units import Unit

IN_NEED = (
    "raise hbm= or host=, which have no room to keep what units save, or lower the batch; the next"
    " step keeps what this unit saves"
)
NEXT_KEEPS = (
    "write before the forward or after the backward, or set activations='keep' or 'offload'; from"
    " the next step on, what units save is kept"
)
CHOICES = {"auto": KEEP, "keep": KEEP, "recompute": RECOMPUTE, "offload": OFFLOAD}


def first_policy(unit: Unit, choice: str, saved: SavedTensors) -> Policy:
    """Return the policy of a unit's first forward.

    A lone layer saves its inputs, and no more. If it is parallel, hooks outside of its forward end
    what that began (the mask of an embedding whose words ranks divide): it is not repeated alone.
    """
    alone = unit.module is not None and not any(True for _ in unit.module.children())
    if saved.parts.kinds and alone and CHOICES[choice].recompute:
        return KEEP
    return CHOICES[choice]


class Policies(UserDict[int, Policy]):
    """The policy of every unit; units that offload are counted as policies change."""

    def __init__(self, policies: Mapping[int, Policy]) -> None:
        self.n_offload = 0
        super().__init__(policies)

    def __setitem__(self, unit: int, policy: Policy) -> None:
        self.n_offload += policy.offload - self.data.get(unit, KEEP).offload
        self.data[unit] = policy

    def __delitem__(self, unit: int) -> None:
        self.n_offload -= self.data.pop(unit).offload


class Watch(Protocol):
    """Measures the bytes that units leave, and may change policies before one runs."""

    def begin(self) -> None:
        """A forward of the whole model begins."""

    def around(self, unit: int, args: Any, kwargs: Any) -> AbstractContextManager[None]:
        """Run a unit's forward with these arguments inside the block."""

    def entered(self, unit: int) -> None:
        """A unit's weights are there, and it computes."""


class Forwards(Protocol):
    """Follows forwards that are steps of their own."""

    def begin(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """A forward of the whole model begins, on these arguments."""

    def settle(self) -> None:
        """A unit begins."""


NO_WEIGHTS = "needs no weights in backward, for which ranks would have to gather them"


def is_casting() -> bool:
    """Whether autocast is on, under which graphs save copies of weights."""
    return any(map(torch.is_autocast_enabled, ("cpu", "cuda")))


class Enter(Protocol):
    """Begins a unit's access."""

    def __call__(self, unit: int, *, tries: bool = False) -> bool:
        """``tries``: no backward follows. Returns what the access's end takes."""


class Unwatched:
    """Follows no forward."""

    def begin(self, *_: Any) -> None: ...

    def settle(self) -> None: ...

    def around(self, unit: int, args: Any, kwargs: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def entered(self, unit: int) -> None: ...


class UnitCalls:
    """The calls of units in a forward, and which one backward needs at once: the last.

    Where forwards wait for their backwards, as a pipeline's micro-batches do, it is none: each of
    them would hold a unit more.
    """

    def __init__(self, last: int) -> None:
        self._counts: Counter[int] = Counter()  # of each unit in this forward
        self._latest = last, 1  # unit, and which of its calls
        self._final = self._latest  # of the last forward, so expected of this one
        self._alone = 2  # forwards in a row that found none waiting; in a pipeline, a step's first

    def begin(self, n_waiting: int) -> None:
        """Begin a forward, while so many wait."""
        self._final = self._latest
        self._counts.clear()
        self._alone = 0 if n_waiting else self._alone + 1

    def is_needed_next(self, unit: int) -> bool:
        """Whether backward follows a unit's next call at once, as far as the last forward tells."""
        return self._alone > 1 and (unit, self._counts[unit] + 1) == self._final

    def note(self, unit: int) -> None:
        """A unit is called."""
        self._counts[unit] += 1
        self._latest = unit, self._counts[unit]


class ActivationPolicies:
    """The policy of every unit.

    Args:
        choice: "keep", "recompute", "offload", or "auto", which may be changed unit by unit.
        micro_batch: samples that a unit takes at once; None: all of them.
        saved: the owner of the saved-tensor hooks.
        offload: sends saved tensors down.
        enter, leave: begin and end a unit's access; `leave` takes the result of `enter`.
        before_node: registers a call before a node of a graph runs.
        trains: whether there are steps, at whose ends measurements are used.
        meets: whether units make calls together with those of other ranks.
        gathers: whether ranks fetch together: which weights backward needs may not depend on how
            large a rank's batch is.
        slices: which slices of a unit's forward or backward have to run.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        choice: str,
        micro_batch: int | None,
        *,
        place: torch.device,
        saved: SavedTensors,
        offload: Offload,
        enter: Enter,
        leave: Callable[[int, bool], None],
        before_node: BeforeNode,
        trains: bool,
        meets: bool = False,
        gathers: bool = False,
        slices: Each = one_by_one,
    ) -> None:
        named = [i for i, unit in enumerate(units) if unit.module is not None]
        self.may_change = choice == "auto" and trains
        self.policies = Policies({i: first_policy(units[i], choice, saved) for i in named})
        self.watch: Watch = Unwatched()
        self.forwards: Forwards = Unwatched()
        # A rank that chose to repeat a unit would repeat its collectives alone.
        is_tried = not (self.may_change and (meets or saved.parts.kinds))
        types: dict[int, type] = {unit: type(units[unit].module) for unit in named}
        self.proofs = Proofs(types, is_tried=is_tried)
        self._tries = False
        self._trials: set[ProofTrial] = set()  # waiting for backward
        self.reach = Reach()
        self._saved = saved
        self._units = units
        self._micro_batch = micro_batch
        self._gathers = gathers
        self._slices = slices
        self._place = place
        self._offload = offload
        self._enter = enter
        self._leave = leave
        self._before_node = before_node
        self._calls = UnitCalls(max(named, default=-1))
        self._used: dict[int, Policy] = {}
        self._batch = 0
        self._checked: dict[tuple[Any, ...], Checked] = {}

    @property
    def tries(self) -> bool:
        """Whether units that are not recomputed are tried, for a proof."""
        return self._tries

    @tries.setter
    def tries(self, tries: bool) -> None:
        self._tries = tries
        self._trials.clear()  # of graphs that backward never reached

    @property
    def shapes(self) -> bool:
        """Whether any unit is sliced, recomputed or offloaded."""
        return bool(self._micro_batch) or any(p != KEEP for p in self.policies.values())

    @property
    def offloads(self) -> bool:
        """Whether any unit offloads its activations."""
        return self.policies.n_offload > 0

    @property
    def overlaps(self) -> bool:
        """Whether one unit's transfers overlap with the next one's compute."""
        return self._offload.overlaps

    @overlaps.setter
    def overlaps(self, overlaps: bool) -> None:
        self._offload.overlaps = overlaps

    def policy_of(self, unit: int) -> Policy:
        """Return the policy of a unit's next forward; one that backward needs at once keeps."""
        return KEEP if self._calls.is_needed_next(unit) else self.policies[unit]

    def used(self, unit: int) -> Policy:
        """Return the policy of a unit's last forward."""
        return self._used.get(unit, KEEP)

    @property
    def is_trying(self) -> bool:
        """Whether a unit is being recomputed for a proof."""
        digests = self._saved.digests
        return digests is not None and not digests.keeps

    def room_below(self) -> int:
        """Return the bytes that may still go down."""
        return self._offload.room_bytes()

    def recompute_unproven(self, unit: int) -> None:
        """Recompute a unit whose proof is open, which backward then makes; StateError if it fails.
        There is no room to keep what it saves. Not one that is known not to be repeatable.
        """
        if self.proofs.need(unit):
            self.policies[unit] = RECOMPUTE

    @in_own_mode
    def begin(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Begin a call of the whole model, on this batch."""
        if in_backward() or is_faking():
            return
        self._batch = batch_of(args, kwargs) if self._micro_batch else 0
        self.forwards.begin(args, kwargs)
        if torch.is_grad_enabled():
            self._offload.border()
            self._offload.active = self.offloads
            self.watch.begin()
            self._calls.begin(self._saved.footprint.waiting)

    def run(self, index: int, call: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a unit's forward under its policy."""
        if is_faking():
            return self._access(index, call, args, kwargs)
        with own_mode():
            self._offload.border()
            self.forwards.settle()
        module = self._units[index].module
        if in_backward() or inside_foreign_hooks() or module is None:
            return self._access(index, call, args, kwargs)
        if torch.is_grad_enabled():
            with self.watch.around(index, args, kwargs):
                return self._run(index, module, call, args, kwargs)
        if self._is_cut(trains=False):
            return self._run_sliced(index, module, call, args, kwargs)
        return self._access(index, call, args, kwargs)

    def _is_cut(self, *, trains: bool) -> bool:
        """Whether this batch is cut into slices, or into a single one, which is computed again in
        backward as those of a larger batch are."""
        fits = self._batch <= (self._micro_batch or 0)
        return bool(self._micro_batch and self._batch) and (not fits or (trains and self._gathers))

    def _run(
        self, index: int, module: nn.Module, call: Call, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        policy = self.policy_of(index)
        try:
            self._offload.active, self._offload.inside = policy.offload, True
            if self._is_cut(trains=True):
                return self._run_sliced(index, module, call, args, kwargs)
            self._calls.note(index)
            self._used[index] = policy
            tries = self.tries and self.may_change and self.proofs.is_open(index)
            if policy.recompute or tries:
                return self._run_proven(index, module, call, args, kwargs)
            if self.may_change and self.proofs.is_open(index):
                return self._run_watched(index, module, call, args, kwargs)
            return self._access(index, call, args, kwargs)
        finally:
            self._offload.active, self._offload.inside = self.offloads, False

    def _run_proven(
        self, index: int, module: nn.Module, call: Call, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Run a unit so that it is recomputed if proven, and tried if a proof is open."""
        forward = Forward(
            self._units[index].name or "model",
            module,
            call,
            args,
            kwargs,
            place=self._place,
            reach=self.reach,
            saved=self._saved,
            access=partial(self._access, index),
        )
        proofs, policy = self.proofs, self._used[index]
        conclude = partial(proofs.conclude, index, proofs.take(index, forward.path()))
        if self.may_change:
            forward.broken, forward.advice = proofs.distrust, NEXT_KEEPS
        if policy.recompute and (proofs.holds(index) or not self.may_change):
            return forward.recomputed(args, kwargs, None if proofs.holds(index) else conclude)
        if policy.recompute and proofs.is_needed(index) and forward.is_whole:
            forward.advice = IN_NEED
            return forward.recomputed(args, kwargs, conclude)
        if policy.recompute:  # chosen for another path than this
            self._used[index], self._offload.active = OFFLOAD, True
            proofs.learned = True
        if proofs.is_open(index) and not forward.is_whole:
            conclude("reads what no snapshot holds")
        if proofs.is_open(index):
            return forward.tried(
                args, kwargs, self._saved, self._before_node, self._trials, conclude
            )
        return self._access(index, call, args, kwargs)

    def _run_watched(
        self, index: int, module: nn.Module, call: Call, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Run a unit's forward, and note whether it writes to its inputs or parameters."""
        held = [*leaves_of((args, kwargs), is_cache), *module.parameters()]
        n_saved = self._saved.views.n_located

        def watched(*args: Any, **kwargs: Any) -> Any:
            before = versions(held)  # with what the access has taken over of a state dict
            found = call(*args, **kwargs)
            if versions(held) != before:
                self.proofs.wrote(index)
            return found

        found = self._access(index, watched, args, kwargs)
        if self._gathers and self._saved.views.n_located == n_saved and not is_casting():
            self.proofs.leave(index, NO_WEIGHTS)
        return found

    def _access(self, index: int, call: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        pushed = self._enter(index)
        try:
            self.watch.entered(index)
            return theirs(call, *args, **kwargs)
        finally:
            self._leave(index, pushed)

    @contextmanager
    def _accessed(self, index: int, *, tries: bool = False) -> Iterator[None]:
        pushed = self._enter(index, tries=tries)
        try:
            yield
        finally:
            self._leave(index, pushed)

    def _run_sliced(
        self, index: int, module: nn.Module, call: Call, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        job = Sliced(
            self._units[index].name or "model",
            module,
            call,
            around=lambda: self._accessed(index),
            around_trial=lambda: self._accessed(index, tries=True),
            place=self._place,
            reach=self.reach,
            saved=self._saved,
            each=self._slices,
            batch=self._batch,
            size=self._micro_batch or self._batch,
            args=args,
            kwargs=kwargs,
        )
        if not any(job.candidates):
            return self._access(index, call, args, kwargs)
        if not torch.is_grad_enabled():
            return self._evaluate_sliced(index, job, call, args, kwargs)
        job.refuse_caches()
        asks = tuple(t.requires_grad for t in job.tensors)
        which = index, job.candidates, asks, len(job.rows) == 1
        if which not in self._checked:
            self._checked[which] = check_unit(job)
        job.cut, job.differentiable = self._checked[which]
        return job()

    def _evaluate_sliced(
        self, index: int, job: Sliced, call: Call, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        if not all(has_rows(cache) for cache in job.caches):
            return self._access(index, call, args, kwargs)
        which = index, job.candidates
        if which not in self._checked:
            self._checked[which] = Checked(find_cut(job, job.moment()))
        job.cut = self._checked[which].cut
        return job.evaluated()
