"""What runs in the emulator's process: ``python -m tests.emulator.worker SOCKET [options]``."""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection
from typing import Any

import pytest


class Worker:
    """Runs the tests whose names arrive, and sends back their reports."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._reports: list[dict[str, Any]] = []
        self._config: pytest.Config | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        self._config = config
        config.workerinput = {}  # the files of a run are not ours

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        while True:
            try:
                item = items[self._pipe.recv()]
            except EOFError:
                return True
            item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
            self._pipe.send(self._reports)
            self._reports = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        assert self._config is not None
        ask = self._config.hook.pytest_report_to_serializable
        self._reports.append(ask(config=self._config, report=report))


if __name__ == "__main__":
    socket, *options = sys.argv[1:]
    sys.exit(pytest.main(options, plugins=[Worker(Connection(int(socket)))]))
