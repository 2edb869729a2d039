"""Figures of a run for accelerate's trackers and for a file (floor 4)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, get_available_trackers

from hetero.errors import ConfigError
from hetero.io import make_folder

FILE = "metrics.jsonl"
PROJECT = "hetero"


class JsonLines(GeneralTracker):  # type: ignore[misc]  # accelerate has no types
    """A tracker that appends a line of JSON to a file per call."""

    name = "jsonl"
    requires_logging_directory = True

    def __init__(self, folder: Path) -> None:
        super().__init__()
        make_folder(folder, mode=0o777).close()
        self._file = (folder / FILE).open("a", encoding="utf-8")

    @property
    def tracker(self) -> Any:
        return self._file

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._write({"config": values})

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._write({"step": step, **values})

    def finish(self) -> None:
        self._file.close()

    def _write(self, values: dict[str, Any]) -> None:
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()


@contextmanager
def trackers(
    names: Sequence[str], folder: Path, config: Mapping[str, Any]
) -> Iterator[Callable[[Mapping[str, float], int], None]]:
    """Open trackers by name (else ConfigError); yields a function that logs a step to all."""
    known = [str(getattr(each, "value", each)) for each in get_available_trackers()]
    missing = [name for name in names if name not in (*known, JsonLines.name)]
    if missing:
        raise ConfigError(
            f"no tracker {missing[0]!r} is installed",
            advice=f"pip install {missing[0]}, or track with {', '.join([*known, 'jsonl'])}",
        )
    own = [JsonLines(folder) if name == JsonLines.name else name for name in names]
    accelerator = Accelerator(log_with=own, project_dir=str(folder))
    accelerator.init_trackers(PROJECT, config=dict(config))
    try:
        yield lambda figures, step: accelerator.log(dict(figures), step=step)
    finally:
        accelerator.end_training()
