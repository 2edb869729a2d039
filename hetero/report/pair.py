"""Two runs side by side: what one took, what the other, and the difference (floor 4)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup
from rich.console import Console
from rich.table import Table

from hetero.errors import ConfigError
from hetero.report.examine import SUMMARY, RunReport
from hetero.report.html import asset, pages, palette, policy, said_of
from hetero.report.run import storing
from hetero.report.words import format_share, part_label
from hetero.version import __version__

NAMES = {
    "step.mean_seconds": "a steady step",
    "step.tokens_per_second": "tokens/s",
    "step.exposed_seconds": "stands still, a step",
    **{f"{tier}.peak_bytes": f"{tier.upper()} at its peak" for tier in ("hbm", "host", "nvme")},
    **{f"{tier}.budget_bytes": f"{tier.upper()}'s budget" for tier in ("hbm", "host", "nvme")},
    "fetch.misses": "misses, a step",
    "traffic.h2d_param_bytes": "parameters up, a step",
    "traffic.disk_read_bytes": "read from disk, a step",
    "traffic.disk_write_bytes": "written to disk, a step",
}
SAME = 0.001  # a smaller difference is none


class Row(NamedTuple):
    """A figure of both runs."""

    key: str
    name: str
    first: float | None
    second: float | None

    @property
    def change(self) -> str:
        """The second, measured by the first."""
        if not self.first or self.second is None:
            return "-"
        by = self.second / self.first - 1
        if abs(by) < SAME:
            return "the same"
        return f"{format_share(abs(by))} {'more' if by > 0 else 'less'}"


@dataclass(frozen=True, slots=True)
class PairReport:
    """The reports of two runs; claims are judged on the second, as the one that changed."""

    first: RunReport
    second: RunReport
    names: tuple[str, str]

    @property
    def both(self) -> tuple[RunReport, RunReport]:
        return self.first, self.second

    def rows(self) -> Iterator[Row]:
        """Yield the figures that people compare, and the parts of a step."""
        figures = [each.summary.figures() for each in self.both]
        times = (key for each in figures for key in each if key.startswith("time."))
        parts = {key: part_label(key[len("time.") : -len("_seconds")]) for key in times}
        for key, name in {**NAMES, **parts}.items():
            first, second = (each.get(key) for each in figures)
            if first or second:
                yield Row(key, name, first, second)

    @property
    def verdict(self) -> str:
        """The sentence to send."""
        rows = {row.key: row for row in self.rows()}
        step, hbm = rows.get("step.mean_seconds"), rows.get("hbm.peak_bytes")
        said = [
            f"{row.change} {what}"
            for row, what in ((step, "time a step"), (hbm, "HBM"))
            if row is not None and row.change != "-"
        ]
        found = ", ".join(said) or "no figure is in both"
        return f"{self.names[1]}, against {self.names[0]}: {found}."

    def as_json(self) -> dict[str, Any]:
        """Return the second run's summary, with the first one's under ``against``."""
        return {**self.second.as_json(), "against": self.first.as_json()}

    def write_files(self, output: str | None, png: str | None, perfetto: str | None) -> list[str]:
        """Write the page, if it is requested; ConfigError for files that are of one run."""
        if png or perfetto:
            raise ConfigError(
                f"{'--png' if png else '--perfetto'} of two runs", advice="name one run"
            )
        if output is not None:
            self.write(output)
        return [output] if output else []

    def write(self, path: str | Path) -> None:
        """Write the page, and ``summary.json`` next to it."""
        page = Path(path)
        with storing(page):
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(self._page(), "utf-8", "backslashreplace")
            data = json.dumps(self.as_json(), indent=1)
            page.with_name(SUMMARY).write_text(data + "\n", "utf-8")

    def _page(self) -> str:
        colours = "\n".join(dict.fromkeys(palette(each.measured) for each in self.both))
        style = "\n".join((asset("report.css"), colours))
        template = pages().get_template("pair.html")
        words = {"style": Markup(style), "policy": policy("", style), "version": __version__}
        return template.render(pair=self, said_of=said_of, **words)

    def show(self, console: Console) -> None:
        """Print the figures of both."""
        console.print(self.verdict, highlight=False)
        table = Table()
        table.add_column("")
        for name in (*self.names, "change"):
            table.add_column(name, justify="right", overflow="fold")
        for row in self.rows():
            cells = ("-" if n is None else said_of(row.key, n) for n in (row.first, row.second))
            table.add_row(row.name, *cells, row.change)
        console.print(table)
