"""Ranks that gather, on batches of unlike sizes: activations grow on one of them alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from hetero.testing.ranks import run_ranks
from tests.ranks import models
from tests.ranks.models import Run, assert_same

UNLIKE = Run(one_sided=False, rows=(2, 8, 5, 24), clip=None, steps=5)


@pytest.mark.campaign(seconds=3)
@pytest.mark.parametrize("n_ranks", [2, 3])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("hbm", [90_000, 160_000])
@pytest.mark.parametrize("activations", ["auto", "keep", "offload", "recompute"])
def test_ranks_that_gather_train_on_batches_of_unlike_sizes(
    activations: str, hbm: int, passes: int, n_ranks: int
) -> None:
    """A rank with a large batch asks the others to give up frames with it."""
    settings = {**UNLIKE.settings, "hbm": hbm, "activations": activations}
    run = replace(UNLIKE, settings=settings, passes=passes)
    expected = models.by_torch(run, n_ranks)
    for each in run_ranks(n_ranks, models.by_ranks, run):
        assert_same(each, expected)
        assert each.status.evictions > 0 or hbm > 90_000


def reads(rank: int, n_ranks: int, gathers: bool) -> tuple[list[torch.Tensor], int]:
    """Return what a model that is not trained makes of batches that grow on one rank at a time."""
    model, _ = models.built(UNLIKE)
    settings = {"mesh": "world", "device": "cpu:sim", "hbm": 60_000, "chunk_bytes": 1024}
    prepared = hetero.prepare(model, gather_shares=gathers, **settings)
    found = []
    for step in range(12):
        rows = (2, 40, 5, 2, 2, 60)[(step // 2 + rank) % 6]
        with torch.no_grad():
            found.append(prepared(batch_of(rows, step, rank)))
    return found, hetero.status(prepared).evictions


def batch_of(rows: int, step: int, rank: int) -> torch.Tensor:
    return torch.randn(rows, 10, generator=torch.Generator().manual_seed(100 * step + rank))


@pytest.mark.parametrize("gathers", [True, False], ids=["gathered", "read"])
def test_forwards_of_ranks_that_gather_take_batches_of_unlike_sizes(gathers: bool) -> None:
    plain, _ = models.built(UNLIKE)
    for rank, (found, evictions) in enumerate(run_ranks(2, reads, 2, gathers)):
        assert evictions > 0
        for step, output in enumerate(found):
            rows = (2, 40, 5, 2, 2, 60)[(step // 2 + rank) % 6]
            assert torch.equal(output, plain(batch_of(rows, step, rank)))


class Words(nn.Module):
    """Embeddings between blocks: backward needs none of their weights, unless they are computed
    again."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.first = nn.Embedding(60, width)
        self.more = nn.ModuleList(nn.Embedding(60, width) for _ in range(3))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 72), nn.GELU(), nn.Linear(72, width)) for _ in range(3)
        )
        self.head = nn.Linear(width, 60)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.first(words)
        for more, block in zip(self.more, self.blocks, strict=True):
            x = x + block(x + more(words))
        out: torch.Tensor = self.head(x)
        return out


ROWS = (3, 24, 1, 40)


def mean_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    dice = torch.Generator().manual_seed(10 * step + rank)
    words = torch.randint(0, 60, (ROWS[(step + rank) % len(ROWS)], 5), generator=dice)
    out: torch.Tensor = model(words)
    return out.pow(2).mean()


def words() -> tuple[Words, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Words()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trained(rank: int, settings: dict[str, Any]) -> tuple[dict[str, torch.Tensor], int]:
    """Train with one of two ranks; of a step that is refused on both, make the next one."""
    model, plain = words()
    settings = {"device": "cpu:sim", "chunk_bytes": 1024, "gather_shares": True, **settings}
    model, optimizer = hetero.prepare(model, plain, mesh="world", **settings)
    n_refused = 0
    for step in range(8):
        try:
            mean_of(model, step, rank).backward()
            optimizer.step()
        except hetero.errors.OutOfMemory:
            n_refused += 1
        optimizer.zero_grad()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    hetero.release(model, optimizer)
    return weights, n_refused


@pytest.mark.parametrize("hbm", [100_000, 240_000])
@pytest.mark.parametrize("micro_batch", [None, 8])
def test_embeddings_are_not_computed_again_on_one_rank(hbm: int, micro_batch: int | None) -> None:
    settings = {"hbm": hbm} if micro_batch is None else {"hbm": hbm, "micro_batch": micro_batch}
    (first, refused), (second, also) = run_ranks(2, trained, settings)
    assert refused == also and all(torch.equal(first[name], second[name]) for name in first)
    if micro_batch is None and not refused:
        model, optimizer = words()
        for step in range(8):
            for rank in range(2):
                (mean_of(model, step, rank) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(torch.equal(first[name], value) for name, value in model.state_dict().items())


def test_a_refused_first_step_is_followed_by_a_larger_one_and_a_small_one() -> None:
    """What was measured of it is no step's."""
    model, plain = words()
    model, optimizer = hetero.prepare(model, plain, device="cpu:sim", hbm=40_000, chunk_bytes=1024)
    made = []
    for rows in (20, 40, 2):
        try:
            model(torch.ones(rows, 5, dtype=torch.long)).pow(2).mean().backward()
            optimizer.step()
            made.append(rows)
        except hetero.errors.OutOfMemory:
            assert rows > 2
        optimizer.zero_grad()
    assert made == [2]
