"""The examples run as they stand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *given: object) -> str:
    """Run an example and return what it printed."""
    command = [sys.executable, str(EXAMPLES / name), *map(str, given)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_the_plain_loop_trains_inside_its_budget() -> None:
    out = run("plain_loop.py")
    words = out.splitlines()[-1].split()
    assert 0 < int(words[2]) <= int(words[4]) == 8_000_000
    assert "0 misses" in out


def test_a_plain_loop_is_profiled_in_two_lines(tmp_path: Path) -> None:
    out = run("profile_only.py", tmp_path)

    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["step"]["count"] == 10
    assert summary["mode"] == "plain"
    tier = out.split()[0]
    assert out.startswith(f"{tier} held {summary[tier]['peak_bytes']:,} bytes at most")
    assert (tmp_path / "report.html").exists()


def test_a_plan_says_what_fits_before_anything_runs() -> None:
    out = run("plan.py").splitlines()

    assert out[0] == "Sequential on rtx4090: fits"
    assert out[1].startswith("  HBM holds ")
    assert int(out[1].split()[2].replace(",", "")) <= 512 * 2**20
    assert any(line.startswith("  model, optimizer = hetero.prepare(") for line in out)


def test_an_adapter_trains_over_a_base_of_half_a_byte_a_parameter() -> None:
    pytest.importorskip("peft")
    out = run("qlora.py").splitlines()

    losses = [float(line.split()[-1]) for line in out if line.startswith("step")]
    assert len(losses) == 6 and losses[-1] < 0.8 * losses[0]
    (said,) = [line for line in out if "at rest" in line]
    assert 0.53 < float(said.split(":")[1].split()[0]) < 0.6
