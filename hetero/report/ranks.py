"""One page for all ranks of a run: how their steps differ, and who waited for whom (floor 4)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup
from rich.console import Console
from rich.table import Table

from hetero.errors import ConfigError
from hetero.events import What
from hetero.report.examine import PAGE, SUMMARY, RunReport, examine
from hetero.report.html import asset, pages, palette, policy
from hetero.report.measure import NS, Measured
from hetero.report.run import META, storing
from hetero.report.words import format_seconds, format_share
from hetero.types import format_bytes
from hetero.version import __version__

UNKNOWN = -1
"""Of a wait for other ranks that does not say for which: calls between machines."""


@dataclass(frozen=True, slots=True)
class RankReports:
    """The runs of all ranks, by number."""

    runs: tuple[RunReport, ...]

    @property
    def measured(self) -> list[Measured]:
        return [each.measured for each in self.runs]

    @property
    def ranks(self) -> list[int]:
        return [each.meta.rank for each in self.measured]

    def waited_seconds(self, measured: Measured) -> dict[int, float]:
        """Return how long a rank stood still in a mean steady step, by the rank that was last."""
        begin, end = measured.steps.begin_ns, measured.steps.end_ns
        found: Counter[int] = Counter()
        for event in measured.run.events:
            if event.what == What.WAIT.value and event.why == "ranks" and begin <= event.t_ns < end:
                found[rank_in(event.category)] += event.dur_ns
        return {rank: measured.per_step(ns) / NS for rank, ns in sorted(found.items())}

    @property
    def verdict(self) -> str:
        """What stands first on the page."""
        steps = {each.meta.rank: each.step_seconds for each in self.measured}
        missing = set(range(max(each.meta.n_ranks for each in self.measured))) - set(steps)
        said = f"{len(steps)} ranks; a steady step takes {format_seconds(max(steps.values()))}."
        if missing:
            said += f" No run of rank {', '.join(map(str, sorted(missing)))} is here."
        waited: Counter[int] = Counter()
        for each in self.measured:
            waited.update(self.waited_seconds(each))
        late, seconds = max(waited.items(), key=lambda row: row[1], default=(UNKNOWN, 0.0))
        if seconds and late != UNKNOWN:
            share = seconds / sum(steps.values())
            said += f" Others wait most for rank {late}: {format_share(share)} of their steps."
        return said

    def as_json(self) -> dict[str, Any]:
        return {
            "ranks": {str(each.measured.meta.rank): each.summary.as_json() for each in self.runs},
            "waited_seconds": {
                str(each.meta.rank): {
                    str(rank): seconds for rank, seconds in self.waited_seconds(each).items()
                }
                for each in self.measured
            },
        }

    def write_files(self, output: str | None, png: str | None, perfetto: str | None) -> list[str]:
        """Write the page, if it is requested; ConfigError for files that are of one rank."""
        if png or perfetto:
            raise ConfigError(
                f"{'--png' if png else '--perfetto'} of several ranks",
                advice="name the directory of one rank",
            )
        if output is not None:
            self.write(output)
        return [output] if output else []

    def write(self, path: str | Path) -> None:
        """Write the page, each rank's own page and ``summary.json`` next to it."""
        page = Path(path)
        for each in self.runs:
            each.write(page.parent / f"rank-{each.measured.meta.rank}" / PAGE)
        with storing(page):
            page.write_text(self._page(), "utf-8", "backslashreplace")
            data = json.dumps(self.as_json(), indent=1)
            page.with_name(SUMMARY).write_text(data + "\n", "utf-8")

    def _page(self) -> str:
        colours = "\n".join(dict.fromkeys(map(palette, self.measured)))
        style = "\n".join((asset("report.css"), colours))
        return (
            pages()
            .get_template("ranks.html")
            .render(
                reports=self,
                PAGE=PAGE,
                style=Markup(style),
                policy=policy("", style),
                version=__version__,
            )
        )

    def show(self, console: Console) -> None:
        """Print the figures of all ranks."""
        console.print(self.verdict, highlight=False)
        table = Table()
        for name in ("rank", "step", "stands still", "for ranks", "HBM", "HOST"):
            table.add_column(name, justify="right")
        for each in self.measured:
            still, ranks = each.waited_ns, each.parts.get("wait_ranks", 0)
            peaks = [each.peaks[tier].n_bytes for tier in ("HBM", "HOST") if tier in each.peaks]
            table.add_row(
                str(each.meta.rank),
                format_seconds(each.step_seconds),
                *(format_seconds(each.per_step(ns) / NS) for ns in (still, ranks)),
                *map(format_bytes, peaks),
            )
        console.print(table)


def rank_in(category: str) -> int:
    """Return the rank that a wait's category names."""
    number = category.removeprefix("rank ")
    return int(number) if number.isdecimal() else UNKNOWN


def rank_folders(folder: Path) -> list[Path]:
    """Return the runs inside a directory that is none itself."""
    if (folder / META).exists() or not folder.is_dir():
        return []
    return sorted(each.parent for each in folder.glob(f"*/{META}"))


def examine_ranks(folders: Sequence[Path]) -> RankReports:
    """Return the reports of the runs of all ranks; ConfigError if two are of one rank."""
    runs = sorted((examine(folder) for folder in folders), key=lambda run: run.measured.meta.rank)
    numbers = [run.measured.meta.rank for run in runs]
    twice = next((n for n, count in Counter(numbers).items() if count > 1), None)
    if twice is not None:
        where = folders[0].parent
        raise ConfigError(
            f"{where} holds several runs of rank {twice}",
            advice="name one run's directory, or one with a run of each rank",
        )
    return RankReports(tuple(runs))
