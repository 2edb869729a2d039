"""The examples run as they stand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_the_plain_loop_trains_inside_its_budget() -> None:
    command = [sys.executable, str(EXAMPLES / "plain_loop.py")]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    words = out.splitlines()[-1].split()
    assert 0 < int(words[2]) <= int(words[4]) == 8_000_000
    assert "0 misses" in out
