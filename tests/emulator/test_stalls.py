"""A planned steady step waits for the device only where docs/cuda.md says that it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import hetero
from hetero.train.engine.tuning import Tuning
from tests.campaigns.harness import tokens_of
from tests.emulator import fake
from tests.emulator.harness import Side, adamw
from tests.emulator.programs import net
from tests.emulator.stalls import (
    ALWAYS,
    CLIPPING,
    CLIPPING_SUMS,
    FINITE,
    OFFLOADING,
    PLACES,
    STAGE_FULL,
    Place,
    unexpected,
)

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "cuda.md"
STEPS = 8  # the plan is made in the second step; policies and room settle


class Row(NamedTuple):
    allowed: set[Place]
    settings: dict[str, Any]
    parts: int = 1
    clips: bool = False


TWO_BYTES = {"hbm": 300_000, "activations": "keep"}
"""Two-byte numbers are slow on CPUs: by measured times "auto" may find that offloading is free."""
ROWS = {
    "keep": Row(ALWAYS, {"activations": "keep", "hbm": 300_000}),
    "everything fits": Row(ALWAYS, {"activations": "keep", "hbm": 2_000_000}),
    "recompute": Row(ALWAYS, {"activations": "recompute", "hbm": 150_000}),
    "offload": Row(ALWAYS | OFFLOADING, {"activations": "offload", "hbm": 150_000}),
    "auto": Row(ALWAYS | OFFLOADING, {"hbm": 150_000}),
    "accumulate": Row(ALWAYS | {STAGE_FULL}, {"hbm": 300_000}, parts=3),
    "clip": Row(ALWAYS | CLIPPING, {"hbm": 300_000}, clips=True),
    "clip in step": Row(ALWAYS | CLIPPING, {"hbm": 300_000, "max_grad_norm": 1.0}),
    "bf16": Row(ALWAYS, {**TWO_BYTES, "precision": "bf16"}),
    "bf16 clip": Row(ALWAYS | CLIPPING, {**TWO_BYTES, "precision": "bf16"}, clips=True),
    "clip sums": Row(ALWAYS | CLIPPING_SUMS, {"hbm": 300_000}, parts=2, clips=True),
    "bf16 clip sums": Row(
        ALWAYS | CLIPPING_SUMS, {**TWO_BYTES, "precision": "bf16"}, parts=2, clips=True
    ),
    "fp16": Row(ALWAYS | {FINITE}, {**TWO_BYTES, "precision": "fp16"}),
    "updates in backward": Row(ALWAYS, {"hbm": 300_000, "updates": "backward"}),
}


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    return model(tokens).float().square().mean()


def step(row: Row, model: Any, optimizer: Any, tokens: Tensor) -> None:
    for _ in range(row.parts):
        hetero.backward(loss_of(model, tokens))
    if row.clips:
        optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture(autouse=True)
def not_paranoid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests of homes on HBM are made on the host."""
    monkeypatch.setenv("HETERO_PARANOID", "0")


@pytest.mark.campaign(seconds=4)
@pytest.mark.parametrize("homes_on_hbm", [False, True])
@pytest.mark.parametrize("name", ROWS)
def test_a_steady_step_waits_only_where_it_is_said(
    name: str, homes_on_hbm: bool, watched: None
) -> None:
    row = ROWS[name]
    tokens = tokens_of(1).to(fake.PLACE)
    tuning = Tuning(homes_on_hbm=homes_on_hbm)
    model, optimizer = net(Side({}), adamw, tuning=tuning, **row.settings)
    for _ in range(STEPS):
        fake.forget_stalls()
        step(row, model, optimizer, tokens)
    assert unexpected(fake.stalls(), row.allowed) == []
    hetero.release(model, optimizer)


def test_a_number_that_the_program_reads_is_a_wait_of_its_own(watched: None) -> None:
    tokens = tokens_of(1).to(fake.PLACE)
    model, optimizer = net(Side({}), hbm=300_000, activations="keep")
    step(ROWS["keep"], model, optimizer, tokens)
    fake.forget_stalls()
    loss_of(model, tokens).item()
    assert [stall.where for stall in fake.stalls()] == ["outside of hetero"]
    hetero.release(model, optimizer)


def test_a_forward_that_is_planned_does_not_wait(watched: None) -> None:
    tokens = tokens_of(1).to(fake.PLACE)
    model, optimizer = net(Side({}), hbm=300_000, activations="keep")
    for _ in range(STEPS):
        step(ROWS["keep"], model, optimizer, tokens)
    fake.forget_stalls()
    loss_of(model, tokens)
    assert fake.stalls() == {}
    hetero.release(model, optimizer)


@torch.no_grad()
def test_tokens_are_made_without_a_wait(watched: None) -> None:
    model: Any = net(Side())[0].eval()
    model = Side({"hbm": 100_000}).prepared(model.cpu(), None)
    tokens = tokens_of(1).to(fake.PLACE)
    for _ in range(STEPS):
        fake.forget_stalls()
        model(tokens)
    assert fake.stalls() == {}
    hetero.release(model)


def test_the_document_names_each_place() -> None:
    rows = [line.split("|")[1] for line in DOCUMENT.read_text().splitlines() if "|" in line]
    assert {row.strip().strip("`") for row in rows} >= {str(place) for place in PLACES}
