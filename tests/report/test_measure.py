"""Figures of runs: what adds up, adds up exactly, and equals what brute force finds."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.errors import ConfigError
from hetero.events import Event
from hetero.report.levels import COLUMNS, m4, reduced
from hetero.report.measure import Measured, figures, measure, summarize
from hetero.report.residency import residency_of
from hetero.report.run import BucketMeta, Meta, Run
from hetero.report.timing import steps_of, warmup_of
from hetero.report.traffic import lane_charts, lanes_of

from .synthetic import KIB, Writer, meta_of, paged, plain

TIERS = ("HBM", "HOST", "NVME")


def totals(run: Run, tier: str) -> list[int]:
    """Return what a ledger held after each charge, the plain way."""
    levels: Counter[str] = Counter()
    found = []
    for event in run.events:
        if event.what == "level" and event.tier == tier:
            levels[event.category] = event.n_bytes
            found.append(sum(levels.values()))
    return found


RUNS = [paged(4), paged(1, units=3, seed=1), plain()]


@pytest.mark.parametrize("made", RUNS, ids=["paged", "one step", "plain"])
def test_a_peak_is_what_brute_force_finds(made: Run) -> None:
    for tier, peak in measure(made).peaks.items():
        assert peak.n_bytes == max(totals(made, tier))


def test_a_recorded_peak_is_what_brute_force_finds(run: Run, measured: Measured) -> None:
    assert set(measured.peaks) == set(TIERS)
    for tier, peak in measured.peaks.items():
        assert peak.n_bytes == max(totals(run, tier))
        assert peak.n_bytes <= (peak.budget_bytes or peak.n_bytes)


def test_categories_sum_to_the_ledgers_total_at_every_moment(run: Run, measured: Measured) -> None:
    for tier, line in measured.timelines.items():
        rows = list(zip(*line.columns, strict=True))
        assert [sum(row) for row in rows] == list(line.totals)
        assert [n for n in line.totals if n] and max(line.totals) == max(totals(run, tier))
        assert min(min(column) for column in line.columns) >= 0


def test_shares_and_categories_of_a_peak_sum_to_it(measured: Measured) -> None:
    for peak in measured.peaks.values():
        assert sum(peak.categories.values()) == peak.n_bytes
        assert sum(share.n_bytes for share in peak.shares) == peak.n_bytes
        assert peak.unattributed_bytes <= peak.n_bytes


def test_replicas_at_the_peak_are_those_that_hbm_was_charged_for(measured: Measured) -> None:
    peak = measured.peaks["HBM"]
    params = [share for share in peak.shares if share.category == "param"]

    assert params and all(share.module for share in params)


@pytest.mark.parametrize("late_ns", [0, 99])
def test_owners_of_a_peak_do_not_depend_on_how_late_they_were_logged(late_ns: int) -> None:
    log, meta = Writer(), meta_of(3)
    for unit in range(2):  # the last comes, another thread is charged, and the first goes
        replica = {"tier": "HBM", "bucket": unit, "n_bytes": 64 * KIB, "category": "param"}
        log.charge("HBM", "param", 64 * KIB)
        log.t_ns += 1
        if unit:
            log.charge("HBM", "grad", KIB)
        log.t_ns += late_ns
        log.add("alloc", **replica, why="F")
    log.add("free", tier="HBM", bucket=0, n_bytes=64 * KIB, category="param", why="evict")
    log.t_ns += late_ns
    log.charge("HBM", "param", -64 * KIB)
    peak = measure(Run.of(meta, log.events)).peaks["HBM"]

    assert {share.module: share.n_bytes for share in peak.shares if share.category == "param"} == {
        "blocks.0": 64 * KIB,
        "blocks.1": 64 * KIB,
    }


def test_parts_of_a_recorded_step_sum_to_it_exactly(measured: Measured) -> None:
    assert len(measured.steps.all) == 5
    for step in measured.steps.all:
        assert sum(step.parts.values()) == step.wall_ns
        assert min(step.parts.values()) >= 0
    assert any(part.startswith("wait_") for part in measured.parts)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["wait", "access", "phase", "level", "move"]),
        *(st.integers(0, 90), st.integers(0, 40)),
        st.sampled_from(["h2d", "d2h", "update", "forward", "backward", "step"]),
        *(st.integers(0, 5), st.sampled_from(TIERS), st.sampled_from(["param", "grad", ""])),
    ),
    max_size=25,
)


def random_run(rows: list[tuple[str, int, int, str, int, str, str]]) -> Run:
    """Return a run of two steps in which anything may overlap anything."""
    events = [
        Event(i, 50 * i, 50, "step", i, "step", "", "", -1, -1, 0, "", "", -1) for i in (0, 1)
    ]
    for seq, (what, begin, length, why, n_bytes, tier, category) in enumerate(rows, 2):
        lane = why if what == "move" and why in ("h2d", "d2h") else "h2d" if what == "move" else ""
        at = (seq, begin, 0 if what == "level" else length, what, 0, why)
        events.append(Event(*at, lane, tier, 0, 0, n_bytes, category, why, -1))
    return Run.of(Meta(model="M", units=["u"]), events)


@settings(max_examples=60, deadline=None)
@given(EVENTS)
def test_parts_sum_to_the_step_whatever_overlaps(rows: list[tuple]) -> None:
    found = measure(random_run(rows))

    for step in found.steps.all:
        assert sum(step.parts.values()) == step.wall_ns
    waits = {e for e in found.run.events if e.what == "wait" and e.dur_ns}
    inside = {t for e in waits for t in range(e.t_ns, e.t_ns + e.dur_ns) if t < 100}
    counted = sum(
        ns for step in found.steps.all for part, ns in step.parts.items() if part[:5] == "wait_"
    )
    assert counted == len(inside)  # no moment twice, none left out


@settings(max_examples=40, deadline=None)
@given(EVENTS)
def test_a_lane_is_never_busy_longer_than_the_wall(rows: list[tuple]) -> None:
    found = measure(random_run(rows))

    for lane in found.lanes:
        assert 0 <= lane.busy_ns <= lane.wall_ns
    for tier, line in found.timelines.items():
        assert max(line.totals) == max(totals(found.run, tier))


def test_the_ledger_of_traffic_sums_to_what_the_lanes_moved(measured: Measured) -> None:
    for lane in measured.lanes:
        rows = [row for row in measured.ledger if row.lane == lane.lane]
        assert sum(row.n_bytes for row in rows) == lane.n_bytes
    assert {row.lane for row in measured.ledger} == {"h2d", "d2h", "read", "write"}


def test_the_bins_of_a_lane_sum_to_what_it_moved(run: Run, measured: Measured) -> None:
    for chart in lane_charts(run.events, measured.begin_ns, measured.end_ns):
        moved = [e.n_bytes for e in run.events if e.what == "move" and e.lane == chart.lane]
        assert sum(chart.n_bytes) == sum(moved)
        assert max(chart.busy_ns) <= chart.bin_ns


def test_no_run_fetches_less_than_the_least_possible(measured: Measured) -> None:
    made = measure(paged(6))

    for found in (measured, made):
        assert found.bound.n_bytes > 0
    assert made.per_step(made.h2d_params()) >= made.bound.n_bytes


def test_the_bound_follows_its_formula() -> None:
    made = measure(paged(6, units=8))
    whole = 8 * 64 * 1024
    room = 4 * 64 * 1024 + 300 * 1024 - 200 * 1024  # budget less what activations take

    assert made.bound.trainable_bytes == made.bound.backward_bytes == whole
    assert made.bound.n_bytes == whole + (whole - room)


def test_every_fetch_is_a_stay_with_the_reason_of_its_copy(run: Run, measured: Measured) -> None:
    copies = Counter(
        (e.bucket, e.why) for e in run.events
        if e.what == "move" and (e.lane, e.category) == ("h2d", "param")
    )  # fmt: skip
    stays = Counter((stay.bucket, stay.why_in) for stay in measured.residency.stays)

    assert copies == stays
    assert {why for _, why in stays} >= {"F", "B", "plan"}


def test_hits_and_misses_of_a_bucket_sum_to_its_accesses() -> None:
    made = measure(paged(5))

    for counts in made.counts.values():
        assert counts.hits + counts.misses == counts.accesses == 2 * made.steady_count
        assert counts.prefetches == counts.hits  # each unit goes after each access
        assert counts.unused == 0


def test_waits_inside_one_another_count_once_for_a_stay() -> None:
    made = paged(3, units=2)
    waits = [e for e in made.events if e.what == "wait" and e.bucket == 0 and e.dur_ns]
    outer = [e for e in waits if e.category == "param"]
    stays = residency_of(made.events, made.meta).of_bucket(0)

    assert len(waits) > len(outer) > 0
    assert sum(stay.waited_ns for stay in stays) == sum(e.dur_ns for e in outer)


def test_slack_of_a_prefetch_is_from_its_arrival_to_its_first_use() -> None:
    planned = [stay for stay in measure(paged(6)).residency.stays if stay.why_in == "plan"]

    assert planned
    for stay in planned:
        assert stay.first_use_ns is not None and stay.slack_ns is not None
        assert stay.slack_ns == stay.first_use_ns - stay.ready_ns < 0  # half a copy too late


@pytest.mark.parametrize(
    ("numbers", "left_out"),
    [([0, 1, 2, 3], (0, 1)), ([0, 1], (0,)), ([0], ()), ([7, 8], ()), ([], ())],
)
def test_warm_up_leaves_at_least_one_step(numbers: list[int], left_out: tuple[int, ...]) -> None:
    assert warmup_of(numbers) == left_out


def test_a_reduced_timeline_is_small_and_keeps_its_peak() -> None:
    line = measure(paged(300)).timelines["HBM"]
    small = reduced(line, [(line.times_ns[50], line.times_ns[60])])

    assert len(line.times_ns) > 2 * len(small.times_ns)
    assert len(small.times_ns) <= 4 * COLUMNS + 2100
    assert max(small.totals) == max(line.totals) and min(small.totals) == min(line.totals)
    assert set(line.times_ns[50:60]) <= set(small.times_ns)
    assert {*zip(small.times_ns, small.totals, strict=True)} <= {
        *zip(line.times_ns, line.totals, strict=True)
    }


def test_each_column_keeps_its_first_lowest_highest_and_last_point() -> None:
    shape = [3, 9, 2, 5, 1, 8, 4, 6]
    times = range(len(shape) * COLUMNS)

    kept = m4(times, shape * COLUMNS)

    assert kept == {8 * column + at for column in range(COLUMNS) for at in (0, 1, 4, 7)}


def test_a_run_without_moves_has_levels_and_times_and_no_stays() -> None:
    made = measure(plain())

    assert made.residency.stays == () and made.ledger == () and made.bound.n_bytes == 0
    assert made.parts == {"compute_forward": 3000, "between": 10}
    assert made.peaks["HBM"].categories["unattributed"] == 7
    assert {s.module for s in made.peaks["HBM"].shares} >= {"blocks.0", "blocks.1", "blocks.2"}


def test_a_run_that_ended_in_its_first_step_has_bytes_and_no_times(run: Run) -> None:
    cut = [e for e in run.events if e.what != "step"]
    made = measure(Run.of(run.meta, cut))
    summary = summarize(made)

    assert made.steps.all == () and made.parts == {}
    assert made.peaks["HBM"].n_bytes > 0
    assert summary.step.count == 0 and summary.step.mean_seconds == 0


def test_an_empty_run_says_what_to_do() -> None:
    with pytest.raises(ConfigError) as raised:
        measure(Run.of(Meta(), []))

    assert "hetero.profile" in raised.value.advice


def test_the_times_of_a_summary_sum_to_its_step(measured: Measured) -> None:
    summary = summarize(measured)

    assert sum(summary.time.values()) == pytest.approx(summary.step.mean_seconds, rel=1e-12)
    assert summary.tiers["hbm"].peak_bytes == sum(summary.tiers["hbm"].at_peak_bytes.values())


def test_keys_of_a_summary_stay(measured: Measured) -> None:
    keys = set(summarize(measured).figures())

    assert keys >= {
        *("schema", "n_params", "events", "dropped_events"),
        *(f"{tier}.peak_bytes" for tier in ("hbm", "host", "nvme")),
        *("hbm.budget_bytes", "hbm.unattributed_bytes", "hbm.at_peak_bytes.param"),
        *("step.count", "step.mean_seconds", "step.median_seconds", "step.exposed_share"),
        *("time.compute_forward_seconds", "time.between_seconds"),
        *(f"{lane}.moved_bytes" for lane in ("h2d", "d2h", "read", "write")),
        *("h2d.busy_share", "h2d.bytes_per_second", "fetch.misses", "fetch.hits"),
        *("traffic.h2d_param_bytes", "traffic.bound_bytes", "traffic.disk_write_bytes"),
    }
    assert figures({"a": {"b": 1, "c": "x", "d": None, "e": True}, "f": 2.5}) == {
        "a.b": 1,
        "f": 2.5,
    }


def test_steps_do_not_overlap_after_rounding() -> None:
    rows = [
        Event(i, 100 * i - i, 100, "step", i, "", "", "", -1, -1, 0, "", "", -1) for i in (0, 1)
    ]
    first, second = steps_of(rows).all

    assert first.end_ns == second.begin_ns == 100


def test_the_access_that_misses_is_a_use_of_what_it_fetched() -> None:
    for stay in measure(paged(4)).residency.stays:
        assert stay.accesses == 1


def test_a_plain_models_activations_are_counted_and_not_reserved() -> None:
    made = plain()
    live = [e._replace(what="live", n_bytes=1) for e in made.events if e.category == "activation"]
    seen = [e._replace(seq=1000 + i) for i, e in enumerate(live)]
    found = measure(Run.of(made.meta, [*made.events, *seen]))

    assert found.peaks == measure(made).peaks
    assert "activation reserved" not in found.timelines["HBM"].categories


def test_a_rate_is_of_moves_that_were_timed_and_of_nothing_else() -> None:
    meta = Meta(units=["a"], buckets=[BucketMeta(0, 8, 2, True)])
    row = partial(Event, step=0, phase="forward", tier="", unit=-1, bucket=0, category="param",
                  why="F", cause=-1)  # fmt: skip
    moves = [
        row(seq=0, t_ns=100, dur_ns=50, what="move", lane="h2d", n_bytes=1000),
        row(seq=1, t_ns=200, dur_ns=0, what="move", lane="h2d", n_bytes=9000),  # only counted
        row(seq=2, t_ns=950, dur_ns=100, what="move", lane="h2d", n_bytes=600),  # half outside
    ]
    (lane,) = lanes_of(moves, meta, 0, 1000)

    assert (lane.n_bytes, lane.moves) == (10_600, 3)
    assert (lane.timed_bytes, lane.busy_ns) == (1300, 100)
    assert lane.bytes_per_second == 1300 * 1e9 / 100
    (untimed,) = lanes_of(moves[1:2], meta, 0, 1000)
    assert untimed.bytes_per_second is None


def test_copies_on_the_simulator_take_the_time_they_took_and_not_the_time_they_were_put_off(
    run: Run, measured: Measured
) -> None:
    """Each copy of it is done on one thread: the lanes together are never busy twice."""
    copies = [e for e in run.events if e.what == "move" and e.lane in ("h2d", "d2h")]
    timed = sorted((e for e in copies if e.dur_ns), key=lambda e: e.t_ns)

    assert len(timed) > 0.95 * len(copies) > 20
    assert all(e.t_ns >= run.events[0].t_ns for e in copies)
    assert sum(e.dur_ns for e in timed) < 0.5 * (measured.end_ns - measured.begin_ns)
    assert all(a.t_ns + a.dur_ns <= b.t_ns + 1000 for a, b in pairwise(timed))
