"""The page of a watched program: one HTML file without script or network (floor 4)."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment
from markupsafe import Markup

from hetero.report.run import storing
from hetero.report.templating import templates
from hetero.report.words import format_seconds
from hetero.types import format_bytes
from hetero.version import __version__
from hetero.watch.picture import MEANING, MemoryUse, Picture
from hetero.watch.report import Report, cut, described
from hetero.watch.steps import StepRow

MOST = 40  # rows of a table
WIDE, HIGH = 1000.0, 120.0  # of a chart's plane


def write(report: Report, path: Path) -> None:
    """Write the page; StorageError if it cannot be."""
    text = render(report)
    with storing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8", "backslashreplace")


def render(report: Report) -> str:
    """Return the page."""
    style = (files("hetero.watch") / "templates" / "watch.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return (
        pages()
        .get_template("watch.html")
        .render(
            report=report,
            pictures=pictures(report),
            style=Markup(style),
            policy=f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'",
            line=line_of(report.rows),
            version=__version__,
        )
    )


@cache
def pages() -> Environment:
    """Return the templates with their words."""
    made = templates("hetero.watch")
    made.filters.update(bytes=format_bytes, seconds=format_seconds, described=described, cut=cut)
    made.globals.update(USES=tuple(MemoryUse), MEANING=MEANING, MOST=MOST, WIDE=WIDE, HIGH=HIGH)
    return made


def pictures(report: Report) -> list[Picture]:
    """Return the pictures to show, the first one first: each that has bytes, once."""
    found = [report.picture, report.peak, report.last]
    shown: list[Picture] = []
    for each in found:
        if each is not None and each.n_bytes and each not in shown:
            shown.append(each)
    return shown


def line_of(rows: Sequence[StepRow]) -> str:
    """Return the points of a line through the bytes after each step."""
    most = max((row.live_bytes for row in rows), default=0) or 1
    last = max((row.step for row in rows), default=0) or 1
    points = (
        f"{WIDE * row.step / last:.1f},{HIGH * (1 - row.live_bytes / most):.1f}" for row in rows
    )
    return " ".join(points)
