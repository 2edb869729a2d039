"""A program on the emulated device, plain and then prepared; what both record is the same bits.

A program is a function of a `Side`. The plain side runs first and is gone when the prepared one
runs: what it holds on the device would count there.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hetero.api import engine_of, prepare_tuned
from hetero.config import Config
from hetero.errors import BudgetError
from hetero.train.model.units import MARK
from tests.emulator import fake
from tests.equivalence.harness import MakeOptimizer, grads, one_step, paged, same, states, values
from tests.equivalence.zoo import Case

TRIES = 40
STEPS = 5
ENOUGH = 10_000_000


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return torch's rule, one parameter at a time: `foreach` rounds otherwise (also on CUDA)."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


class Record(NamedTuple):
    what: str
    tensors: list[Tensor | None]


@dataclass
class Side:
    """One side of a comparison: plain torch where ``settings`` is None, else hetero."""

    settings: dict[str, Any] | None = None
    expected: list[Record] = field(default_factory=list)
    """What the plain side recorded."""
    records: list[Record] = field(default_factory=list)
    models: list[nn.Module] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    """Fetches, evictions and misses of the prepared models."""

    @property
    def is_plain(self) -> bool:
        return self.settings is None

    def prepare(
        self, model: nn.Module, make: MakeOptimizer = sgd, **settings: Any
    ) -> tuple[Any, Any]:
        """Return a model and an optimizer that compute on the device."""
        if self.settings is None:
            model = fake.on_device(model)
            return model, make(model)
        return self.prepared(model, make(model), **settings)

    def prepared(self, model: nn.Module, optimizer: Any, **settings: Any) -> Any:
        given = {"hbm": ENOUGH, "chunk_bytes": 256, **(self.settings or {}), **settings}
        tuning = given.pop("tuning", None)
        with paged():
            config = Config.load(device=fake.device(), **given)
            found = prepare_tuned(model, optimizer, config, tuning)
        self.models.append(model)
        return found

    def record(self, what: str, *tensors: Any) -> None:
        """Write down tensors, numbers or None; the prepared side's have to be the plain one's."""
        row = Record(what, [None if t is None else torch.as_tensor(t).cpu() for t in tensors])
        row = Record(what, [None if t is None else t.detach().clone() for t in row.tensors])
        if not self.is_plain:
            theirs = self.expected[len(self.records)]
            assert theirs.what == what
            same(theirs.tensors, row.tensors, what)
        self.records.append(row)

    def close_step(self, model: nn.Module, optimizer: Any, number: int) -> None:
        """Record gradients, make the step, and record the weights."""
        self.record(f"gradients of step {number}", *grads(model))
        optimizer.step()
        optimizer.zero_grad()
        self.record(f"weights after step {number}", *values(model))
        if not self.is_plain and is_prepared(model):
            self.counts.update(engine_of(model).setup.stats.counts)

    def record_states(self, model: nn.Module, optimizer: Any) -> None:
        self.record("states of the optimizer", *states(model, optimizer))


Program = Callable[[Side], None]


def zoo(case: Case, make: MakeOptimizer, steps: int = STEPS) -> Program:
    """Return the program that trains a case of the zoo by its own loop."""
    there = replace(case, data=lambda generator: case.data(generator).to(fake.PLACE))

    def run(side: Side) -> None:
        model, optimizer = side.prepare(case.build(), make)
        for number in range(steps):
            results = one_step(there, model, optimizer, number, prepared=not side.is_plain)
            side.record(f"losses of step {number}", *results)
            side.close_step(model, optimizer, number)
        side.record_states(model, optimizer)

    return run


def ran(program: Program, side: Side) -> Side:
    torch.manual_seed(11)
    program(side)
    gc.collect()
    return side


def check(program: Program, **settings: Any) -> Side:
    """Run both sides, and return the prepared one."""
    plain = ran(program, Side())
    return finished(program, plain, settings)


def check_smallest(program: Program, hbm: int = 20_000, **settings: Any) -> Side:
    """As `check`, at the smallest budget that works, or nearly: it grows by a quarter."""
    plain = ran(program, Side())
    for _ in range(TRIES):
        try:
            return finished(program, plain, {**settings, "hbm": hbm})
        except BudgetError as error:
            hbm = max(error.needed_bytes, hbm * 5 // 4)
        gc.collect()  # of what failed
    raise AssertionError(f"{hbm} bytes are too few")


def finished(program: Program, plain: Side, settings: dict[str, Any]) -> Side:
    ours = ran(program, Side(settings, plain.records))
    assert len(ours.records) == len(plain.records)
    for model in filter(is_prepared, ours.models):
        assert engine_of(model).residence.name == "paged"
    return ours


def is_prepared(model: nn.Module) -> bool:
    return MARK in model.__dict__


def assert_no_pageable_copies() -> None:
    """Copies that do not wait are between page-locked memory and the device."""
    copies = fake.copies()
    assert [kind for kind in copies if "asynchronous" in kind and "pageable" in kind] == []
    assert copies["asynchronous copy up"]
