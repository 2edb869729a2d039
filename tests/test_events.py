"""The event log: a ring of tuples that are made into rows when somebody looks."""

from __future__ import annotations

import sys
import threading

from hetero.events import Event, EventLog, What, go_behind, is_behind
from hetero.types import Kind, Lane, Tier


class Later:
    """Knows when it was only once asked."""

    def __init__(self, begin: float, end: float, *, is_known: bool = True) -> None:
        self.times = begin, end
        self.asked = 0
        self.is_known = is_known

    def span(self) -> tuple[float, float]:
        self.asked += 1
        return self.times


def ticking() -> EventLog:
    """Return a log whose clock counts the looks at it."""
    seconds = iter(range(1000))
    return EventLog(lambda: float(next(seconds)))


def on_thread(call: object) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def test_an_event_has_names_and_nanoseconds() -> None:
    log = EventLog()
    log.step, log.phase, log.access = 3, "forward", 7
    log.add(
        *(What.MOVE, 1.5, 1.75),
        lane=Lane.H2D,
        tier=Tier.HBM,
        unit=1,
        bucket=2,
        n_bytes=10,
        category=Kind.PARAM,
        why="miss",
    )
    assert list(log) == [
        Event(
            *(0, 1_500_000_000, 250_000_000, "move", 3, "forward", "h2d", "HBM"),
            *(1, 2, 10, "param", "miss", 7),
        )
    ]


def test_what_is_not_said_is_empty() -> None:
    log = ticking()
    log.now(What.DECISION, category="some")
    assert list(log) == [Event(0, 0, 0, "decision", 0, "init", "", "", -1, -1, 0, "some", "", -1)]


def test_a_block_is_an_event_from_its_begin_to_its_end_also_when_it_fails() -> None:
    log = ticking()
    try:
        with log.during(What.PHASE, why="step"):
            raise ValueError
    except ValueError:
        pass
    assert [(e.t_ns, e.dur_ns, e.why) for e in log] == [(0, 1_000_000_000, "step")]


def test_the_ring_keeps_the_last_events_and_their_numbers_tell_of_the_others() -> None:
    log = EventLog(capacity=3)
    for n in range(10):
        log.now(What.LEVEL, n_bytes=n)
    assert len(log) == 3
    assert [(e.seq, e.n_bytes) for e in log.drain()] == [(7, 7), (8, 8), (9, 9)]


def test_draining_forgets_and_looking_does_not() -> None:
    log = EventLog()
    log.now(What.LEVEL)
    assert len(list(log)) == len(list(log)) == 1
    assert len(list(log.drain())) == 1
    assert len(log) == len(list(log.drain())) == 0


def test_clearing_forgets_and_tells_which_number_comes_next() -> None:
    log = EventLog()
    assert log.first_seq == 0
    log.now(What.LEVEL)
    log.clear()
    log.now(What.LEVEL)
    assert [e.seq for e in log] == [log.first_seq]


def test_a_log_that_is_switched_off_takes_nothing_and_uses_up_no_number() -> None:
    log = EventLog()
    log.enabled = False
    log.now(What.LEVEL)
    log.add(What.LEVEL, 0.0, 0.0)
    log.end_access(5, 0.0, 0, 0)
    log.enabled = True
    log.now(What.LEVEL)
    assert [e.seq for e in log] == [0]


def test_something_asynchronous_is_asked_for_its_times_when_drained_and_not_before() -> None:
    log, later = EventLog(), Later(2.0, 5.0)
    log.add(What.MOVE, 0.0, later)
    assert later.asked == 0
    assert [(e.t_ns, e.dur_ns) for e in log.drain()] == [(2_000_000_000, 3_000_000_000)]


def test_a_copy_that_is_put_off_is_drained_when_it_is_over_and_at_the_latest_at_the_end() -> None:
    log = EventLog()
    late, never = Later(2.0, 5.0, is_known=False), Later(3.0, 0.0, is_known=False)
    log.add(What.MOVE, 0.0, late)
    log.add(What.MOVE, 0.0, never)
    log.now(What.LEVEL)

    assert [e.seq for e in log.drain(last=False)] == [2]
    assert len(log) == 2 and [e.seq for e in log] == [0, 1]
    late.is_known = True
    assert [(e.seq, e.dur_ns) for e in log.drain(last=False)] == [(0, 3_000_000_000)]
    assert [(e.seq, e.dur_ns) for e in log.drain()] == [(1, 0)]
    assert len(log) == 0


def test_no_event_is_shorter_than_nothing() -> None:
    log = EventLog()
    log.add(What.WAIT, 5.0, 4.0)
    log.add(What.MOVE, 0.0, Later(5.0, 4.0))
    assert [e.dur_ns for e in log] == [0, 0]


def test_appending_keeps_what_it_was_given_and_formats_nothing() -> None:
    log = EventLog()
    kept: list[tuple[object, ...]] = []
    log.append = kept.append
    later, why = Later(0.0, 1.0), "because"
    log.add(What.MOVE, 0.25, later, lane=Lane.D2H, tier=Tier.HOST, category=Kind.GRAD, why=why)
    row = kept[0]
    assert [row[at] for at in (2, 3, 6, 7, 11)] == [
        *(later, What.MOVE, Lane.D2H, Tier.HOST, Kind.GRAD)
    ]
    assert row[1] == 0.25
    assert row[12] is why


def test_an_access_has_the_number_from_its_begin_and_is_the_cause_of_what_happens_in_it() -> None:
    log = ticking()
    seq, began = log.begin_access(), log.clock()
    log.now(What.MOVE)
    log.end_access(seq, began, 4, 100)
    move, access = log
    assert (move.seq, move.cause) == (1, seq)
    assert (access.seq, access.what, access.lane, access.cause) == (0, "access", "compute", -1)
    assert (access.t_ns, access.dur_ns, access.unit, access.n_bytes) == (0, 2 * 10**9, 4, 100)


def test_who_launches_stands_still_while_it_waits_and_who_works_behind_does_not() -> None:
    log = EventLog()

    def wait() -> None:
        with log.standing("update"):
            pass

    def behind() -> None:
        go_behind()
        assert is_behind()
        wait()

    wait()
    on_thread(behind)
    assert not is_behind()  # each thread speaks for itself
    on_thread(wait)
    assert [(e.what, e.why) for e in log] == [("wait", "update")] * 2


def test_draining_beside_threads_that_append_loses_and_doubles_nothing() -> None:
    log, found = EventLog(), []
    n_threads, n_each = 4, 500
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def append() -> None:
        for _ in range(n_each):
            log.now(What.LEVEL)

    threads = [threading.Thread(target=append) for _ in range(n_threads)]
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            found += [e.seq for e in log.drain()]
    finally:
        for thread in threads:
            thread.join()
        sys.setswitchinterval(switch)
    found += [e.seq for e in log.drain()]
    assert sorted(found) == list(range(n_threads * n_each))


def test_two_that_drain_share_what_is_there() -> None:
    log = EventLog()
    for _ in range(4):
        log.now(What.LEVEL)
    first, second = log.drain(), log.drain()
    seqs = [next(first).seq, next(second).seq, next(first).seq, next(second).seq]
    assert seqs == [0, 1, 2, 3]
    assert list(first) == list(second) == []
