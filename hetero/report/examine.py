"""A run, what it comes to, and its page (floor 4)."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from hetero.errors import ConfigError
from hetero.parse import Unparsable, json_of, read_text
from hetero.report import terminal
from hetero.report.advice import Advice, advise, headline, verdict
from hetero.report.html import render
from hetero.report.measure import Measured, Summary, figures, measure, summarize
from hetero.report.run import EVENTS, MAX_META_BYTES, MAX_NUMBER, Run, known, storing
from hetero.report.views import Sidecar, WhatIf

PREDICTED, WHATIF, SUMMARY = "predicted.json", "whatif.json", "summary.json"
PAGE = "report.html"


@dataclass(frozen=True, slots=True)
class RunReport:
    measured: Measured
    summary: Summary
    advice: tuple[Advice, ...]
    sidecar: Sidecar

    def as_json(self) -> dict[str, Any]:
        return self.summary.as_json()

    def show(self, console: Console) -> None:
        """Print the figures and what to try."""
        terminal.show(console, self.measured, self.advice, self.sidecar.plain_seconds)

    def write_files(self, output: str | None, png: str | None, perfetto: str | None) -> list[str]:
        """Write the requested files; returns their paths."""
        if output is not None:
            self.write(output)
        if png is not None:
            from hetero.report.png import write_png

            write_png(self.measured, png)
        if perfetto is not None:
            from hetero.report.perfetto import write_perfetto

            write_perfetto(self.measured, perfetto)
        return [path for path in (output, png, perfetto) if path]

    def write(self, path: str | Path) -> None:
        """Write the page, and ``summary.json`` next to it."""
        page = Path(path)
        text = render(self.measured, self.summary, self.advice, self.sidecar)
        data = json.dumps(self.summary.as_json(), indent=1)
        with storing(page):
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(text, "utf-8", "backslashreplace")  # half a surrogate pair in a name
            page.with_name(SUMMARY).write_text(data + "\n", "utf-8")


def examine(run_or_model: Any, sidecar: Sidecar | None = None) -> RunReport:
    """Return what a run comes to; the sidecar is that in its directory, if none is given."""
    measured = measure(run_of(run_or_model))
    advice = advise(measured)
    folder = folder_of(run_or_model)
    sidecar = sidecar or (Sidecar() if folder is None else sidecar_of(folder))
    sentence = headline(measured, sidecar.plain_seconds)
    said = (sentence, verdict(measured), *(each.text for each in advice))
    return RunReport(measured, summarize(measured, said), advice, sidecar)


def folder_of(run_or_model: Any) -> Path | None:
    if isinstance(run_or_model, (str, Path)):
        return Path(run_or_model)
    directory = getattr(run_or_model, "directory", None)
    return directory if isinstance(directory, Path) else None


def run_of(run_or_model: Any) -> Run:
    """Return the run of any argument that `report` takes."""
    if isinstance(run_or_model, Run):
        return run_or_model
    folder = folder_of(run_or_model)
    if folder is not None:
        return Run.load(folder)
    from hetero.report.ring import kept_run  # loads torch, which reading a directory does not need

    return kept_run(run_or_model)


def sidecar_of(folder: Path) -> Sidecar:
    """Return the plans next to a run, and the digest of its log."""
    rows = read_json(folder / WHATIF, [])
    predicted = read_json(folder / PREDICTED, {})
    log = folder / EVENTS
    digest = hashlib.sha256(log.read_bytes()).hexdigest() if log.exists() else ""
    try:
        planned = tuple(known(WhatIf, row) for row in rows)
    except Unparsable as error:
        raise ConfigError(
            f"{folder / WHATIF}: {error}", advice="write it anew: hetero plan"
        ) from error
    odd = [key for key, value in figures(predicted).items() if not abs(value) < MAX_NUMBER]
    if odd:
        raise ConfigError(
            f"{folder / PREDICTED}: {odd[0]} is no figure", advice="write it anew: hetero plan"
        )
    return Sidecar(predicted, planned, digest)


def read_json(path: Path, default: Any) -> Any:
    """Return a file's data, or ``default`` if there is no file."""
    if not path.exists():
        return default
    try:
        data = json_of(read_text(path, MAX_META_BYTES).encode())
    except (OSError, Unparsable) as error:
        raise ConfigError(f"{path}: {error}", advice="write it anew: hetero plan") from error
    if not isinstance(data, type(default)):
        raise ConfigError(f"{path} is no {type(default).__name__}", advice="hetero plan writes it")
    return data
