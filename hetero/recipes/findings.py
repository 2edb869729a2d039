"""Findings of `hetero doctor`, and those that need no torch, which may be what is broken."""

from __future__ import annotations

import dataclasses
import platform
import sys
from dataclasses import dataclass
from enum import Enum
from typing import Any

OLDEST_PYTHON = (3, 10)


class Level(Enum):
    """The grade of a finding."""

    GREEN = "green"
    YELLOW = "yellow"
    RED = "red"


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    level: Level
    found: str
    fix: str = ""
    """The fix, in one line; empty if there is nothing to do."""


@dataclass(frozen=True, slots=True)
class Examination:
    checks: tuple[Check, ...]

    @property
    def healthy(self) -> bool:
        return all(check.level is not Level.RED for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        rows = [{**dataclasses.asdict(c), "level": c.level.value} for c in self.checks]
        return {"healthy": self.healthy, "checks": rows}


def graded(name: str, good: bool, found: str, fix: str, bad: Level = Level.YELLOW) -> Check:
    """Return a check that is green without a fix, or ``bad`` with one."""
    return Check(name, Level.GREEN, found) if good else Check(name, bad, found, fix)


def check_system() -> Check:
    known = sys.platform == "linux"
    return graded("system", known, platform.platform(), "hetero is tested on Linux")


def check_python() -> Check:
    good = sys.version_info[:2] >= OLDEST_PYTHON
    return graded("python", good, platform.python_version(), "install Python >= 3.10", Level.RED)


def without_torch(error: Exception) -> Examination:
    """Return what can be said where torch cannot be imported."""
    found = f"cannot be imported: {error}".splitlines()[0]
    fix = "install torch 2.9 or newer for this machine: pip install 'torch>=2.9'"
    return Examination((check_system(), check_python(), Check("torch", Level.RED, found, fix)))
