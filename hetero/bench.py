"""Finds the benchmarks: next to the package, in a checkout (floor 4)."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from hetero.errors import ConfigError

CHECKOUT = Path(__file__).resolve().parent.parent


def runner() -> Any:
    """Return the module that runs benchmarks; ConfigError without a checkout."""
    if not (CHECKOUT / "benchmarks" / "runner.py").is_file():
        raise ConfigError(
            "the benchmarks are not part of the installed package",
            advice="run hetero bench in a clone of the repository: they are in its benchmarks/",
        )
    if str(CHECKOUT) not in sys.path:
        sys.path.insert(0, str(CHECKOUT))
    return import_module("benchmarks.runner")
