"""Figures of a run for a file of JSON lines, and for trackers through accelerate (floor 4)."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hetero.errors import ConfigError
from hetero.io import make_folder
from hetero.recipes.options import TrainOptions, installed

FILE = "metrics.jsonl"
LINES = "jsonl"
KNOWN = (  # to accelerate, installed or not
    *("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio"),
    "wandb",
)

Log = Callable[[Mapping[str, float], int], None]
"""Takes the figures of a step, and its number."""


@contextmanager
def tracking(options: TrainOptions, folder: Path) -> Iterator[Log]:
    """Yield a function that logs a step; ConfigError for a tracker that is not there."""
    check_names(options.track)
    given = {k: v for k, v in dataclasses.asdict(options).items() if k != "settings"}
    plain = {k: v if isinstance(v, (int, float, str)) else str(v) for k, v in given.items()}
    names = [name for name in options.track if name != LINES]
    with lines(options, folder, plain) as write, others(names, folder, plain) as log:

        def both(figures: Mapping[str, float], step: int) -> None:
            write({"step": step, **figures})
            log(figures, step)

        yield both


def check_names(names: tuple[str, ...]) -> None:
    """Raise ConfigError for a name that no tracker has."""
    known = (*KNOWN, LINES)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f", did you mean {near[0]}?" if near else ""
            raise ConfigError(
                f"there is no tracker {name!r}{hint}", advice=f"track with {', '.join(known)}"
            )


@contextmanager
def lines(
    options: TrainOptions, folder: Path, config: Mapping[str, Any]
) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Yield a function that appends a line of JSON to the run's file, if that is asked for."""
    if LINES not in options.track:
        yield lambda values: None
        return
    make_folder(folder, mode=0o777).close()
    with (folder / FILE).open("a", encoding="utf-8", buffering=1) as file:
        file.write(json.dumps({"config": config}) + "\n")
        yield lambda values: print(json.dumps(values), file=file)


@contextmanager
def others(names: list[str], folder: Path, config: Mapping[str, Any]) -> Iterator[Log]:
    """Yield a function that logs a step to accelerate's trackers."""
    if not names:
        yield lambda figures, step: None
        return
    with installed(f"--track {names[0]} needs accelerate"):
        from hetero.integrations.tracking import trackers
    with trackers(names, folder, config) as log:
        yield log
