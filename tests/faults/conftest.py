"""Campaigns marked slow run where they are asked for: ``pytest -m slow tests/faults``."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.markexpr:
        return
    here = Path(__file__).parent
    slow = [item for item in items if item.get_closest_marker("slow") and here in item.path.parents]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in slow]
