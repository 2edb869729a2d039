"""How fast updates of homes on HOST are, as measured (floor 2)."""

from __future__ import annotations

from typing import NamedTuple


class _Row(NamedTuple):
    began: float
    ended: float
    numel: int
    passes: bool


class UpdatePace:
    """Measures the updates of a step that HOST makes; threads may note them at once.

    Args:
        warms: whether the first step is slower than those that follow: pages of states are touched
            for the first time. So is the first one in which some pass: a kernel is compiled.
    """

    def __init__(self, *, warms: bool = False) -> None:
        self._warm = set[bool]() if warms else {False, True}  # kinds of steps that are
        self.seconds_per_numel: float | None = None
        """Of the last step in which none passed through HBM; None before there was one."""
        self.passing: float | None = None
        """Of the last step in which some might; None before there was one."""
        self._jobs: list[_Row] = []

    def note(self, began: float, ended: float, numel: int, *, passes: bool = False) -> None:
        """An update of ``numel`` parameters ran between two times, in seconds of one clock; with
        ``passes``, some of it might pass through HBM."""
        if numel:
            self._jobs.append(_Row(began, ended, numel, passes))

    def close(self) -> None:
        """All updates of a step are done."""
        jobs, self._jobs = sorted(self._jobs), []
        busy, until = 0.0, 0.0
        for row in jobs:  # several at once, or with pauses in between
            busy += max(0.0, row.ended - max(row.began, until))
            until = max(until, row.ended)
        if not jobs:
            return
        pace, passes = busy / sum(row.numel for row in jobs), any(row.passes for row in jobs)
        if passes not in self._warm:
            self._warm.add(passes)
        elif passes:
            self.passing = pace
        else:
            self.seconds_per_numel = pace
