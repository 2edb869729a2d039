"""How fast HOST updates parameters, as measured (floor 2)."""

from __future__ import annotations


class UpdatePace:
    """Measures the updates of a step that HOST makes; threads may note them at once."""

    def __init__(self) -> None:
        self.seconds_per_numel: float | None = None
        """Of the last step; None before its updates are done."""
        self._jobs: list[tuple[float, float, int]] = []

    def note(self, began: float, ended: float, numel: int) -> None:
        """An update of ``numel`` parameters ran between two times, in seconds of one clock."""
        if numel:
            self._jobs.append((began, ended, numel))

    def close(self) -> None:
        """All updates of a step are done."""
        jobs, self._jobs = sorted(self._jobs), []
        busy, until = 0.0, 0.0
        for began, ended, _ in jobs:  # several at once, or with pauses in between
            busy += max(0.0, ended - max(began, until))
            until = max(until, ended)
        if jobs:
            self.seconds_per_numel = busy / sum(numel for _, _, numel in jobs)
