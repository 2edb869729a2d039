"""One thread everywhere: the same seed gives other bits with another number of threads."""

from __future__ import annotations

import gc
import random
import signal
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a job in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
RUNS = Path(__file__).parent.parent / "runs"


@pytest.hookimpl(tryfirst=True)  # before -m looks at marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a campaign's cases, all but a sample that its name seeds are slow."""
    campaigns: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if "sample" in marks and "slow" not in marks:
            campaigns[item.nodeid.partition("[")[0]].append(item)
    for name, cases in campaigns.items():
        marker = cases[0].get_closest_marker("sample")
        size = marker.args[0] if marker is not None else 0
        if len(cases) > size:
            taken = random.Random(zlib.crc32(name.encode())).sample(cases, size)
            for case in cases:
                if case not in taken:
                    case.add_marker(pytest.mark.slow)


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
