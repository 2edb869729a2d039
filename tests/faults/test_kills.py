"""SIGKILL at any moment of a save: what was reported loads, and nothing else is accepted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def run(path: Path, *args: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.killer", str(path), *args],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    return found


def test_a_kill_in_place_of_each_operation_loses_nothing(tmp_path: Path) -> None:
    found = run(tmp_path, "each")

    assert found["wrong"] == []
    assert found["kills"] >= 20  # operations of one save that removes an old one


def test_kills_at_random_moments_lose_nothing(tmp_path: Path) -> None:
    found = run(tmp_path, "random", "25")

    assert found["wrong"] == []
    assert found["kills"] == 25


@pytest.mark.slow
def test_many_kills_at_random_moments_lose_nothing(tmp_path: Path) -> None:
    assert run(tmp_path, "random", "300")["wrong"] == []
