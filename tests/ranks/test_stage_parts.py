"""Stages that lack something which other stages of their model have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from hetero.errors import ConfigError, DivergenceError, HeteroError
from hetero.parallel.splitting import split
from hetero.testing.ranks import Died, outcomes, run_ranks
from tests.ranks.test_pipelines import HBM, RANKS, SETTINGS, optimizer_of, stage_of
from tests.ranks.test_split import HBM as SPLIT_HBM
from tests.ranks.test_split import MICRO_BATCHES, loss_of, made, stepped, words


def trained(rank: int, frozen: int, folder: Path | None) -> list[torch.Tensor]:
    """Train, clipped: the other stage's gradients are all that there are."""
    found = split(made("gpt"), {"pp": RANKS}, "1F1B", batch=words(0)[:1])
    stages: Any = found.stages.requires_grad_(rank != frozen)
    optimizer: Any = optimizer_of(stages, "adamw")
    if folder is not None:
        stages, optimizer = hetero.prepare(stages, optimizer, hbm=2 * SPLIT_HBM, **SETTINGS)
    schedule = found.schedule(MICRO_BATCHES, loss_of)
    seen = []
    for number in range(2):
        seen += stepped(found, schedule, words(number))
        if folder is not None:
            optimizer.clip_grad_norm_(0.05)
        elif rank != frozen:
            nn.utils.clip_grad_norm_(stages.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    seen += [value.clone() for value in stages.state_dict().values()]
    if folder is not None:
        hetero.save_checkpoint(folder, stages, optimizer)
        hetero.load_checkpoint(folder, stages, optimizer)
        hetero.release(stages, optimizer)
    return seen


def is_same(rank: int, frozen: int, folder: Path) -> bool:
    ours, plain = trained(rank, frozen, folder), trained(rank, frozen, None)
    return len(ours) == len(plain) and all(map(torch.equal, ours, plain))


@pytest.mark.campaign(seconds=4)
@pytest.mark.parametrize("frozen", [0, 1])
def test_a_stage_that_trains_nothing_clips_and_saves_with_the_others(
    tmp_path: Path, frozen: int
) -> None:
    assert all(run_ranks(RANKS, is_same, frozen, tmp_path))


def without_an_optimizer(rank: int) -> None:
    model = nn.ModuleList([stage_of(rank)]).requires_grad_(rank == 1)
    optimizer = optimizer_of(model, "adamw") if rank else None
    hetero.prepare(model, optimizer, hbm=HBM[1], **SETTINGS)


def test_a_stage_without_an_optimizer_is_told_from_the_others() -> None:
    """Its rank would not come to clips and saves."""
    for each in outcomes(RANKS, without_an_optimizer):
        assert isinstance(each, Died)
        assert isinstance(each.error, DivergenceError), each.text
        assert "rank 0: stages with no optimizer; rank 1: stages with an" in str(each.error)
        assert "where all parameters are frozen, too" in each.error.advice


def prepared(rank: int, settings: dict[str, Any]) -> HeteroError | None:
    model: Any = nn.ModuleDict({f"part{rank}": stage_of(rank)}).requires_grad_(rank == 0)
    optimizer: Any = optimizer_of(model, "adamw")
    settings = {**SETTINGS, **settings, "hbm": 2 * HBM[1]}
    try:
        model, optimizer = hetero.prepare(model, optimizer, **settings)
    except HeteroError as error:
        return error
    hetero.release(model, optimizer)
    return None


SETTINGS_OF_ONE = (
    {"frozen": "int8"},
    {"precision": "bf16", "keep_fp32": ("part1.0",)},
    {"frozen": "nf4", "keep_exact": ("part1.0",)},
    {"units": ("part0.*", "part1.*")},
)
SETTINGS_OF_NONE = tuple(
    {setting: ("part0.*", "part2.*")} for setting in ("units", "keep_fp32", "keep_exact")
)


def prepared_with_each(rank: int, *settings: dict[str, Any]) -> list[HeteroError | None]:
    return [prepared(rank, each) for each in settings]


def test_one_stage_may_have_what_settings_name() -> None:
    for found in run_ranks(RANKS, prepared_with_each, *SETTINGS_OF_ONE):
        assert found == [None] * len(SETTINGS_OF_ONE)


def test_what_no_stage_has_is_refused_on_all_ranks() -> None:
    for found in run_ranks(RANKS, prepared_with_each, *SETTINGS_OF_NONE):
        for error, settings in zip(found, SETTINGS_OF_NONE, strict=True):
            assert isinstance(error, ConfigError)
            assert f"{next(iter(settings))}: 'part2.*' matches no module" in str(error)
