"""The gate's browser: it is found, or installed where that is possible, and never in the way."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.report.browser import find

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("bash", "timeout", "id", "sleep")


def tool(folder: Path, name: str, script: str) -> Path:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    return folder / name


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder with what a PATH has that knows no browser; whoever runs there is root."""
    where = tmp_path / "bin"
    where.mkdir()
    for name in TOOLS:
        found = next(p for p in map(Path, ("/usr/bin", "/bin")) if (p / name).exists()) / name
        (where / name).symlink_to(found)
    (where / "id").unlink()
    tool(where, "id", "echo 0")
    return where


def installed(machine: Path, apt: str, seconds: int = 20) -> tuple[int, str, list[str]]:
    """Return how the set-up ended, what it said, and how apt-get was called."""
    calls = machine.parent / "calls"
    calls.write_text("")
    if apt:
        tool(machine, "apt-get", f'echo "$*" >> {calls}\n{apt}')
    done = subprocess.run(
        ["bash", "-euc", f"source tests/setup_chromium.sh; setup_chromium {seconds}"],
        cwd=ROOT,
        env={**os.environ, "PATH": str(machine)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.returncode, done.stdout + done.stderr, calls.read_text().splitlines()


def test_a_browser_is_installed_where_none_is_there_and_without_a_word(machine: Path) -> None:
    ended, said, calls = installed(machine, "echo many lines")

    assert (ended, said) == (0, "")
    assert [line.split()[0] for line in calls] == ["update", "install"]
    assert calls[-1].endswith(" chromium")


@pytest.mark.parametrize("apt", ["", "echo no network >&2; exit 100"])
def test_a_machine_that_cannot_install_one_goes_on(machine: Path, apt: str) -> None:
    assert installed(machine, apt)[:2] == (0, "")


def test_an_installation_that_hangs_is_ended(machine: Path) -> None:
    assert installed(machine, "sleep 600", seconds=1) == (0, "", ["update"])


def test_nothing_is_installed_next_to_a_browser_nor_by_a_user(machine: Path) -> None:
    tool(machine, "id", "echo 1000")
    assert installed(machine, "exit 0") == (0, "", [])
    tool(machine, "id", "echo 0")
    tool(machine, "google-chrome", "echo Chrome 1")
    assert installed(machine, "exit 0") == (0, "", [])


def test_a_browser_that_only_says_how_to_install_one_is_none(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(machine))
    tool(machine, "chromium-browser", "echo install the snap; exit 1")
    assert find() is None
    assert [line.split()[0] for line in installed(machine, "exit 0")[2]] == ["update", "install"]
    there = tool(machine, "google-chrome", "echo Chrome 1")
    assert find() == str(there)
