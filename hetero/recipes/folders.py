"""Folders of runs: checkpoints in `RUNS`, a recording next to them (no torch)."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from hetero.errors import ConfigError
from hetero.recipes.options import TrainOptions
from hetero.report.run import META

RUNS = "runs"  # folder in the working directory, for checkpoints and the demo's homes on disk
RECORDING = "run"  # folder for the recording, among a run's checkpoints


def folder_of(options: TrainOptions) -> Path:
    """Return the folder of a run's checkpoints; without a name the next number in `RUNS`.

    Raises ConfigError if it holds those of another run, or with resume none.
    """
    if options.save_dir is None:
        numbers = [int(p.name) for p in Path(RUNS).glob("*") if p.name.isdigit()]
        saved = [n for n in numbers if has_checkpoint(Path(RUNS, str(n)))]
        number = max(saved, default=0) if options.resume else max(numbers, default=0) + 1
        folder = Path(RUNS, str(number))
    else:
        folder = Path(options.save_dir)
    check_writable(folder, "--save-dir")
    if options.out is not None:
        check_writable(options.out, "--out")
    there = has_checkpoint(folder)
    if options.resume and not there:
        raise ConfigError(
            f"{str(folder)!r} holds no checkpoint to go on from",
            advice="start without --resume, or name the run's folder with --save-dir",
        )
    if there and not options.resume:
        raise ConfigError(
            f"{str(folder)!r} holds the checkpoints of another run",
            advice="go on from them with --resume, or name another folder with --save-dir",
        )
    return folder


def check_writable(path: str | Path, option: str) -> None:
    """Refuse a folder that cannot be made, before training and not after it."""
    folder = Path(path).absolute()
    there = next(each for each in (folder, *folder.parents) if each.exists())
    if not there.is_dir():
        raise ConfigError(
            f"{option} {path}: {os.path.relpath(there)} is a file",
            advice=f"name another directory with {option}",
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{option} {path}: this user may not write in {there}",
            advice=f"name another directory with {option}, or run in one of your own",
        )


def has_checkpoint(folder: Path) -> bool:
    return any(p.name.removeprefix("step-").isdigit() for p in folder.glob("step-*"))


def record_folder(options: TrainOptions, folder: Path) -> Path | None:
    """Return where to record a run with checkpoints in ``folder``; None: do not record."""
    if options.record == "none":
        return None
    return free_folder(Path(options.record) if options.record else folder / RECORDING)


def free_folder(path: Path) -> Path:
    """Return a directory without a recorded run: ``path``, or one with a number appended."""
    return next(p for p in numbered(path) if not (p / META).exists())


def recorded_in(folder: str | Path) -> Path:
    """Return the folder of the newest recording that a path leads to.

    That is the path itself, or next to checkpoints in it, or in a run in it. A page, and a
    checkpoint, lead to the run that they are of.
    """
    given = Path(folder)
    inside = given.is_file() or given.name.startswith("step-")
    for place in (given, given.parent) if inside else (given,):
        if (place / META).exists():
            return place
        there = [*recordings(place)]
        if not there and not any(place.glob(f"*/{META}")):  # those are of the ranks of one run
            there = [found for run in place.glob("*") for found in recordings(run)]
        if there:
            return max(there, key=lambda p: (p / META).stat().st_mtime_ns)
    return given


def saved_in(folder: str | Path) -> list[Path]:
    """Return the folders of checkpoints that a path leads to: itself, or else the runs in it, or
    else the run that a recording is of; the path where there is none."""
    given = Path(folder)
    if has_checkpoint(given) or given.name.startswith("step-"):
        return [given]
    runs = [run for run in given.glob("*") if has_checkpoint(run)]
    of_record = given.parent if given.is_file() else given
    if not runs and (of_record / META).exists() and has_checkpoint(of_record.parent):
        runs = [of_record.parent]
    return sorted(runs, key=lambda run: (len(run.name) if run.name.isdigit() else 0, run)) or [
        given
    ]


def recordings(run: Path) -> Iterator[Path]:
    """Yield the recordings next to a run's checkpoints."""
    return itertools.takewhile(lambda p: (p / META).exists(), numbered(run / RECORDING))


def numbered(path: Path) -> itertools.chain[Path]:
    """Return ``path``, then it with -2, -3 ... without end."""
    others = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return itertools.chain([path], others)
