"""Allocators that do not count what they hand out, on an emulated CUDA device."""

from __future__ import annotations

from typing import Any

import pytest

from hetero.errors import ConfigError
from tests.emulator import fake


def counts_nothing(device: object = None) -> dict[str, Any]:
    """PYTORCH_NO_CUDA_MEMORY_CACHING=1."""
    none = {"all": {"current": 0, "peak": 0}}
    return {"allocated_bytes": none, "reserved_bytes": none}


def cannot_count(device: object = None) -> dict[str, Any]:
    raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats.")


@pytest.mark.parametrize("answer", [counts_nothing, cannot_count], ids=lambda f: f.__name__)
def test_a_device_whose_memory_is_not_counted_is_refused(
    emulator: None, answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.device()
    monkeypatch.setattr(fake.cuda(), "memory_stats_as_nested_dict", answer)
    with pytest.raises(ConfigError, match="does not count its memory"):
        fake.device()
