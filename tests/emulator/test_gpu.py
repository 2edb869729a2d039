"""The tests of tests/gpu on the emulated device: right but for CUDA's own numbers."""

from __future__ import annotations

import pytest

from tests.emulator import fake
from tests.gpu import cases
from tests.gpu.cases import Gpu

globals().update({name: vars(cases)[name] for name in cases.NAMES})


@pytest.fixture
def gpu(watched: None) -> Gpu:
    """The device; its kernels take no workspace, and it has none for fused recurrent cells."""
    return Gpu(fake.PLACE, fake.cuda(), width=32, slack=100_000, not_here=frozenset({"recurrent"}))
