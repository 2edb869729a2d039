"""What a run advises: computed from it, bounded by it, and silent where nothing is to gain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetero.report.advice import WORTH, advise, outside, verdict
from hetero.report.measure import NS, Measured, measure
from hetero.report.run import Run

from .synthetic import paged, plain


def test_advice_never_gains_more_than_what_was_waited_for(measured: Measured) -> None:
    found = advise(measured)

    assert 1 <= len(found) <= 3
    for each in found:
        waited = measured.per_step(measured.waited_ns + measured.parts.get("between", 0)) / NS
        assert each.gain_seconds <= waited * (1 + 1e-9)
    assert [a.gain_seconds for a in found] == sorted((a.gain_seconds for a in found), reverse=True)


def test_exposed_fetches_become_bytes_of_hbm() -> None:
    made = measure(paged(8))
    exposed = sum(c.miss_wait_ns + c.late_wait_ns for c in made.counts.values())
    first = advise(made)[0]
    kept = next(k for k in range(9) if f"keeps {k} more unit" in first.change)

    assert first.change.startswith(f"hbm= +{kept * 64} KiB")
    assert 0.8 / 2 <= first.gain_seconds * NS / made.per_step(exposed) <= 0.5  # one fetch of two


def test_a_run_that_never_waits_has_nothing_to_gain() -> None:
    made = measure(plain(6))

    assert advise(made) == ()
    assert "nothing to gain" in verdict(made)


def test_states_on_disk_are_worth_the_memory_that_holds_them(measured: Measured) -> None:
    nvme = measured.peaks["NVME"].categories["state"]
    waits = sum(measured.parts.get(f"wait_{why}", 0) for why in ("update", "read", "write"))
    said = [a for a in advise(measured) if a.change.startswith("host= +")]

    assert nvme > 0
    assert bool(said) == (waits >= WORTH * measured.steady_ns) or len(advise(measured)) == 3
    for each in said:
        assert each.gain_seconds == pytest.approx(measured.per_step(waits) / NS)


def test_a_budget_that_is_not_used_can_be_lowered() -> None:
    run = paged(6)
    roomy = replace(run.meta, budgets={"HBM": 2**20, "HOST": None})
    made = measure(Run.of(roomy, run.events))
    free = 2**20 - made.peaks["HBM"].n_bytes

    assert any(f"can be {free // 1024} KiB lower" in a.change for a in advise(made))


def test_a_slow_link_is_measured_against_its_ceiling() -> None:
    run = paged(6)
    made = measure(Run.of(replace(run.meta, ceilings={"h2d": 1e12}), run.events))

    assert any("chunk_bytes" in a.change and "1000 GB/s" in a.change for a in advise(made))


def test_the_verdict_of_a_run_without_steps_says_so(run: Run) -> None:
    made = measure(Run.of(run.meta, [e for e in run.events if e.what != "step"]))

    assert verdict(made).startswith("No complete step")
    assert advise(made) == ()


def test_a_plan_is_not_told_to_load_its_data_earlier() -> None:
    run = paged(6)
    late = [e._replace(dur_ns=5 * e.dur_ns) if e.what == "step" else e for e in run.events]
    idle = Run.of(run.meta, [e for e in late if e.what != "step" or e.step in (2, 5)])
    planned = Run.of(replace(run.meta, kind="predicted"), idle.events)

    assert any("next batch" in a.change for a in outside(measure(idle)))
    assert list(outside(measure(planned))) == []
