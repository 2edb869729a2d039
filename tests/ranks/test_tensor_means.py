"""A mean over an axis that ranks divide is trained as by torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hetero
from hetero.testing.ranks import run_ranks
from tests.ranks.tensor_models import (
    TIGHT,
    WORDS,
    TensorRun,
    Trained,
    built,
    difference,
    found_in,
    whole,
)

RUN = TensorRun("vocabulary", "sgd")


def trained(is_paged: bool) -> Trained:
    model, optimizer = built(RUN)
    if is_paged:
        model, prepared = hetero.prepare(model, optimizer, **TIGHT)
    step: Any = prepared if is_paged else optimizer
    losses = []
    for number in range(RUN.steps):
        source = torch.Generator().manual_seed(number)
        logits = model(torch.randint(0, WORDS, (3, 4), generator=source))
        loss = logits.pow(2).mean()
        assert loss.placements[0].is_partial()  # of parts of the words
        loss.backward()
        step.step()
        step.zero_grad()
        losses.append(float(whole(loss.detach())))
    found = found_in(model, step)
    found.losses = losses
    assert not is_paged or hetero.status(model).evictions >= 3
    return found


def compared(rank: int) -> list[str]:
    return difference(trained(is_paged=True), trained(is_paged=False))


@pytest.mark.slow
def test_a_mean_over_an_axis_that_ranks_divide_is_trained_as_by_torch() -> None:
    """torch 2.13 has the way back of it; releases before raise in plain torch, too."""
    for odd in run_ranks(2, compared):
        assert not odd
