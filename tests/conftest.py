"""One thread everywhere: the same seed gives other bits with another number of threads."""

from __future__ import annotations

import gc
import shlex
import signal
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.draw import UNKNOWN_SECONDS, campaign_of, commit, drawn, expected, share_of_all
from tests.emulator.plugin import Emulated
from tests.emulator.process import HERE
from tests.times import Times

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a job in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
RUNS = Path(__file__).parent.parent / "runs"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", action="store_true", help="print the seconds of each file")
    parser.addoption("--campaign-seed", help="draws the cases of campaigns; by default the commit")
    parser.addoption(HERE, action="store_true", help="run emulated tests in this process")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Times())
    if config.option.campaign_seed is None:  # xdist's workers are told
        config.option.campaign_seed = commit()
    config.pluginmanager.register(Emulated(config))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Say the seed: the header, where it would stand, is not shown by quiet runs."""
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and not hasattr(session.config, "workerinput"):
        terminal.write_line(f"campaign seed: {session.config.option.campaign_seed}")


@pytest.hookimpl(tryfirst=True)  # before -m looks at marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a campaign's cases, those that are not drawn are slow."""
    campaigns: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("campaign") and not item.get_closest_marker("slow"):
            campaigns[campaign_of(item.nodeid)].append(item)
    known = expected()
    asked = {name: seconds_of(cases[0]) for name, cases in campaigns.items()}
    share = share_of_all(asked.values())
    for name, cases in campaigns.items():
        names, case_seconds = [case.nodeid for case in cases], known.get(name, UNKNOWN_SECONDS)
        taken = drawn(names, share * asked[name], case_seconds, config.option.campaign_seed)
        for case in cases:
            if case.nodeid not in taken:
                case.add_marker(pytest.mark.slow)


def seconds_of(case: pytest.Item) -> float:
    marker = case.get_closest_marker("campaign")
    assert marker is not None
    return float(marker.kwargs["seconds"])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Say with every failure how to see it again."""
    report = yield
    if report.failed:
        seed = item.config.option.campaign_seed
        again = shlex.join(["python", "-m", "pytest", "-m", "", item.nodeid])
        draw = f"bash tests/run.sh --campaign-seed {shlex.quote(seed)}"
        report.sections.append(("again", f"{again}\nthe same draw of all campaigns: {draw}"))
    return report


def pytest_collection_finish() -> None:
    """Collections that a simulated device makes look at what tests made, not at all of torch."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    if torch.are_deterministic_algorithms_enabled():  # setting it imports torch's compiler
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def disk() -> Iterator[Path]:
    """A directory on a real disk: the usual temporary ones may be RAM."""
    RUNS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=RUNS) as path:
        yield Path(path)
