"""A recording of one of several ranks shows what it sent, and where it waited for others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hetero
from hetero.testing.ranks import run_ranks
from tests.ranks.models import Run, built, loss_of

RUN = Run(settings={"device": "cpu:sim", "hbm": 60_000, "chunk_bytes": 1024})


def recorded(rank: int, folder: Path) -> Any:
    model, plain = built(RUN)
    model, optimizer = hetero.prepare(model, plain, mesh="world", **RUN.settings)
    with hetero.profile(model, folder / str(rank), optimizer=optimizer):
        for step in range(4):
            loss_of(model, RUN, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
    trained = sum(param.numel() for param in model.parameters())
    hetero.release(model, optimizer)
    return hetero.report(folder / str(rank), folder / f"{rank}.html"), trained


def test_a_report_of_a_rank_has_its_exchanges_and_its_waits(tmp_path: Path) -> None:
    for rank, (summary, numel) in enumerate(run_ranks(2, recorded, tmp_path)):
        assert summary.time["wait_ranks_seconds"] > 0
        # half of every gradient goes to the other rank, in fp32; parts are of whole 64 elements
        assert 0.5 * 4 * numel <= summary.lanes["reduce"].moved_bytes < 0.6 * 4 * numel
        assert "wait ranks" in (tmp_path / f"{rank}.html").read_text()
