"""The report as PNG, by what is drawn in it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hetero.errors import ConfigError
from hetero.report import png
from hetero.report.measure import Measured, measure
from hetero.report.words import LIGHT, TIER_LABELS, part_label

from .synthetic import plain


def test_without_matplotlib_the_error_names_the_extra(
    measured: Measured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    with pytest.raises(ConfigError) as raised:
        png.write_png(measured, tmp_path / "x.png")
    assert "hetero[plots]" in raised.value.advice


def test_a_panel_for_each_tier_and_one_for_the_step(measured: Measured) -> None:
    pytest.importorskip("matplotlib")
    panels = png.draw(measured).axes
    titles = [panel.get_title(loc="left") for panel in panels[:-1]]
    bars = [label.get_text() for label in panels[-1].get_yticklabels()]

    assert titles == [TIER_LABELS[tier] for tier in measured.timelines]
    assert bars == [part_label(part) for part in measured.parts]
    ends = [bar.get_x() + bar.get_width() for bar in panels[-1].patches]
    assert max(ends) == pytest.approx(measured.step_seconds)


def test_bands_have_the_colours_of_their_tier(measured: Measured) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.colors import to_hex

    for panel, tier in zip(png.draw(measured).axes, measured.timelines, strict=False):
        colours = [to_hex(area.get_facecolor()[0]) for area in panel.collections]
        shown = sum(any(column) for column in measured.timelines[tier].columns)
        assert len(set(colours)) == shown
        assert LIGHT[tier] in colours or shown > 3


def test_it_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    png.write_png(measure(plain()), tmp_path / "x.png")

    assert (tmp_path / "x.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_ticks_are_round_in_binary_units() -> None:
    assert png.binary_ticks(5 * 2**20) == [i * 2**20 for i in range(6)]
    assert len(png.binary_ticks(10**12)) <= 6
