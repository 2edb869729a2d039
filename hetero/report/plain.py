"""Events of a plain model in a training loop of its own (floor 4).

The log is that of a prepared model: LEVELs of the tier that holds the model, PHASEs, STEPs, and an
ACCESS each time a unit computes. `storages` says which bytes count.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from hetero.device import Allocated, allocated
from hetero.events import EventLog, What
from hetero.internals import tree_iter
from hetero.report.run import BucketMeta, Meta
from hetero.report.storages import Category, Storages
from hetero.train.access.listening import Listening
from hetero.train.engine.check import check_watchable, check_whose
from hetero.train.model.units import Unit, assign, find_units
from hetero.types import Kind, Tier

Counts = Callable[[torch.device], Allocated | None]
UNATTRIBUTED = "unattributed"
COUNTED = ("allocated", "allocated peak", "reserved")  # by the allocator
PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class Begun(NamedTuple):
    """An access of backward, which ends where the next one begins."""

    unit: int
    seq: int
    t0: float


class Stepping:
    """Ends steps: with the optimizer's, if the model computed since the last one."""

    def __init__(self, log: EventLog) -> None:
        self.computes = False
        """Whether the model computed since the last step."""
        self.made_in_backward = False
        """Whether parameters were stepped as their gradients arrived."""
        self._log = log
        self._began = self._began_update = log.clock()
        self._outer = "between"

    def begin(self) -> None:
        if self._log.phase != "step":  # else it is nested, or the one before it failed
            self._outer, self._log.phase = self._log.phase, "step"
        self._began_update = self._log.clock()

    def made(self) -> None:
        if self._log.phase == "step":
            self._log.add(What.PHASE, self._began_update, self._log.clock(), why="step")
            self._log.phase = self._outer
        if self.computes:
            self.end()

    def end(self) -> None:
        log, now = self._log, self._log.clock()
        log.add(What.STEP, self._began, now)
        log.step, self._began = log.step + 1, now
        self.computes = self.made_in_backward = False


class Watcher:
    """Watches a plain model and logs its events.

    Args:
        counts: asks the device's allocator, if it has one.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        place: torch.device,
        counts: Counts = allocated,
    ) -> None:
        self.log = EventLog()
        self.units, self._home = assign(model, find_units(model))
        self._model = model
        self._place = place
        self._tier = Tier.HOST if place.type == "cpu" else Tier.HBM
        self._storages = Storages(self.log, self._tier, place)
        self._counts = counts
        self._params = {id(param) for param in model.parameters()}
        self._optimizers = weakref.WeakSet([] if optimizer is None else [optimizer])
        self._backward: Begun | None = None
        self._step = Stepping(self.log)
        self._unit_bytes = [pinned_bytes(unit) for unit in self.units]

    # -- begin and end ---------------------------------------------------------------------------

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the model until the block ends, then remove every hook."""
        hooks = Listening(self)
        try:
            self._storages.begin(self._owners())
            self.log.phase = "between"
            hooks.listen(self._model, self.units)
            with self._storages:
                yield
        finally:
            hooks.remove()
            self.log.enabled = False
            self._storages.forget()

    def meta(self) -> Meta:
        params = list(self._model.parameters())
        sizes = Counter[torch.dtype]()
        for param in params:
            sizes[param.dtype] += param.numel()
        dtype = sizes.most_common(1)[0][0]
        return Meta(
            model=type(self._model).__name__,
            n_params=sum(sizes.values()),
            device=str(self._place),
            mode="plain",
            precision=PRECISIONS.get(dtype, str(dtype).removeprefix("torch.")),
            budgets={self._tier.name: None},
            units=[unit.name for unit in self.units],
            buckets=self._buckets(),
            made_at_peak=self._storages.made_at_peak(),
        )

    def _buckets(self) -> list[BucketMeta]:
        """Return a bucket for the trainable and one for the frozen parameters of each unit."""
        n_bytes, numels = Counter[tuple[int, bool]](), Counter[tuple[int, bool]]()
        for name, param in self._model.named_parameters():
            key = self._home[name], param.requires_grad
            n_bytes[key] += param.nbytes
            numels[key] += param.numel()
        return [BucketMeta(key[0], n_bytes[key], numels[key], key[1]) for key in sorted(numels)]

    def _owners(self) -> Iterator[tuple[Category, torch.Tensor]]:
        params = list(self._model.parameters())
        yield from ((Kind.PARAM, param) for param in params)
        yield from ((Kind.BUFFER, buffer) for buffer in self._model.buffers())
        yield from ((Kind.GRAD, p.grad) for p in params if p.grad is not None)
        for optimizer in self._optimizers:
            for value in tree_iter(list(optimizer.state.values())):
                if isinstance(value, torch.Tensor):
                    yield Kind.STATE, value

    # -- phases ----------------------------------------------------------------------------------

    @contextmanager
    def forward(self) -> Iterator[None]:
        if self.log.phase in ("forward", "eval", "backward"):  # nested, or recomputed
            yield
            return
        name = "forward" if torch.is_grad_enabled() else "eval"
        self._step.computes = True
        with self._storages.making(Kind.ACTIVATION), self._phase(name):
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        if self.log.phase == "backward":  # nested
            yield
            return
        self._step.computes = True
        with self._storages.making(Kind.ACTIVATION), self._phase("backward"):
            try:
                yield
            finally:
                self._leave()
        if self._step.made_in_backward:
            self._storages.settle(self._owners())
            self._step.end()

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        log = self.log
        outer, log.phase, began = log.phase, name, log.clock()
        try:
            yield
        finally:
            self._measure()
            log.add(What.PHASE, began, log.clock(), why=name)
            log.phase = outer

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._is_ours(optimizer) and self.log.phase != "backward":
            self._step.begin()

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._is_ours(optimizer):
            return
        if self.log.phase == "backward":  # a parameter is stepped as its gradient arrives
            self._step.made_in_backward = True
            return
        self._storages.settle(self._owners())
        self._measure()
        self._step.made()

    def _is_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        if optimizer in self._optimizers:
            return True
        params = (param for group in optimizer.param_groups for param in group["params"])
        ours = any(id(param) in self._params for param in params)
        if ours:
            self._optimizers.add(optimizer)
        return ours

    # -- accesses --------------------------------------------------------------------------------

    @contextmanager
    def access(self, unit: int) -> Iterator[None]:
        log = self.log
        outer, seq, began = log.access, log.begin_access(), log.clock()
        try:
            with self._storages.making(Kind.ACTIVATION):
                yield
        finally:
            self._end_access(Begun(unit, seq, began))
            log.access = outer

    def reached(self, unit: int) -> None:
        if self.log.phase != "backward" or (self._backward and self._backward.unit == unit):
            return
        self._leave()
        self._backward = Begun(unit, self.log.begin_access(), self.log.clock())

    def gradient(self, param: nn.Parameter) -> None:
        if param.grad is not None and param.grad.layout is torch.strided:
            self._storages.own(param.grad.untyped_storage(), Kind.GRAD)

    def _leave(self) -> None:
        """End the backward access under way."""
        if self._backward is not None:
            self._end_access(self._backward)
            self._backward, self.log.access = None, -1

    def _end_access(self, begun: Begun) -> None:
        held = self._storages.levels[Kind.ACTIVATION]
        self.log.end_access(begun.seq, begun.t0, begun.unit, self._unit_bytes[begun.unit])
        self.log.now(
            What.LIVE, tier=self._tier, category=Kind.ACTIVATION, n_bytes=held, unit=begun.unit
        )
        self._measure()

    def _measure(self) -> None:
        """Log the allocator's counts, and the bytes that are in no category."""
        counts = self._counts(self._place)
        if counts is None:
            return
        rest = max(0, counts.now_bytes - sum(self._storages.levels.values()))
        self.log.now(What.LEVEL, tier=self._tier, category=UNATTRIBUTED, n_bytes=rest)
        # no tier: they are no part of the sum of its levels
        for name, n_bytes in zip(COUNTED, counts, strict=True):
            self.log.now(What.LIVE, category=name, n_bytes=n_bytes)


def pinned_bytes(unit: Unit) -> int:
    """Return the bytes of the parameters that a unit computes with."""
    return sum(p.nbytes for p in unit.module.parameters()) if unit.module is not None else 0


def watch(model: object, optimizer: object) -> Watcher:
    """Return a watcher of a plain model; ConfigError or StateError if it cannot be watched.

    Args:
        optimizer: None, or a torch optimizer over the model's parameters.
    """
    module, place = check_watchable(model)
    return Watcher(module, check_whose(module, optimizer), place)
