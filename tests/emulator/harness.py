"""A plain model and a prepared one, side by side on the emulated device, compared bit by bit."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from hetero.api import engine_of, prepare_tuned
from hetero.config import Config
from hetero.errors import BudgetError
from hetero.train.engine import budget
from hetero.train.engine.tuning import Tuning
from tests.emulator import fake
from tests.equivalence.harness import MakeOptimizer, grads, one_step, same, states, values
from tests.equivalence.zoo import Case

TRIES = 40
STEPS = 5
CHUNK_BYTES = 256


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return torch's rule, one parameter at a time: `foreach` rounds otherwise (also on CUDA)."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


@contextlib.contextmanager
def paged() -> Iterator[None]:
    """Let models be paged that would fit on the device."""
    with mock.patch.object(budget, "stays_resident", lambda *_, **__: False):
        yield


@dataclass
class Side:
    """A model, its optimizer, and whether it is prepared."""

    model: Any
    optimizer: Any
    prepared: bool


@dataclass
class Pair:
    """The two sides; what is asked of one is asked of the other."""

    plain: Side
    ours: Side
    counts: Counter[str] = field(default_factory=Counter)
    """What the prepared side did: fetches, evictions, misses."""

    def both(self, run: Callable[[Side], list[Any]], what: str) -> None:
        """Run both sides from one seed, and compare what they return."""
        results = []
        for side in (self.plain, self.ours):
            torch.manual_seed(1000)
            results.append(on_cpu(run(side)))
        same(*results, what)

    def step(self, case: Case, number: int) -> None:
        """Make a step of a case's own loop; compare losses, gradients and weights."""

        def run(side: Any) -> list[Any]:
            return one_step(case, side.model, side.optimizer, number, prepared=side.prepared)

        self.both(run, f"{case.name}: losses of step {number}")
        self.both(lambda side: grads(side.model), f"{case.name}: gradients of step {number}")
        self.both(close_step, f"{case.name}: step {number}")
        self.both(lambda side: values(side.model), f"{case.name}: weights after step {number}")
        self.counts.update(engine_of(self.ours.model).setup.stats.counts)

    def check_states(self) -> None:
        self.both(lambda side: states(side.model, side.optimizer), "states of the optimizer")


def close_step(side: Side) -> list[Any]:
    side.optimizer.step()
    side.optimizer.zero_grad()
    return []


def pair(
    model: nn.Module,
    make: MakeOptimizer = sgd,
    *,
    tuning: Tuning | None = None,
    **settings: Any,
) -> Pair:
    """Prepare a copy of a model, and put the model itself on the device."""
    twin = copy.deepcopy(model)
    config = Config.load(device=fake.device(), **{"chunk_bytes": CHUNK_BYTES, **settings})
    with paged():
        ours = Side(*prepare_tuned(twin, make(twin), config, tuning), prepared=True)
    plain = fake.on_device(model)
    return Pair(Side(plain, make(plain), prepared=False), ours)


def compare(case: Case, make: MakeOptimizer, *, steps: int = STEPS, **settings: Any) -> Pair:
    """Train both sides on the device; any difference is an AssertionError."""
    torch.manual_seed(11)
    sides = pair(case.build(), make, **settings)
    case = there(case)
    for number in range(steps):
        sides.step(case, number)
    sides.check_states()
    assert engine_of(sides.ours.model).residence.name == "paged"
    return sides


def smallest(run: Callable[[int], Pair], hbm: int = 20_000) -> Pair:
    """Run at the smallest budget that works, or nearly: steps grow by a quarter."""
    for _ in range(TRIES):
        try:
            return run(hbm)
        except BudgetError as error:
            hbm = max(error.needed_bytes, hbm * 5 // 4)
        gc.collect()  # or the failed one would count as a stranger on the device
    raise AssertionError(f"{hbm} bytes are too few")


def there(case: Case) -> Case:
    """Return a case whose data is on the device."""
    return replace(case, data=lambda generator: case.data(generator).to(fake.PLACE))


def on_cpu(tensors: list[Any]) -> list[Tensor | None]:
    return [None if tensor is None else torch.as_tensor(tensor).cpu() for tensor in tensors]


def assert_no_pageable_copies() -> None:
    """Copies that do not wait are between page-locked memory and the device."""
    copies = fake.copies()
    assert [kind for kind in copies if "asynchronous" in kind and "pageable" in kind] == []
    assert copies["asynchronous copy up"] and copies["asynchronous copy down"]
