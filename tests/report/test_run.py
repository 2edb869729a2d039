"""A run's directory: what is written is what is read, also when something was cut off."""

from __future__ import annotations

import errno
import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from hetero.errors import ConfigError, DiskFull, StorageError
from hetero.events import Event, EventLog, What
from hetero.report.run import (
    COLUMNS,
    EVENTS,
    META,
    SCHEMA,
    Allocation,
    Allocations,
    BucketMeta,
    Meta,
    Recorder,
    Run,
)
from hetero.types import Kind, Lane, Tier

FULL = Meta(
    model="GPT",
    n_params=7,
    device="cpu",
    mode="paged",
    budgets={"HBM": 10, "HOST": None},
    units=["a", "b"],
    buckets=[BucketMeta(0, 4, 1, True), BucketMeta(1, 8, 2, False)],
    ceilings={"h2d": 1.5},
    versions={"torch": "2"},
    settings={"hbm": 10},
    allocations=Allocations(2, [Allocation("a", "net.py:3 forward", 8), Allocation("", "", 4)]),
)


def event(seq: int, t_ns: int = 0) -> Event:
    return Event(seq, t_ns, 0, "level", 0, "init", "", "HBM", -1, -1, 5, "param", "", -1)


def write(folder: Path, n: int = 100, meta: Meta = FULL) -> EventLog:
    """Record ``n`` events, and return their log."""
    log = EventLog()
    recorder = Recorder(log, folder, meta)
    for number in range(n):
        log.add(
            *(What.MOVE, number / 10, number / 10 + 0.05),
            lane=Lane.H2D,
            tier=Tier.HBM,
            bucket=number % 2,
            n_bytes=number,
            category=Kind.PARAM,
            why='quotes " and é',
        )
    recorder.close()
    return log


def test_what_is_recorded_is_what_is_loaded(tmp_path: Path) -> None:
    log = EventLog()
    recorder = Recorder(log, tmp_path / "new" / "folder", FULL)
    log.add(What.MOVE, 0.5, 0.75, lane=Lane.H2D, tier=Tier.HBM, category=Kind.PARAM, why='"é')
    log.now(What.DECISION, category="odd", n_bytes=2**40)
    expected = list(log)
    recorder.close()
    run = Run.load(tmp_path / "new" / "folder")
    assert run.meta == replace(FULL, first_seq=0)
    assert (len(expected), run.events, run.dropped) == (2, expected, 0)


def test_files_are_json_with_the_columns_named(tmp_path: Path) -> None:
    write(tmp_path, 3)
    meta = json.loads((tmp_path / META).read_text())
    assert tuple(meta["columns"]) == Event._fields
    with gzip.open(tmp_path / EVENTS, "rt") as file:
        rows = [dict(zip(meta["columns"], json.loads(line), strict=True)) for line in file]
    assert [(row["seq"], row["what"], row["tier"]) for row in rows] == [
        (n, "move", "HBM") for n in range(3)
    ]


def test_columns_in_another_order_are_read_by_their_names(tmp_path: Path) -> None:
    columns = tuple(reversed((*COLUMNS, "later")))
    (tmp_path / META).write_text(json.dumps(Meta(columns=columns).as_json()))
    rows = [list(reversed((*event(n), "more"))) for n in range(2)]
    with gzip.open(tmp_path / EVENTS, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    assert Run.load(tmp_path).events == [event(0), event(1)]


def test_a_log_without_a_column_is_refused(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / META).write_text(json.dumps(Meta(columns=("seq",)).as_json()))
    with pytest.raises(ConfigError, match="a column is missing"):
        Run.load(tmp_path)


def test_events_are_in_the_order_of_their_begin_and_then_of_their_numbers() -> None:
    run = Run.of(Meta(), [event(2, 5), event(0, 9), event(1, 5)])
    assert [e.seq for e in run.events] == [1, 2, 0]


@pytest.mark.parametrize(
    ("seqs", "first", "dropped"),
    [
        ([], None, 0),
        ([], 4, 0),
        ([5, 6, 7], None, 0),
        ([5, 7, 9], None, 2),
        ([7, 8], 5, 2),  # the ring was full before anybody looked
        ([5, 6, 7], 5, 0),
        ([2, 5, 6], 5, 0),  # an access that was under way when the log began
    ],
)
def test_numbers_that_are_missing_were_dropped(
    seqs: list[int], first: int | None, dropped: int
) -> None:
    run = Run.of(Meta(first_seq=first), [event(n) for n in reversed(seqs)])
    assert run.dropped == dropped
    assert len(run.events) == len(seqs)


def test_a_ring_that_overflows_before_it_is_drained_shows_in_the_run(tmp_path: Path) -> None:
    log = EventLog(capacity=4)
    for _ in range(10):
        log.now(What.LEVEL)
    Recorder(log, tmp_path, Meta()).close()
    run = Run.load(tmp_path)
    assert (len(run.events), run.dropped) == (4, 6)


def test_a_log_that_was_cleared_has_dropped_nothing(tmp_path: Path) -> None:
    log = EventLog()
    for _ in range(10):
        log.now(What.LEVEL)
    log.clear()
    recorder = Recorder(log, tmp_path, Meta())
    log.now(What.LEVEL)
    recorder.close()
    run = Run.load(tmp_path)
    assert (len(run.events), run.dropped) == (1, 0)


def test_a_run_that_is_killed_has_what_was_flushed(tmp_path: Path) -> None:
    log = EventLog()
    recorder = Recorder(log, tmp_path, Meta())
    log.now(What.LEVEL)
    recorder.flush()
    found = Run.load(tmp_path).events  # nobody closed it: what a kill leaves
    recorder.close()
    assert len(found) == 1


def test_a_file_cut_anywhere_has_the_events_before_the_cut(tmp_path: Path) -> None:
    write(tmp_path)
    whole, events = (tmp_path / EVENTS).read_bytes(), Run.load(tmp_path).events
    lengths = set()
    for cut in range(0, len(whole), max(1, len(whole) // 40)):
        (tmp_path / EVENTS).write_bytes(whole[:cut])
        found = Run.load(tmp_path).events
        assert found == events[: len(found)]
        lengths.add(len(found))
    assert len(events) == 100
    assert 0 in lengths
    assert len(lengths) > 1


def test_a_damaged_file_has_the_events_before_the_damage(tmp_path: Path) -> None:
    write(tmp_path)
    events = Run.load(tmp_path).events
    whole = bytearray((tmp_path / EVENTS).read_bytes())
    for at in range(len(whole) // 2, len(whole) // 2 + 20):
        whole[at] ^= 0xFF
    (tmp_path / EVENTS).write_bytes(bytes(whole))
    try:
        found = Run.load(tmp_path).events
    except ConfigError:  # the checksum at the end is what tells
        return
    assert len(found) <= len(events)


def test_a_file_that_is_no_log_is_refused(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / EVENTS).write_bytes(b"this is not gzip at all")
    with pytest.raises(ConfigError, match=EVENTS):
        Run.load(tmp_path)


@pytest.mark.parametrize(
    "made",
    [3, [], {"rows": 3}, {"rows": [3]}, {"rows": [{"module": "a"}]}, {"step": "2"},
     {"rows": [{"module": "a", "where": 1, "n_bytes": 2}]}],
)  # fmt: skip
def test_allocations_that_no_recording_has_are_refused(tmp_path: Path, made: object) -> None:
    write(tmp_path, 1)
    (tmp_path / META).write_text(json.dumps({**FULL.as_json(), "allocations": made}))
    with pytest.raises(ConfigError, match="is no run"):
        Run.load(tmp_path)


def test_a_newer_schema_is_refused_with_advice(tmp_path: Path) -> None:
    write(tmp_path, 1, Meta(schema=SCHEMA + 1))
    with pytest.raises(ConfigError, match=f"schema {SCHEMA + 1}") as caught:
        Run.load(tmp_path)
    assert "newer" in caught.value.advice


def test_keys_that_a_later_version_adds_are_passed_over() -> None:
    assert Meta.parse({**FULL.as_json(), "later": 1}) == FULL


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_directory_that_is_no_run_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / META).write_text(text)
    with pytest.raises(ConfigError, match="is no run"):
        Run.load(tmp_path)


def test_a_run_without_events_is_refused(tmp_path: Path) -> None:
    (tmp_path / META).write_text(json.dumps(FULL.as_json()))
    with pytest.raises(ConfigError, match=EVENTS):
        Run.load(tmp_path)


def test_what_the_run_is_may_be_said_again_at_its_end(tmp_path: Path) -> None:
    recorder = Recorder(EventLog(), tmp_path, FULL)
    recorder.close()
    recorder.write_meta(replace(FULL, mode="resident"))
    assert Run.load(tmp_path).meta.mode == "resident"


def test_closing_twice_is_closing_once(tmp_path: Path) -> None:
    log = EventLog()
    recorder = Recorder(log, tmp_path, FULL)
    log.now(What.LEVEL)
    recorder.close()
    recorder.close()
    assert len(Run.load(tmp_path).events) == 1


def no_space(*args: object) -> None:
    raise OSError(errno.ENOSPC, "no space left on device")


def test_a_disk_that_fills_up_is_told_when_the_recording_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog()
    recorder = Recorder(log, tmp_path, FULL)
    monkeypatch.setattr(recorder, "flush", no_space)
    recorder._thread.join(timeout=10)  # it ends with its first failure, which it keeps
    assert not recorder._thread.is_alive()
    with pytest.raises(DiskFull, match="no space left") as caught:
        recorder.close()
    assert "free some space" in caught.value.advice


def test_a_directory_that_cannot_be_made_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="Not a directory"):
        Recorder(EventLog(), tmp_path / "file" / "run", FULL)
