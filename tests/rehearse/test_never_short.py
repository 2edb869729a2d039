"""A plan that is marked as fitting runs, and one that is not runs with what it says is missing."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hetero
from benchmarks.plan import Convolutions
from hetero.rehearse.attempts import BUDGETS
from hetero.rehearse.plan import Plan
from tests.equivalence.zoo import BY_NAME
from tests.rehearse.test_identity import ZOO, WithTargets

PROFILE = "laptop-4c-avx2-ddr4"
STEPS = 6
DRAWS = 100
STATES = 4  # parameters, gradients and two moments
ACTIVATIONS = ("auto", "auto", "keep", "recompute", "offload")


@dataclass(frozen=True)
class Draw:
    """A model, what it is called with, and settings."""

    name: str
    build: Callable[[], nn.Module]
    batch: torch.Tensor
    settings: dict[str, Any]


def drawn(number: int) -> Draw:
    """Return the draw of a number; budgets are around what states and activations take."""
    dice = random.Random(number)
    name, build, batch = a_model(dice)
    states = STATES * sum(p.nbytes for p in build().parameters())
    settings = {
        "device": "cpu:sim",
        "profile": PROFILE,
        "hbm": around(dice, states, -3.0, 1.0),
        "chunk_bytes": dice.choice((256, 512, 1024, 4096)),
        "activations": dice.choice(ACTIVATIONS),
    }
    if dice.random() < 0.3:
        settings["host"] = around(dice, states, -1.0, 2.0)
        if dice.random() < 0.7:
            settings["nvme"] = Path.cwd()
        if "nvme" in settings and dice.random() < 0.5:
            settings["nvme_bytes"] = around(dice, states, -2.0, 1.0)
    return Draw(f"{number} {name}", build, batch, settings)


def a_model(dice: random.Random) -> tuple[str, Callable[[], nn.Module], torch.Tensor]:
    if dice.random() < 0.5:
        case = BY_NAME[dice.choice(ZOO)]
        return case.name, case.build, case.data(torch.Generator().manual_seed(0))
    shape = {
        "width": dice.choice((16, 32, 64)),
        "layers": dice.randint(2, 6),
        "context": dice.choice((16, 32)),
        "checkpoint_blocks": dice.random() < 0.3,
        "tied_head": dice.random() < 0.3,
    }
    tokens = torch.randint(0, 256, (dice.randint(1, 4), shape["context"]))
    return f"gpt {shape}", partial(WithTargets, **shape), tokens


def around(dice: random.Random, n_bytes: int, low: float, high: float) -> int:
    return int(n_bytes * 2 ** dice.uniform(low, high))


def loss_of(output: Any) -> torch.Tensor:
    """Return a scalar of what a model of the zoo returns, wherever it computes."""
    output = getattr(output, "logits", output)
    output = output["logits"] if isinstance(output, dict) else output
    if output.dim() == 0:
        return output
    rows = output.flatten(0, -2)
    return F.cross_entropy(rows, torch.zeros(len(rows), dtype=torch.long, device=rows.device))


@cache
def planned(number: int) -> Plan:
    return plan_of(drawn(number))


def plan_of(draw: Draw) -> Plan:
    torch.manual_seed(0)
    return hetero.plan(draw.build(), draw.batch, loss=loss_of, estimates=False, **draw.settings)


def run(draw: Draw) -> None:
    """Train for a few steps."""
    torch.manual_seed(0)
    model: Any = draw.build()
    optimizer: Any = torch.optim.AdamW(model.parameters())
    model, optimizer = hetero.prepare(model, optimizer, **draw.settings)
    for _ in range(STEPS):
        loss_of(model(draw.batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
    hetero.release(model)


def as_planned(draw: Draw, plan: Plan, disk: Path) -> Draw:
    """Return a draw with what is missing, and a directory of its own."""
    needed = {BUDGETS[row.tier]: row.needed_bytes for row in plan.shortfalls}
    there = {"nvme": disk} if "nvme" in draw.settings else {}
    return replace(draw, settings={**draw.settings, **needed, **there})


@pytest.mark.campaign(seconds=4)
@pytest.mark.parametrize("number", range(DRAWS))
def test_what_is_planned_to_fit_runs(number: int, disk: Path) -> None:
    plan = planned(number)

    assert plan.fits == (not plan.shortfalls)
    run(as_planned(drawn(number), plan, disk))  # no BudgetError


@pytest.mark.slow  # six plans
def test_draws_are_of_both_kinds() -> None:
    assert {planned(number).fits for number in range(0, 42, 7)} == {True, False}


@pytest.mark.slow
def test_a_peak_just_above_the_least_that_runs_is_no_surprise_later(tmp_path: Path) -> None:
    settings = {
        "device": "cpu:sim",
        "profile": PROFILE,
        "hbm": 226_252,
        "chunk_bytes": 2**14,
    }
    draw = Draw("convolutions", partial(Convolutions, 32, 5), torch.zeros(4, 3, 24, 24), settings)
    plan = plan_of(draw)

    assert not plan.fits
    run(as_planned(draw, plan, tmp_path))  # no BudgetError
