"""The engine of one prepared model: `prepare` builds it, `release` takes it apart (floor 2)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from hetero import interrupts
from hetero.errors import BudgetError, StateError, StorageError
from hetero.events import What
from hetero.modes import in_own_mode
from hetero.plan.division import Division
from hetero.train.engine.admission import Admission
from hetero.train.engine.alike import digest_of, members_of, settings_of
from hetero.train.engine.broken import Broken
from hetero.train.engine.paged import Paged
from hetero.train.engine.resident import Mastered, Resident, refuse_excess
from hetero.train.engine.setup import Setup
from hetero.train.engine.snapshot import Saving
from hetero.train.engine.steps import HomeSteps, NoSteps, TorchSteps, placed
from hetero.train.engine.story import Story
from hetero.train.gradients.clip import Norms
from hetero.train.model.graph import unless_gone
from hetero.train.model.parts import Parts
from hetero.train.model.units import MARK
from hetero.train.update.masters import LossScaler
from hetero.train.update.optimizer import Optimizer, silence
from hetero.train.update.rules import Group
from hetero.types import Tier, format_bytes


class Engine:
    """A prepared model: where its parameters are, how it steps, and its optimizer."""

    def __init__(self, setup: Setup, residence: Paged | Resident, broken: Broken) -> None:
        self.setup = setup
        self.residence = residence
        self.broken = broken
        self.steps = steps_of(setup, residence)
        self.admission = Admission(setup)
        self.optimizer: Optimizer | None = None
        self._unsilence: Callable[[], None] = lambda: None
        self._step_began = setup.log.clock()  # when the last step ended, once there is one
        self._clips: list[str] = []  # since the last step
        self._n_writes = self._count_writes() if setup.parts.kinds else 0
        self._told_early = False  # whether a release was refused between backward and step
        setup.hooks.guard(setup.model, self._state_dict_access, self._check_copy)
        if setup.budget.spills:
            setup.hooks.refuse_saving(setup.model)
        if setup.inner is not None:  # last: `assemble` undoes the rest, and nothing fails after
            self._wrap(setup.inner)
        setup.store.before_use = unless_gone(self.finish, None)
        object.__setattr__(setup.model, MARK, self)
        self._story = Story(setup)
        self._story.begins(residence)

    def _wrap(self, inner: torch.optim.Optimizer) -> None:
        """Take the states of an optimizer home; its own step is refused from here on."""
        self.optimizer = Optimizer(inner, self)
        groups = self.groups()
        for param, state in self.optimizer.state.items():
            self.optimizer.state[param] = self.adopt(param, state, groups.get(id(param), {}))
        inner.state = defaultdict(dict)
        self._unsilence = silence(inner)
        self.steps.follow(self.optimizer)

    # -- training --------------------------------------------------------------------------------

    @in_own_mode
    def step(self, optimizer: Optimizer) -> None:
        """Update all parameters that have a gradient, now or during the next forward."""
        setup, log = self.setup, self.setup.log
        if setup.model.__dict__.get(MARK) is not self:
            raise StateError(
                "this optimizer was released with its model",
                advice="step the optimizer that hetero.release returned, or prepare both again",
            )
        interrupts.hold(setup)
        began, log.phase = log.clock(), "step"
        try:
            self._step(optimizer)
        finally:
            now = log.clock()
            log.add(What.PHASE, began, now, why="step")
            log.add(What.STEP, self._step_began, now)
            log.step, log.phase, self._step_began = log.step + 1, "between", now
        interrupts.point()  # Ctrl-C is raised once the step is counted and its border over

    def _step(self, optimizer: Optimizer) -> None:
        self.broken.refuse()
        if self.setup.comm.size == 1:  # else ranks refuse a step together
            refuse_excess(self.setup, self.residence.spoil)
        self.admission.admit_all(optimizer.param_groups)
        if self.parts.kinds:
            self.setup.before_step(self._facts(optimizer))
        self._clips.clear()
        try:
            division = self.steps.make(optimizer, self._clip)
        except BaseException:
            if self.steps.torn:
                self.broken.tear(self.steps.torn)
                self.steps.torn = ""
            raise
        self.setup.count()
        self.residence.step_made()
        paged = self.residence
        if division is not None and isinstance(paged, Paged) and paged.border(division):
            self._stay(paged, division)
        self._story.stepped(self.residence)

    def _stay(self, paged: Paged, division: Division) -> None:
        """Everything fits: the model stays on the device from here on."""
        self.steps.finish()
        self.residence = paged.stay(division)
        self.residence.attach()
        self.setup.rewrite()
        self.setup.hooks.guard(self.setup.model, self._state_dict_access, self._check_copy)
        self.steps = steps_of(self.setup, self.residence)
        if self.steps.stepper is None and self.optimizer is not None:  # torch steps parameters
            for param, state in self.optimizer.known_state.items():
                state.update({k: self.shown_state(param, v) for k, v in state.items()})

    def _facts(self, optimizer: Optimizer) -> dict[str, str]:
        """Return what ranks that divide tensors have to have done alike since the last step."""
        setup = self.setup
        groups = optimizer.param_groups
        settings = {**settings_of(groups), **members_of(groups, setup.named_params())}
        grads = [i for i, p in enumerate(setup.params) if setup.parts.grad(p) is not None]
        before, self._n_writes = self._n_writes, self._count_writes()
        return {
            "settings of groups": digest_of(f"{name}: {value}" for name, value in settings.items()),
            "gradients": digest_of(map(str, grads)),
            "clips": ", ".join(self._clips) or "none",
            "writes of weights": str(self._n_writes - before),
        }

    def _count_writes(self) -> int:
        """Return how often parameters were written of which every rank has the whole."""
        parts = self.setup.parts
        return sum(parts.version(param) for param in self.setup.params if parts.is_whole(param))

    def note_clip(self, max_norm: float, norm_type: float) -> None:
        """Gradients are clipped to a global norm."""
        self._clips.append(f"to {max_norm} by norms of order {norm_type}")

    def _clip(self) -> None:
        most = self.setup.config.max_grad_norm
        if self.optimizer is not None and most is not None:
            self.optimizer.clip_grad_norm_(most)

    def no_sync(self) -> AbstractContextManager[None]:
        """Exchange no gradients of passes inside."""
        trained = self.residence.trained
        return nullcontext() if trained is None else trained.grads.no_sync()

    @in_own_mode
    def restate(self) -> None:
        """Begin the event log anew, with the present state as its beginning."""
        self.setup.log.clear()
        self._step_began = self.setup.log.clock()
        self.setup.ledger.restate()
        self.residence.restate()

    # -- saving and loading ----------------------------------------------------------------------

    @in_own_mode
    def save(self, saving: Saving) -> None:
        """Begin a save: homes change only after it has read them."""
        self.steps.refuse_early("the model is saved")
        self.steps.take_copies()
        plain = self.residence.updates_in_place
        bound = self.residence.bound_at_home()
        self.setup.saver.begin(saving, self.setup.store, paged=not plain, bound=bound)

    @in_own_mode
    def saved_masters(self) -> dict[int, torch.Tensor]:
        """Return the ``low`` of each master, for a state dict, by the parameter's id."""
        setup = self.setup
        setup.saver.finish()
        if setup.has_masters:  # a written weight is its own master
            self.residence.quiesce()
        saved = ((p, setup.masters.saved(setup.segment(p))) for p in setup.params)
        return {id(p): low for p, low in saved if low is not None}

    @in_own_mode
    def load_masters(self, masters: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Take the ``low`` of parameters' masters from a state dict."""
        setup = self.setup
        setup.saver.finish()
        self.residence.quiesce()  # a pending write would be noticed after this
        for param, low in masters.items():
            self.residence.settle(setup.bucket(param).id)
            setup.masters.load(setup.segment(param), setup.parts.value(param, low))

    @in_own_mode
    def void_early(self) -> None:
        """Give up a step that will not be made; early updates of it leave a broken model."""
        if self.steps.void_early():
            self.broken.why = "some of its parameters were updated in a step that was not made"

    def _check_copy(self, n_bytes: int) -> None:
        """Refuse a copy that RAM has no room for, or of a model that must not be used."""
        self.broken.refuse()
        self.steps.refuse_early("the model is copied")
        free, limit = self.setup.ledger.free(Tier.HOST), self.setup.ram()
        room = limit if free is None else min(free, limit)
        if n_bytes > room:
            raise BudgetError(
                f"a copy of the model takes {format_bytes(n_bytes)} of HOST;"
                f" {format_bytes(room)} are there",
                advice="raise host=; or keep averages of your own on disk, one tensor of"
                " model.state_dict() at a time",
                tier="HOST",
                needed_bytes=n_bytes,
            )

    @contextmanager
    def _state_dict_access(self) -> Iterator[None]:
        self.broken.refuse()
        self.steps.refuse_early("a state dict is made or loaded")
        with self.residence.at_home():
            yield

    # -- for the optimizer -----------------------------------------------------------------------

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the model's parameters in its own order."""
        return iter(self.setup.params)

    @in_own_mode
    def admit(self, param: torch.Tensor) -> None:
        """Raise ConfigError for a parameter that cannot be stepped."""
        self.admission.admit(param)

    @in_own_mode
    def adopt(self, param: torch.Tensor, state: dict[str, Any], group: Group) -> dict[str, Any]:
        """Return a state with torch's keys whose tensors are the homes' or copies."""
        self.setup.saver.finish()
        return self.steps.adopt(param, state, group)

    @property
    def parts(self) -> Parts:
        """What parameters have inside."""
        return self.setup.parts

    @property
    def norms(self) -> Norms:
        """The norms of all stages' gradients."""
        return self.setup.norms

    def was_cut(self, param: nn.Parameter) -> bool:
        """Whether every rank had the whole of a gradient, of which its part is left."""
        trained = self.residence.trained
        return trained is not None and trained.grads.was_cut(param)

    def shown_state(self, param: torch.Tensor, value: Any) -> Any:
        """Return a value of a parameter's state as torch keeps it: a part, if it is of one."""
        parts, own = self.setup.parts, self.setup.parts.inside(param)
        is_own = isinstance(value, torch.Tensor) and parts.inside(value) is None
        if own is None or not is_own or value.dim() == 0 or value.shape != own.shape:
            return value
        return parts.wrapping(param)(value)

    def groups(self) -> dict[int, Group]:
        """Return the group of each parameter that is in one, by its id."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return {id(param): group for group in groups for param in group["params"]}

    def refuse_broken(self) -> None:
        """Raise StateError if the model must not be used."""
        self.broken.refuse()

    @in_own_mode
    def finish(self) -> None:
        """Wait until every update is done; raises what one of them raised."""
        self.steps.refuse_early("states are read")
        self.steps.finish()

    @property
    def scaler(self) -> LossScaler | None:
        """The dynamic loss scale, under precision="fp16"."""
        return self.steps.scaler

    @property
    def skipped(self) -> bool:
        """Whether loss scaling skipped the last step."""
        return self.steps.skipped

    # -- taking apart ----------------------------------------------------------------------------

    @in_own_mode
    def release(self) -> None:
        """Give back a plain module and the plain optimizer with its states.

        Raises StorageError if a drive fails: nothing has changed then, and the next call tries
        again. If it failed before, since the last step, it is a StateError: files and threads are
        gone, and their contents lost.
        """
        try:
            if not self._told_early:
                self.steps.refuse_early(
                    "the model is released (a second call gives back what there is)"
                )
        except StateError:
            self._told_early = True
            raise
        self.void_early()
        setup = self.setup
        failed = setup.store.pool.told
        try:
            setup.saver.finish()
            self.steps.come_home()
            states = self._plain_states()
            setup.handover.fetch(setup.store, setup.masters)
        except StorageError as error:
            setup.store.before_use = unless_gone(self.finish, None)
            if not failed:
                raise
            self._abandon()
            raise StateError(
                f"the model was released without its values, which a drive took along:"
                f" {error.args[0]}",
                advice="build the model and the optimizer anew and load the last checkpoint;"
                " parameters of this one are NaN",
            ) from error
        move_out(setup, self.residence)
        if setup.everyone.size > 1:
            setup.saver.join()
        setup.comm.agree(b"", "the end of release")  # until then others read this rank's shares
        setup.offload.close()
        self._detach(states)

    def _plain_states(self) -> dict[torch.Tensor, dict[str, Any]]:
        """Return the states as torch keeps them, out of their homes."""
        self.setup.store.before_use = _noop  # all updates are done: reads need not wait
        known = {} if self.optimizer is None else self.optimizer.known_state
        place, groups = self.setup.handover.device, self.groups()
        return {
            p: {
                k: self.shown_state(p, placed(v, place, groups.get(id(p), {})))
                for k, v in state.items()
            }
            for p, state in known.items()
        }

    def _abandon(self) -> None:
        """Take everything apart without reading the drives; parameters become NaN."""
        self.setup.hooks.remove()
        self.setup.device.close()
        self.setup.handover.give_up()
        self._detach({})

    def _detach(self, states: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        """Give the plain optimizer its states and its step again; files and threads go."""
        setup = self.setup
        self.residence.close()
        setup.worker.close()
        self._unsilence()
        if setup.inner is not None:
            setup.inner.state = defaultdict(dict, states)
        if self.optimizer is not None:
            self.optimizer.known_state = defaultdict(dict)
        setup.store.close()
        setup.device.close_stages()
        setup.ends.close()
        setup.model.__dict__.pop(MARK, None)
        interrupts.let_go(setup)


def steps_of(setup: Setup, residence: Paged | Resident) -> NoSteps | TorchSteps | HomeSteps:
    """Return the steps of a model in a residence."""
    if isinstance(residence, (Paged, Mastered)) and residence.trained.stepper is not None:
        return HomeSteps(setup, residence, residence.trained.stepper)
    if setup.inner is None:
        return NoSteps(setup, residence)
    return TorchSteps(setup, residence, setup.inner)


def move_out(setup: Setup, residence: Paged | Resident | None, *, failed: bool = False) -> None:
    """Make every parameter plain again; see `Handover.move_out`."""
    if residence is not None:
        residence.detach()
        residence.close()
    setup.hooks.remove()
    resident = setup.budget.stays if residence is None else residence.updates_in_place
    setup.handover.move_out(setup.store, setup.masters, resident=resident, failed=failed)


def _noop() -> None: ...
