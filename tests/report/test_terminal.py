"""The report in a terminal."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from hetero.report.advice import advise
from hetero.report.measure import Measured, measure
from hetero.report.terminal import show, tier_cells

from .synthetic import paged, plain


def shown(measured: Measured, width: int = 100, terminal: bool = False) -> str:
    out = io.StringIO()
    show(Console(file=out, width=width, force_terminal=terminal), measured, advise(measured))
    return out.getvalue()


def test_the_summary_of_a_recorded_run_fits_on_a_screen(measured: Measured) -> None:
    text = shown(measured)

    assert len(text.splitlines()) <= 40
    assert all(name in text for name in ("HBM", "HOST", "NVMe", "compute, forward", "Try 1"))


def test_the_phase_of_an_optimizers_step_is_not_called_a_step(measured: Measured) -> None:
    peak = replace(measured.peaks["HOST"], step=3, phase="step", unit="")
    said = tier_cells(peak)

    assert said[3] == "step 3, optimizer"


def test_without_a_terminal_everything_is_ascii(measured: Measured) -> None:
    assert shown(measured).isascii()
    assert not shown(measured, terminal=True).isascii()


@pytest.mark.parametrize("made", [plain(1), plain(4), paged(2), paged(30, units=20)])
def test_any_run_fits_on_a_screen(made: object) -> None:
    text = shown(measure(made))

    assert 5 < len(text.splitlines()) <= 40


def test_lost_events_are_said(measured: Measured) -> None:
    run = paged(3)
    cut = type(run).of(run.meta, [e for e in run.events if e.seq % 50])

    assert "events were lost" in shown(measure(cut))
    assert "events were lost" not in shown(measured)
