"""The law of placement: one hash of the weights, whatever the placement."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping

import pytest

from hetero.device import SimDevice
from hetero.plan.schedule import Op, Schedule, Shape
from hetero.plan.trace import Trace
from hetero.train.engine.tuning import Tuning
from tests.equivalence.harness import Seen, adamw, compare, measure
from tests.equivalence.zoo import BY_NAME

COMBINATIONS = 30


def run(number: int, name: str = "clip_norm") -> Seen:
    """Train under a combination drawn from ``number``."""
    draw = random.Random(number)
    chunk_bytes = draw.choice([128, 256, 512, 2048])
    case = BY_NAME[name]
    budget = measure(case, adamw, chunk_bytes)
    device = draw.choice(["cpu", SimDevice(seed=number, checked=True, lazy=draw.random())])
    order = draw.choice([None, lambda b: float(b), lambda b: float(-b), lambda b: draw.random()])
    tuning = Tuning(depth=draw.choice([None, 0, 1, 2, 5]), victim=order)
    hbm = budget.of(draw.choice([0.2, 0.3, 0.5, 0.8])) + budget.smallest // 2
    return compare(case, adamw, hbm=hbm, chunk_bytes=chunk_bytes, device=device, tuning=tuning)


@pytest.mark.campaign(seconds=7)
def test_thirty_placements_give_one_hash() -> None:
    seen = [run(number) for number in range(COMBINATIONS)]
    assert len({hashlib.sha256(s.weights).hexdigest() for s in seen}) == 1
    assert all(s.evictions >= 3 and s.mode == "paged" for s in seen)


def wrong(trace: Trace, shapes: Mapping[int, Shape], limit: int) -> Schedule:
    """A schedule of random fetches at random places."""
    draw = random.Random(len(trace.accesses))
    rows = [
        tuple(
            Op(draw.choice(list(shapes)), draw.randrange(limit)) for _ in range(draw.randrange(4))
        )
        for _ in range(len(trace.accesses) + 1)
    ]
    return Schedule(trace, tuple(rows), limit)


@pytest.mark.parametrize("name", ["clip_norm", "attention", "checkpoint"])
def test_a_wrong_schedule_gives_the_right_numbers(name: str) -> None:
    case = BY_NAME[name]
    budget = measure(case, adamw, 256)
    device = SimDevice(seed=5, checked=True)
    tuning = Tuning(schedule=wrong)
    seen = compare(case, adamw, hbm=budget.of(0.4), device=device, tuning=tuning)
    assert seen.misses > 0 and seen.evictions >= 3
