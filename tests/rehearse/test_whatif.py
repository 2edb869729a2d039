"""Estimates of other settings, next to rehearsals of these."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from hetero.rehearse.plan import Plan, plan
from hetero.report.views import WhatIf

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
    assert all(said[label].fits for label in ("recompute every unit", "2 GPUs in this machine"))
    assert float(said["largest micro-batch"].change.split()[0]) >= 1
    assert float(said["largest model"].change.split()[0]) >= 1
