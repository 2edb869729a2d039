"""What each unit's forward leaves for backward: all it saved, its inputs, or slices (floor 2).

The choice changes no number. It is made for a unit when its forward begins; inside a backward pass,
and inside a checkpoint of the model's own, everything is as the model says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from hetero.train.activation import foreign
from hetero.train.offload import Offload
from hetero.train.recompute import Call, in_backward, recomputed
from hetero.train.slices import Sliced, batch_of, check_unit
from hetero.train.units import Unit


class Policy(NamedTuple):
    """What becomes of what a unit's forward leaves for its backward."""

    recompute: bool
    """Only its inputs are left; the rest is computed again."""
    offload: bool
    """What is left goes down behind the forward, and comes up before backward needs it."""


KEEP, RECOMPUTE, OFFLOAD = Policy(False, False), Policy(True, False), Policy(False, True)
CHOICES = {"auto": KEEP, "keep": KEEP, "recompute": RECOMPUTE, "offload": OFFLOAD}


class Activations:
    """The policy of every unit.

    Args:
        choice: "keep", "recompute", "offload", or "auto", which keeps until `give_way`.
        micro_batch: samples that a unit takes at once; None: all of them.
        offload: what sends down.
        enter, leave: begin and end a unit's access; `enter` returns what `leave` takes.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        choice: str,
        micro_batch: int | None,
        *,
        place: torch.device,
        offload: Offload,
        enter: Callable[[int], bool],
        leave: Callable[[int, bool], None],
    ) -> None:
        self._units = units
        self._micro_batch = micro_batch
        self._place = place
        self._enter = enter
        self._leave = leave
        named = [i for i, unit in enumerate(units) if unit.module is not None]
        self._may_change = choice == "auto"
        self.policies = dict.fromkeys(named, CHOICES[choice])
        self._offload = offload
        self._latest = max(named, default=-1)
        self._final = self._latest  # whose forward comes last: it would be computed again at once
        self._batch = 0
        self._checked: dict[tuple[int, tuple[bool, ...]], tuple[bool, ...]] = {}

    @property
    def shapes(self) -> bool:
        """Whether any unit does not just keep what autograd saves."""
        return bool(self._micro_batch) or any(p is not KEEP for p in self.policies.values())

    @property
    def offloads(self) -> bool:
        """Whether anything goes down."""
        return any(policy.offload for policy in self.policies.values())

    @property
    def gave_way(self) -> bool:
        """Whether a free choice was made for computing again."""
        return self._may_change and any(p.recompute for p in self.policies.values())

    def give_way(self) -> bool:
        """Compute everything again from now on, where the choice is free; False where it is not."""
        if not self._may_change or all(p.recompute for p in self.policies.values()):
            return False
        self.policies = dict.fromkeys(self.policies, RECOMPUTE)
        return True

    def begin(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """A call of the whole model begins, on this batch."""
        if torch.is_grad_enabled() and not in_backward():
            self._batch = batch_of(args, kwargs) if self._micro_batch else 0
            self._final = self._latest
            self._offload.border()
            self._offload.active = self.offloads

    def run(self, index: int, call: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Carry out a unit's forward under its policy."""
        module = self._units[index].module
        if self._offload.active:
            self._offload.border()
        plain = not torch.is_grad_enabled() or in_backward() or module is None
        if plain or index not in self.policies:
            return self._access(index, call, args, kwargs)
        policy = KEEP if index == self._final else self.policies[index]
        with self._offload.while_active(policy.offload):
            return self._run(index, call, args, kwargs, policy)

    def _run(
        self,
        index: int,
        call: Call,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        policy: Policy,
    ) -> Any:
        module = self._units[index].module
        if module is None or foreign():  # inside a checkpoint of the model's own
            return self._access(index, call, args, kwargs)
        if self._micro_batch and self._batch > self._micro_batch:
            return self._run_sliced(index, call, args, kwargs)
        self._latest = index
        if not policy.recompute:
            return self._access(index, call, args, kwargs)

        def access(*args: Any, **kwargs: Any) -> Any:
            return self._access(index, call, args, kwargs)

        return recomputed(module, access, args, kwargs)

    def _access(self, index: int, call: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        with self._accessed(index):
            return call(*args, **kwargs)

    @contextmanager
    def _accessed(self, index: int) -> Iterator[None]:
        pushed = self._enter(index)
        try:
            yield
        finally:
            self._leave(index, pushed)

    def _run_sliced(
        self, index: int, call: Call, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        unit = self._units[index]
        assert unit.module is not None and self._micro_batch
        job = Sliced(
            unit.name or "model",
            unit.module,
            call,
            around=lambda: self._accessed(index),
            place=self._place,
            batch=self._batch,
            size=self._micro_batch,
            args=args,
            kwargs=kwargs,
        )
        if not any(job.is_sliced(t) for t in job.tensors):
            return self._access(index, call, args, kwargs)
        which = index, tuple(t.requires_grad for t in job.tensors)
        if which not in self._checked:
            self._checked[which] = check_unit(job)
        job.differentiable = self._checked[which]
        return job()
