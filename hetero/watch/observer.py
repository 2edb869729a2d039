"""Follows a program: its models, its steps, and the moment in which memory ran out (floor 4)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, ParamSpec

import torch
from torch import nn

from hetero.api import engine_of
from hetero.device import Fragments, allocated, fragments
from hetero.errors import BudgetError
from hetero.train.access.entries import ProgramEntries
from hetero.types import Kind
from hetero.watch.owners import storage_of
from hetero.watch.picture import HeldStorage, MemoryUse, Picture, picture
from hetero.watch.program import Program, bytes_of
from hetero.watch.sampler import Sampler, is_due, may_grow
from hetero.watch.stacks import Line, lines_of
from hetero.watch.steps import StepRows

SHORT = ("out of memory", "can't allocate memory", "not enough memory")  # torch's allocators
NO_OWNER = "(activations, and what else has no owner)"
USES = {
    Kind.PARAM: MemoryUse.PARAMETERS,
    Kind.GRAD: MemoryUse.GRADIENTS,
    Kind.MASTER: MemoryUse.STATES,
    Kind.STATE: MemoryUse.STATES,
    Kind.ACTIVATION: MemoryUse.ACTIVATIONS,
    Kind.BUFFER: MemoryUse.BUFFERS,
    Kind.POOL: MemoryUse.OTHER,
}
P = ParamSpec("P")


class Shortage(NamedTuple):
    """A moment in which memory ran out."""

    step: int
    message: str
    stack: tuple[Line, ...]
    picture: Picture
    fragments: Fragments | None
    advice: str
    """Of hetero's own error."""
    tier: str
    needed_bytes: int
    """Of that tier; 0 if hetero does not say."""


def is_shortage(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in SHORT)


def quietly(method: Callable[P, None]) -> Callable[P, None]:
    """If a method of an observer fails, follow the program no more: it goes on."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        observer: Any = args[0]
        try:
            if not observer.why_off:
                method(*args, **kwargs)
        except Exception as error:
            observer.turn_off(f"{type(error).__name__}: {error}")

    return call


class Observer:
    """The listener to a program's entries."""

    def __init__(self) -> None:
        self.program = Program()
        self.steps = StepRows()
        self.shortage: Shortage | None = None
        """The last one."""
        self.why_off = ""
        """Why the program is not followed any more."""
        self._entries = ProgramEntries(self)
        self.sampler = Sampler(self.program, self._entries)
        self.place = torch.device("cpu")
        """Of most parameters."""
        self._forwards = 0
        self._seen: tuple[int, str] | None = None  # the error that was noted

    def install(self) -> None:
        """Begin to follow."""
        self._entries.install()

    def remove(self) -> None:
        """Put back what was replaced."""
        self._entries.remove()
        self.sampler.drop()

    def turn_off(self, why: str) -> None:
        self.why_off = why
        self.sampler.drop()

    # -- events ----------------------------------------------------------------------------------

    @quietly
    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        entry = self.program.entry(module)
        if not entry.has_parameters:
            return
        n_bytes = bytes_of((args, kwargs))
        is_larger = entry.called(n_bytes, args, kwargs)
        turn = self.steps.count if self.program.optimizers else self._forwards
        grows = is_larger and may_grow(turn, self.sampler.n_samples)
        begins = entry.may_be_sampled and (grows or is_due(turn))
        if is_larger:
            self.place = self.program.place()
        self.sampler.forward(self.steps.count, begins=begins)
        self.steps.computes = True
        self.steps.batch_bytes += n_bytes
        self._forwards += 1

    @quietly
    def after_forward(self, module: nn.Module) -> None:
        if self.sampler.open is not None and not torch.is_grad_enabled():
            self.sampler.end()

    @quietly
    def before_backward(self) -> None:
        self.steps.computes = True
        self.program.n_backwards += 1
        self.sampler.makes(MemoryUse.WORKSPACES)

    @quietly
    def after_backward(self) -> None:
        self.sampler.settle()

    @quietly
    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.program.stepped(optimizer)
        self.sampler.makes(MemoryUse.WORKSPACES)

    @quietly
    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.sampler.settle()
        if not self.steps.computes:  # another optimizer's, after the same backward
            return
        uses = self.sampler.end()
        if uses is not None:
            self.program.remember()
        self.steps.end(self.place, uses)

    def failed(self, error: BaseException) -> None:
        if is_shortage(error) and self._seen != (id(error), str(error)):
            self._seen = id(error), str(error)
            self._note(error)

    @quietly
    def _note(self, error: BaseException) -> None:
        budget = error if isinstance(error, BudgetError) else BudgetError("")
        self.shortage = Shortage(
            step=self.steps.count,
            message=str(error.args[0]) if isinstance(error, BudgetError) else str(error),
            stack=lines_of(error),
            picture=self.now("when memory ran out"),
            fragments=fragments(self.place),
            advice=budget.advice,
            tier=budget.tier,
            needed_bytes=budget.needed_bytes,
        )

    # -- pictures --------------------------------------------------------------------------------

    def now(self, when: str) -> Picture:
        """Return what holds memory now: each allocation in a sample, else what has an owner."""
        sample = self.sampler.open
        if sample is not None and not sample.broken:
            sample.settle(self.program.owned())
            return sample.now(when)
        parts = [*self._owned(), *self._charged()]
        counts = allocated(self.place)
        if counts is not None:
            rest = counts.now_bytes - sum(part.n_bytes for part in parts)
            parts.append(HeldStorage(MemoryUse.OTHER, NO_OWNER, "", (), max(0, rest)))
        return picture(when, self.steps.count, parts, has_stacks=False)

    def _owned(self) -> Iterator[HeldStorage]:
        seen = set()
        for use, module, tensor in self.program.owned():
            storage = storage_of(tensor)
            if storage is not None and storage.device == self.place:
                if storage._cdata not in seen:
                    yield HeldStorage(use, module, "", (), storage.nbytes())
                seen.add(storage._cdata)

    def _charged(self) -> Iterator[HeldStorage]:
        """Yield what models that hetero manages have on each tier, by its own ledger."""
        for model in self.program.prepared():
            ledger = engine_of(model).setup.ledger
            for tier in ledger.budgets:
                for kind, use in USES.items():
                    name = f"{type(model).__name__} on {tier.name}"
                    yield HeldStorage(use, name, "", (), ledger.used(tier, kind))
