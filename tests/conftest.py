"""One thread everywhere: the same seed gives other bits with another number of threads."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)
