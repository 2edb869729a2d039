"""What a training run records of itself: its first steps, and the report on them (floor 4)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from torch import nn

from hetero.report.make import PAGE, report
from hetero.report.profile import profile
from hetero.report.run import META

MOST_STEPS = 32  # of a run: enough to see what is steady, and long runs do not write forever


class Recording:
    """A run's recording, while a ``with`` block is open; what goes wrong with it is a note.

    Args:
        directory: for events and report; None: nothing is recorded.
    """

    def __init__(self, model: nn.Module, directory: Path | None) -> None:
        self.directory = directory
        self.problem = ""
        """Why there is no report; empty where nothing went wrong."""
        self.steps = 0
        """That were recorded."""
        self._model = model
        self._open = ExitStack()

    def __enter__(self) -> Recording:
        if self.directory is not None:
            with self._trying():
                self._open.enter_context(profile(self._model, self.directory))
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()

    def count_step(self) -> None:
        """A step was made; with the last one that is recorded, recording ends."""
        if self.steps < MOST_STEPS:
            self.steps += 1
            if self.steps == MOST_STEPS:
                self.stop()

    def stop(self) -> None:
        """Write down what there is; nothing is recorded from here on."""
        with self._trying():
            self._open.close()

    def write_report(self) -> Path | None:
        """Write the report beside the events; returns its path, None where there is none."""
        if self.directory is None or not self.steps or self.problem:
            return None
        page = self.directory / PAGE
        with self._trying():
            report(self.directory, page)
        return None if self.problem else page

    @contextmanager
    def _trying(self) -> Iterator[None]:
        """Note what fails: no training may end because of a report on it, whatever is wrong."""
        try:
            yield
        except Exception as error:
            self.problem = self.problem or f"{type(error).__name__}: {error}".replace("\n", " ")


def free_folder(path: Path) -> Path:
    """Return a directory without a recorded run: ``path``, or with a number after its name."""
    others = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(p for p in itertools.chain([path], others) if not (p / META).exists())
