"""A recording of one of several ranks shows what it sent, and where it waited for others."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import hetero
from hetero import ConfigError
from hetero.cli import main
from hetero.testing.ranks import run_ranks
from tests.ranks.models import Run, built, loss_of

RUN = Run(settings={"device": "cpu:sim", "hbm": 60_000, "chunk_bytes": 1024})


def recorded(rank: int, folder: Path, late_seconds: float = 0.0) -> Any:
    model, plain = built(RUN)
    model, optimizer = hetero.prepare(model, plain, mesh="world", **RUN.settings)
    with hetero.profile(model, folder / str(rank), optimizer=optimizer):
        for step in range(4):
            if rank == 1:
                time.sleep(late_seconds)
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


def test_one_page_shows_who_waited_for_whom(tmp_path: Path) -> None:
    run_ranks(2, recorded, tmp_path / "runs", 0.2)

    result = CliRunner().invoke(main, ["report", str(tmp_path / "runs"), "--json"])
    waited = json.loads(result.stdout.splitlines()[-1])["waited_seconds"]
    assert waited["0"]["1"] > 5 * waited["1"].get("0", 0.0)

    summary = hetero.report(tmp_path / "runs", tmp_path / "all.html")
    page = (tmp_path / "all.html").read_text()
    assert "Others wait most for rank 1" in page
    assert "Who waited for whom" in page and "script" not in page.replace("script-src", "")
    assert summary.time["wait_ranks_seconds"] > 0.1
    for rank in range(2):
        assert f'href="rank-{rank}/report.html"' in page
        assert (tmp_path / f"rank-{rank}" / "report.html").exists()

    result = CliRunner().invoke(main, ["report", str(tmp_path / "runs")])
    assert result.exit_code == 0 and "wait most for rank 1" in " ".join(result.output.split())


def test_two_runs_of_one_rank_are_no_page(tmp_path: Path) -> None:
    model, plain = built(RUN)
    model, optimizer = hetero.prepare(model, plain, **RUN.settings)
    for name in ("one", "two"):
        with hetero.profile(model, tmp_path / name, optimizer=optimizer):
            loss_of(model, RUN, 0, 0).backward()
            optimizer.step()
    with pytest.raises(ConfigError, match="several runs of rank 0"):
        hetero.report(tmp_path, tmp_path / "all.html")
