"""The emulator's process, as the pytest that needs it sees it: a pytest that runs what it is told.

It needs a process: torch makes a thread for each device in a process's first backward, so the
device has to be there before any test has run one, and it cannot be taken away again. Where it is,
torch's accelerator is the emulated one and hetero's default device "cuda": other tests would
change. One process serves all emulated tests of a run (of each worker of xdist): no test needs
another's state, and to import torch for each would take longer than most of them.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
HERE = "--emulator-here"


class EmulatorProcess:
    """It begins with the first test."""

    def __init__(self, config: pytest.Config) -> None:
        self.files: list[str] = []
        """Of the tests that it may be told to run, collected once: it imports no others."""
        self._config = config
        self._running: tuple[subprocess.Popen[bytes], Connection] | None = None

    def run(self, test: str) -> list[pytest.TestReport]:
        """Run one test there and return its reports; EOFError if the process ends in it."""
        _, pipe = self._running = self._running or self._begin()
        try:
            pipe.send(test)
            rows = pipe.recv()
        except (EOFError, OSError):
            raise EOFError(f"the emulator's process ended: exit code {self.end()}") from None
        ask = self._config.hook.pytest_report_from_serializable
        return [ask(config=self._config, data=row) for row in rows]

    def end(self) -> int | None:
        """Let the process end, and return its code."""
        if self._running is None:
            return None
        process, pipe = self._running
        self._running = None
        pipe.close()
        return process.wait()

    def _begin(self) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, theirs = socket.socketpair()
        options = ["-m", "", "-p", "no:cacheprovider", HERE]
        options += ["--campaign-seed", self._config.option.campaign_seed]
        with theirs:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.emulator.worker",
                    str(theirs.fileno()),
                    *options,
                    *self.files,
                ],
                cwd=ROOT,
                pass_fds=[theirs.fileno()],
                stdout=subprocess.DEVNULL,
            )
        return process, Connection(ours.detach())
