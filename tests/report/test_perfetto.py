"""The trace for Perfetto: slices of a track apart, begins with ends, arrows that land."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hetero.report.measure import Measured, measure
from hetero.report.perfetto import RESIDENCY, RUN, trace, write_perfetto

from .synthetic import paged, plain

TINY = 1e-4  # microseconds: rounding of floats
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module", params=["recorded", "synthetic", "plain"])
def rows(request: pytest.FixtureRequest) -> Rows:
    made = {"synthetic": lambda: measure(paged(5)), "plain": lambda: measure(plain())}
    name = request.param
    return trace(made[name]() if name in made else request.getfixturevalue("measured"))


def test_only_known_kinds_of_rows_with_their_fields(rows: Rows) -> None:
    needed = {"X": {"dur", "name"}, "C": {"name", "args"}, "M": {"name", "args"},
              "b": {"id", "cat", "name"}, "e": {"id", "cat", "name"},
              "s": {"id", "cat", "name"}, "f": {"id", "cat", "bp"}}  # fmt: skip

    for row in rows:
        assert {"ph", "pid", "tid", "ts"} | needed[row["ph"]] <= set(row)
        assert row["ts"] >= 0


def test_slices_of_a_track_do_not_overlap(rows: Rows) -> None:
    by_track = defaultdict(list)
    for row in rows:
        if row["ph"] == "X":
            by_track[row["pid"], row["tid"]].append((row["ts"], row["dur"]))

    assert len(by_track) > 2
    for slices in by_track.values():
        for (begin, length), (following, _) in pairwise(sorted(slices)):
            assert begin + length <= following + TINY


def test_every_track_with_slices_has_a_name(rows: Rows) -> None:
    named = {row["tid"] for row in rows if row["ph"] == "M" and row["name"] == "thread_name"}

    assert {row["tid"] for row in rows if row["ph"] == "X" and row["pid"] == RUN} <= named


def test_begins_and_ends_of_residency_match(rows: Rows) -> None:
    found: dict[int, dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row["pid"] == RESIDENCY and row["ph"] in "be":
            assert row["ph"] not in found[row["id"]]
            found[row["id"]][row["ph"]] = row["ts"]

    for times in found.values():
        assert set(times) == {"b", "e"} and times["b"] <= times["e"]


def test_arrows_begin_in_a_copy_and_end_in_an_access(rows: Rows) -> None:
    slices = [row for row in rows if row["ph"] == "X"]
    ends = {row["id"]: row for row in rows if row["ph"] == "f"}
    begins = {row["id"]: row for row in rows if row["ph"] == "s"}

    assert set(begins) == set(ends)
    for number, end in ends.items():
        assert begins[number]["ts"] <= end["ts"]
        for row, what in ((begins[number], "move"), (end, "access")):
            assert any(
                each["cat"] == what
                and each["tid"] == row["tid"]
                and each["ts"] - TINY <= row["ts"] <= each["ts"] + each["dur"] + TINY
                for each in slices
            )


def test_a_recorded_run_has_arrows_counters_and_stays(measured: Measured) -> None:
    kinds = {row["ph"] for row in trace(measured)}

    assert kinds == set("XCMbesf")


def test_the_file_is_compressed_json(measured: Measured, tmp_path: Path) -> None:
    write_perfetto(measured, tmp_path / "t.json.gz")
    data = json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))

    assert data["traceEvents"] == trace(measured)
