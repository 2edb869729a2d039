"""Estimates of other settings, next to rehearsals of these."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from hetero.rehearse.plan import Plan, plan
from hetero.report.views import WhatIf
from hetero.types import Kind, Tier

pytest.importorskip("transformers")

LAYER = 16_779_264  # parameters; of all else as many as of one more
NEAR = 0.15  # how far an estimate may be from the rehearsal


def planned(layers: int = 5, **given: Any) -> Plan:
    """Plan a model for whose homes neither HBM nor RAM has room."""
    config = {
        "model_type": "llama",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "vocab_size": 8192,
    }
    settings = {"profile": "h200-16c", "precision": "bf16", "hbm": "1200MiB", "host": "1600MiB"}
    return plan(config, (2, 512), **{**settings, "estimates": False, **given})


@functools.cache
def rows() -> dict[str, WhatIf]:
    return {row.label: row for row in planned(estimates=True).what_if}


GPUS: dict[str, Any] = {"layers": 2, "hbm": "1200MiB"}
OF_ALL, OF_EACH = "6400MiB", "3200MiB"  # RAM of two


@functools.cache
def rows_of_gpus() -> dict[str, WhatIf]:
    return {row.label: row for row in planned(estimates=True, **GPUS, host=OF_ALL).what_if}


@pytest.mark.parametrize("activations", ["recompute", "offload"])
def test_an_estimate_is_near_the_rehearsal_of_its_setting(activations: str) -> None:
    """Homes on HBM cross no link: once rows took all weights to go up twice a step, and a forward
    that is computed again cost an 8 B model on an H200 nothing."""
    row = rows()[f"{activations} every unit"]
    found = planned(activations=activations)

    assert row.step_seconds == pytest.approx(found.step_seconds, rel=NEAR)
    assert row.fits is found.fits


def test_the_largest_model_has_homes_on_hbm_too() -> None:
    (label,) = (label for label in rows() if label.startswith("largest model"))
    millions = int(label.removeprefix("largest model: ").removesuffix(" M parameters"))
    layers = millions * 10**6 / LAYER - 1

    assert planned(int((1 - NEAR) * layers)).fits
    assert not planned(int((1 + 2 * NEAR) * layers)).fits


def test_rows_of_a_model_that_stays_fit_as_it_does() -> None:
    """Its homes are on HBM: RAM that would not do if it were paged is no lack of it."""
    found = planned(hbm="4GiB", host="64MiB", precision="fp32", estimates=True)
    said = {row.label.partition(":")[0]: row for row in found.what_if}

    assert found.fits and not found.rehearsal.units
    assert said["recompute every unit"].fits
    assert not said["2 GPUs in this machine"].fits  # ranks of a machine keep homes in RAM
    assert float(said["largest micro-batch"].change.split()[0]) >= 1
    assert float(said["largest model"].change.split()[0]) >= 1


def test_a_row_of_several_gpus_is_the_plan_of_one_of_the_ranks() -> None:
    """It took each GPU to be as fast as one that is alone: 2 H200 made 21,000 tokens/s of 8 B, and
    8 of them 84,000; plans with --ranks said 6,600 and 21,000."""
    row = next(row for label, row in rows_of_gpus().items() if label[0] == "2")
    found = planned(mesh={"dp_shard": 2}, **GPUS, host=OF_EACH)

    assert found.fits and row.fits and row.how == "rehearsed"
    assert row.step_seconds == pytest.approx(found.step_seconds)
    assert row.tokens_per_second == pytest.approx(2 * found.tokens_per_second)


def test_a_row_of_gpus_that_gather_is_the_plan_of_one_of_them_with_homes_on_hbm() -> None:
    said = rows_of_gpus()
    row, read = said["2 GPUs, gather_shares"], said["2 GPUs in this machine"]
    found = planned(mesh={"dp_shard": 2}, gather_shares=True, **GPUS, host=OF_EACH)

    assert found.fits and row.fits
    assert row.step_seconds == pytest.approx(found.step_seconds)
    assert row.step_seconds < read.step_seconds
    assert found.rehearsal.kinds[Tier.HBM, Kind.STATE]


def test_a_row_of_several_gpus_divides_what_ram_was_given() -> None:
    short = rows()["8 GPUs in this machine"]
    found = planned(mesh={"dp_shard": 8}, host="200MiB")

    assert not short.fits and not found.fits
    assert short.step_seconds == pytest.approx(found.step_seconds)
    assert short.change.startswith("HOST is ")


def test_a_budget_that_ranks_cannot_divide_ends_no_plan() -> None:
    assert planned(estimates=True, host=7).what_if[-1].fits is False


def test_ram_without_room_for_anything_ends_no_plan() -> None:
    found = planned(2, host=7)

    assert not found.fits and [row.tier for row in found.shortfalls] == ["HOST"]


def test_a_machine_has_no_row_of_more_gpus_than_it_has() -> None:
    labels = [row.label for row in planned(2, estimates=True, profile="gb10").what_if]

    assert not any("GPUs" in label for label in labels)
