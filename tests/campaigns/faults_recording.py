"""Recordings that were tampered with: what is read makes a report."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hetero.events import EventLog
from hetero.report.examine import PREDICTED, WHATIF
from hetero.report.make import report
from hetero.report.run import EVENTS, META, Recorder
from tests.campaigns.fuzz import Attempt, Parser, as_text, changed, spoiled
from tests.report.synthetic import paged

STEPS, UNITS = 2, 3
WHATIFS = [
    {"label": "hbm", "fits": True, "peak_bytes": 5, "step_seconds": 0.5, "change": "hbm=5"},
    {"label": "host", "fits": False, "peak_bytes": 7, "step_seconds": 1.5, "change": "host=7"},
]
PREDICTION = {"step": {"mean_seconds": 0.5}, "hbm": {"peak_bytes": 100}, "kind": "predicted"}


def recorded(directory: Path) -> None:
    """Write a run's files as a recording does."""
    run = paged(STEPS, UNITS)
    log = EventLog()
    recorder = Recorder(log, directory, run.meta)
    recorder.close()
    lines = b"\n".join(as_text(list(row)) for row in run.events)
    (directory / EVENTS).write_bytes(gzip.compress(lines + b"\n"))
    (directory / WHATIF).write_bytes(as_text(WHATIFS))
    (directory / PREDICTED).write_bytes(as_text(PREDICTION))


def of_file(name: str, tamper: Callable[[bytes, random.Random], bytes]) -> Callable[..., Attempt]:
    """Return how one file of a recording is tampered with."""

    def prepare(directory: Path) -> Attempt:
        folder = directory / "run"
        recorded(folder)
        good = (folder / name).read_bytes()

        def attempt(seeded: random.Random) -> str:
            (folder / name).write_bytes(tamper(good, seeded))
            report(folder, directory / "report.html")
            return "reported"

        return attempt

    return prepare


def as_json(good: bytes, seeded: random.Random) -> bytes:
    if seeded.random() < 0.3:
        return spoiled(good, seeded)
    record: Any = json.loads(good)
    for _ in range(seeded.choice([1, 1, 2, 4])):
        record = changed(record, seeded) if record else record
    return as_text(record)


def as_rows(good: bytes, seeded: random.Random) -> bytes:
    if seeded.random() < 0.2:
        raw = bytearray(good)
        raw[seeded.randrange(len(raw))] ^= 1 << seeded.randrange(8)
        return bytes(raw)
    rows = [json.loads(line) for line in gzip.decompress(good).splitlines()]
    for _ in range(seeded.choice([1, 1, 3, 10])):
        number = seeded.randrange(len(rows))
        rows[number] = changed(rows[number], seeded) if rows[number] else rows[number]
    text = b"\n".join(map(as_text, rows))
    return gzip.compress(spoiled(text, seeded) if seeded.random() < 0.2 else text, 1)


def moved(good: bytes, seeded: random.Random) -> bytes:
    """Change numbers and words for others of their kind: rows that no check of types sees."""
    rows = [json.loads(line) for line in gzip.decompress(good).splitlines()]
    for _ in range(seeded.choice([1, 3, 30])):
        row, other = seeded.choice(rows), seeded.choice(rows)
        column = seeded.randrange(len(row))
        row[column] = other[column]
        if type(row[column]) is int and seeded.random() < 0.3:
            row[column] = seeded.choice([0, -1, 1, 2**61, -(2**61), 2**40])
    for _ in range(seeded.choice([0, 0, 2])):
        del rows[seeded.randrange(len(rows))]
    return gzip.compress(b"\n".join(map(as_text, rows)), 1)


PARSERS = [
    Parser("recording meta", of_file(META, as_json)),
    Parser("recording events", of_file(EVENTS, as_rows)),
    Parser("recording rows moved", of_file(EVENTS, moved), 0.0),
    Parser("whatif", of_file(WHATIF, as_json)),
    Parser("predicted", of_file(PREDICTED, as_json)),
]
