"""What tests of several ranks share."""

from __future__ import annotations

import pytest

from hetero.train.gradients import crossing


@pytest.fixture
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let buckets of a few kilobytes cross in many parts, as large ones do."""
    monkeypatch.setattr(crossing, "LEAST_PART", 256)
