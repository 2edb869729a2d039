"""The recording of a training run: its first steps, and the report on them (floor 4)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from torch import nn

from hetero.report.examine import PAGE
from hetero.report.make import report
from hetero.report.profile import Profile, profile

MOST_STEPS = 32  # enough to see the steady state; a long run is not recorded for ever


class Recording:
    """Records a run inside a ``with`` block; if that fails, `problem` says why and the run goes on.

    Args:
        directory: for events and report; None: nothing is recorded.
    """

    def __init__(self, model: nn.Module, directory: Path | None) -> None:
        self.directory = directory
        self.problem = ""
        """Why there is no report; empty if nothing failed."""
        self.steps = 0
        self._model = model
        self._profile: Profile | None = None
        self._open = ExitStack()

    def __enter__(self) -> Recording:
        if self.directory is not None:
            with self._trying():
                self._profile = self._open.enter_context(profile(self._model, self.directory))
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()

    def count_step(self, **values: float) -> None:
        """Count a step, and note what it came to; after `MOST_STEPS` stop recording."""
        if self.steps < MOST_STEPS:
            self.steps += 1
            if self._profile is not None and not self.problem:
                with self._trying():
                    self._profile.note(**values)
            if self.steps == MOST_STEPS:
                self.stop()

    def stop(self) -> None:
        """Write the events so far; record nothing from here on."""
        with self._trying():
            self._open.close()

    def write_report(self) -> Path | None:
        """Write the report next to the events; returns its path, None if there is none."""
        if self.directory is None or not self.steps or self.problem:
            return None
        page = self.directory / PAGE
        with self._trying():
            report(self.directory, page)
        return None if self.problem else page

    @contextmanager
    def _trying(self) -> Iterator[None]:
        """Note any failure: the report of a run never ends it."""
        try:
            yield
        except Exception as error:
            self.problem = self.problem or f"{type(error).__name__}: {error}".replace("\n", " ")
