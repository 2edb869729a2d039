"""Tests that ask for the fixture `emulator`, or `watched`, run in the emulator's process.

    from tests.emulator import fake

    def test_a_model_trains(watched: None) -> None:     # stops, and asserts that nothing was found
        device = fake.device()
        model, optimizer = hetero.prepare(model, optimizer, device=device, hbm="8MiB")

``python -m pytest --emulator-here FILE`` runs them in this process, for a debugger.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.emulator.process import HERE, EmulatorProcess


class Emulated:
    """Sends the tests there, and reports what comes back."""

    def __init__(self, config: pytest.Config) -> None:
        self._here = config.getoption(HERE)
        self._process = EmulatorProcess(config)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._process.files = sorted({str(item.path) for item in session.items if asks(item)})

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> bool | None:
        if self._here or not asks(item):
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in self._reports(item):
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        item.session._setupstate.teardown_exact(nextitem)  # what the test before left for this one
        return True

    def pytest_sessionfinish(self) -> None:
        self._process.end()

    def _reports(self, item: pytest.Item) -> list[pytest.TestReport]:
        try:
            return self._process.run(item.nodeid)
        except EOFError as error:
            return [ended(item, str(error))]

    @pytest.fixture(scope="session")
    def emulator(self) -> None:
        """The emulated CUDA device is there (`tests.emulator.fake`)."""
        from tests.emulator import fake  # it imports torch and hetero's device room

        fake.load()

    @pytest.fixture
    def watched(self, emulator: None) -> Iterator[None]:
        """The device is watched meanwhile, and nothing may be found."""
        from tests.emulator import fake

        gc.collect()  # models of the test before, which would be strangers on the device
        fake.start()
        yield
        fake.stop()
        if fake.found():
            pytest.fail("\n".join(map(repr, fake.found())), pytrace=False)


def asks(item: pytest.Item) -> bool:
    return "emulator" in getattr(item, "fixturenames", ())


def ended(item: pytest.Item, why: str) -> pytest.TestReport:
    """Return the report of a test whose process is gone."""
    names = dict.fromkeys(item.keywords, 1)
    return pytest.TestReport(item.nodeid, item.location, names, "failed", why, "call")
