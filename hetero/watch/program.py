"""The modules and optimizers that a program runs (floor 4)."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import nn

from hetero.internals import tree_iter, without_modes
from hetero.rehearse.twin import Twin, batch_twin, twin_of
from hetero.train.model.units import MARK
from hetero.watch.owners import Owned, is_prepared, owned

MOST_ENTRIES = 256  # until those of modules that are gone are dropped


class Entry:
    """A module that the program calls, not from inside another one."""

    def __init__(self, module: nn.Module) -> None:
        self.ref = weakref.ref(module)
        self.has_parameters = next(module.parameters(), None) is not None
        self.may_be_sampled = not is_prepared(module) and not is_compiled(module)
        self.most_bytes = -1
        self.n_calls = 0
        self.trains = False
        self.batch: Any = None
        """Arguments of the largest call, without bytes; None if they have no twin."""
        self.twin: Twin | None = None
        """Of the model and its optimizer: the program may have dropped them when it ends."""

    def called(self, n_bytes: int, args: Any, kwargs: Any) -> bool:
        """Note a call; returns whether it is larger than all before."""
        trains = torch.is_grad_enabled()
        self.n_calls += 1
        if n_bytes <= self.most_bytes and self.trains >= trains:
            return False
        self.most_bytes, self.trains = max(n_bytes, self.most_bytes), self.trains or trains
        with suppress(Exception), without_modes():  # of the user's, which would see it
            self.batch = batch_twin((args, kwargs))
        return True

    def remember(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Keep what a rehearsal needs, without bytes; a model that cannot be copied has none."""
        if self.trains and self.twin is None and self.may_be_sampled:
            with suppress(Exception), without_modes():
                self.twin = twin_of(model, optimizer)


def is_compiled(module: nn.Module) -> bool:
    """Whether code in a module is compiled: it has no operations to see."""
    return any(
        each.__dict__.get("_compiled_call_impl") is not None or "_orig_mod" in each._modules
        for each in module.modules()
    )


def bytes_of(given: Any) -> int:
    return sum(t.nbytes for t in tree_iter(given) if type(t) is torch.Tensor)


class Subject(NamedTuple):
    """A model to rehearse."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    entry: Entry

    @property
    def numel(self) -> int:
        return sum(param.numel() for param in self.model.parameters())


class Program:
    """What is known of a program; it holds no tensor and no module."""

    def __init__(self) -> None:
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.n_backwards = 0
        self.n_optimizers = 0
        """The most that there were at once, of those that made a step."""
        self._entries: dict[int, Entry] = {}

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizers.add(optimizer)
        self.n_optimizers = max(self.n_optimizers, len(self.optimizers))

    @property
    def only_keeps_graphs(self) -> bool:
        """Whether it never went backward."""
        return not self.n_backwards and not self.n_optimizers

    def entry(self, module: nn.Module) -> Entry:
        """Return the entry of a module that is called."""
        found = self._entries.get(id(module))
        if found is None or found.ref() is not module:
            if len(self._entries) >= MOST_ENTRIES:  # a program that makes modules as it goes
                self._entries = {k: e for k, e in self._entries.items() if e.ref() is not None}
            found = self._entries[id(module)] = Entry(module)
        return found

    def models(self) -> list[nn.Module]:
        """Return the modules with parameters that were called, without those inside others."""
        entries = (entry for entry in self._entries.values() if entry.has_parameters)
        found = [module for entry in entries if (module := entry.ref()) is not None]
        inner = {id(each) for m in found for each in m.modules() if each is not m}
        return [module for module in found if id(module) not in inner]

    def prepared(self) -> list[nn.Module]:
        """Return the models that hetero manages already."""
        return [each for m in self.models() for each in m.modules() if MARK in each.__dict__]

    def remember(self) -> None:
        """Keep twins of the models that train, and of their optimizers."""
        for model in self.models():
            self.entry(model).remember(model, self.optimizer_of(model))

    def main(self) -> Subject | None:
        """Return the plain model with most parameters, of those that train if there are any."""
        rows = self.plain()
        return max(rows, key=lambda row: (row.entry.trains, row.numel), default=None)

    def plain(self) -> list[Subject]:
        """Return the models that hetero does not manage; those that live, if there are any."""
        plain = [model for model in self.models() if not is_prepared(model)]
        rows = [Subject(m, self.optimizer_of(m), self.entry(m)) for m in plain]
        if not rows:
            kept = (entry for entry in self._entries.values() if entry.twin is not None)
            rows = [Subject(*entry.twin, entry) for entry in kept if entry.twin is not None]
        return rows

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer | None:
        """Return the optimizer that steps a model's parameters, and no other's."""
        own = {id(param) for param in model.parameters()}
        for optimizer in self.optimizers:
            if all(id(p) in own for group in optimizer.param_groups for p in group["params"]):
                return optimizer
        return None

    def place(self) -> torch.device:
        """Return the device on which most parameters are; the CPU without any."""
        sizes: dict[torch.device, int] = {}
        for model in self.models():
            for param in model.parameters():
                sizes[param.device] = sizes.get(param.device, 0) + param.nbytes
        return max(sizes, key=lambda place: sizes[place], default=torch.device("cpu"))

    def owned(self) -> Iterator[Owned]:
        """Yield the tensors that models and optimizers own."""
        return owned(self.models(), self.optimizers)
