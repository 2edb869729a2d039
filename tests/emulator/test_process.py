"""The emulator's process and its library: what is missing, or ends, is said."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.emulator import build
from tests.emulator.abrupt import WAITED
from tests.emulator.process import ROOT, EmulatorProcess


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match=r"no C\+\+ compiler: install g\+\+"):
        build.compiler()


@pytest.mark.slow
def test_a_test_that_ends_its_process_fails_and_the_next_one_runs(
    request: pytest.FixtureRequest,
) -> None:
    process = EmulatorProcess(request.config)
    process.files = ["tests/emulator/exits.py"]
    with pytest.raises(EOFError, match="exit code 3"):
        process.run("tests/emulator/exits.py::test_it_ends")
    outcomes = [report.outcome for report in process.run("tests/emulator/exits.py::test_it_stays")]
    assert outcomes == ["passed"] * 3
    assert process.end() == 0


def test_a_process_ends_when_the_thread_of_backward_has_let_go_of_python() -> None:
    """Else the interpreter would end that thread inside of torch: SIGABRT in place of a status."""
    program = [sys.executable, "-m", "tests.emulator.abrupt"]
    assert subprocess.run(program, cwd=ROOT, check=False, timeout=60).returncode == WAITED
