"""The report's pictures as one PNG, for places that show no HTML (floor 4; needs matplotlib)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hetero.errors import ConfigError
from hetero.report.advice import verdict
from hetero.report.levels import RESERVED, Timeline
from hetero.report.measure import NS, Measured
from hetero.report.run import storing
from hetero.report.words import (
    format_seconds,
    format_share,
    part_colour,
    part_label,
    shades,
    tier_label,
)
from hetero.types import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, ROW = 11.0, 2.4  # inches
DOTS_PER_INCH = 130


def write_png(measured: Measured, path: str | Path) -> None:
    """Write tiers over time and the parts of a step; ConfigError without matplotlib."""
    figure = draw(measured)
    with storing(path):
        figure.savefig(path, format="png", dpi=DOTS_PER_INCH)


def draw(measured: Measured) -> Figure:
    """Return the picture: a panel for each tier, and one for the parts of a steady step."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "a PNG needs matplotlib, which is not installed",
            advice="pip install 'hetero[plots]'; the HTML report needs nothing",
        ) from error
    lines = list(measured.timelines.values())
    count = len(lines) + bool(measured.parts)
    figure = Figure(figsize=(WIDTH, ROW * max(1, count) + 0.8), layout="constrained")
    figure.suptitle(f"{measured.meta.model}: {verdict(measured)}", fontsize=10, wrap=True)
    panels: list[Axes] = list(figure.subplots(count, 1, squeeze=False)[:, 0]) if count else []
    for panel, line in zip(panels, lines, strict=False):
        draw_tier(panel, measured, line)
    if measured.parts:
        draw_parts(panels[-1], measured)
    return figure


def draw_tier(panel: Axes, measured: Measured, line: Timeline) -> None:
    """Draw a tier's timeline, its budget and its peak."""
    shown = [i for i, column in enumerate(line.columns) if any(column)]
    times = [(t_ns - measured.begin_ns) / NS for t_ns in line.times_ns]
    end = (measured.end_ns - measured.begin_ns) / NS
    areas = panel.stackplot(
        [*times, end],
        *([*line.columns[i], line.columns[i][-1]] for i in shown),
        labels=[line.categories[i] for i in shown],
        colors=shades(line.tier, len(shown)),
        step="post",
    )
    for area, i in zip(areas, shown, strict=True):
        area.set_hatch("///" if line.categories[i].endswith(RESERVED) else "")
    draw_budget(panel, measured, line)
    panel.set_title(tier_label(line.tier, measured.meta.mode), loc="left", fontsize=10)
    panel.set_xlim(0, end)
    panel.set_yticks(binary_ticks(panel.get_ylim()[1]))
    panel.yaxis.set_major_formatter(lambda value, _: format_bytes(value))
    panel.set_xlabel("seconds", fontsize=8)
    panel.tick_params(labelsize=8)
    panel.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)


def binary_ticks(top_bytes: float) -> list[int]:
    """Return at most six round values in binary units, from zero up."""
    apart = 1
    while apart * 5 < top_bytes:
        apart *= 2
    return [i * apart for i in range(int(top_bytes / apart) + 1)]


def draw_budget(panel: Axes, measured: Measured, line: Timeline) -> None:
    peak = measured.peaks[line.tier]
    panel.axhline(peak.n_bytes, color="#444444", linestyle=":", linewidth=1)
    said = f"peak {format_bytes(peak.n_bytes)}"
    budget = peak.budget_bytes
    if budget is not None:
        said += f" of {format_bytes(budget)}"
        if budget < 4 * peak.n_bytes:
            panel.axhline(budget, color="#b35900", linestyle="--", linewidth=1)
    panel.set_title(said, loc="right", fontsize=9)
    panel.set_ylim(bottom=0)


def draw_parts(panel: Axes, measured: Measured) -> None:
    """Draw the parts of a mean steady step, each starting at the end of the one before."""
    at = 0.0
    parts = measured.parts
    for row, (part, ns) in enumerate(parts.items()):
        seconds = measured.per_step(ns) / NS
        panel.barh(row, seconds, left=at, color=part_colour(part))
        at += seconds
        said = f" {format_seconds(seconds)} ({format_share(ns / measured.steady_ns)})"
        panel.text(at, row, said, va="center", fontsize=8)
    panel.set_yticks(range(len(parts)), [part_label(part) for part in parts], fontsize=8)
    panel.invert_yaxis()
    panel.set_xlim(0, at * 1.15 or 1)
    panel.set_xlabel("seconds of a mean steady step", fontsize=8)
    panel.tick_params(axis="x", labelsize=8)
