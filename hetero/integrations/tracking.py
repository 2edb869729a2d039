"""Figures of a run for accelerate's trackers (floor 4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import get_available_trackers

from hetero.errors import ConfigError

PROJECT = "hetero"


@contextmanager
def trackers(
    names: Sequence[str], folder: Path, config: Mapping[str, Any]
) -> Iterator[Callable[[Mapping[str, float], int], None]]:
    """Open trackers by name (else ConfigError); yields a function that logs a step to all."""
    here = [str(getattr(each, "value", each)) for each in get_available_trackers()]
    missing = [name for name in names if name not in here]
    if missing:
        raise ConfigError(
            f"no tracker {missing[0]!r} is installed",
            advice=f"pip install {missing[0]}, or track with {', '.join([*here, 'jsonl'])}",
        )
    accelerator = Accelerator(log_with=list(names), project_dir=str(folder))
    accelerator.init_trackers(PROJECT, config=dict(config))
    try:
        yield lambda figures, step: accelerator.log(dict(figures), step=step)
    finally:
        accelerator.end_training()
