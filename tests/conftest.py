"""One thread everywhere: the same seed gives other bits with another number of threads."""

from __future__ import annotations

import gc
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a job in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
RUNS = Path(__file__).parent.parent / "runs"


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
