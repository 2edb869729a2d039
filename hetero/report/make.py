"""`hetero.report`: write the page of a run, or of the runs of all ranks (floor 4)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hetero.report.examine import PAGE, RunReport, examine, folder_of
from hetero.report.measure import Summary
from hetero.report.pair import PairReport
from hetero.report.ranks import RankReports, examine_ranks, rank_folders


def report(run_or_model: Any, path: str | Path, *, other: Any = None) -> Summary:
    """Write a run's memory report as one HTML file, and ``summary.json`` next to it.

    Args:
        run_or_model: a run's directory, a `Run`, the object that `hetero.profile` yields, or a
            prepared model, whose run is the last events it kept. A directory with a run of each
            rank inside: one page for all, and theirs in directories next to it.
        path: of the HTML file; in an existing directory, ``report.html``.
        other: another run: the page shows both side by side.

    Returns:
        The figures, with the keys of ``summary.json``; of several ranks those of the first, of two
        runs those of the other.

    Raises:
        ConfigError: this is no run, or it has no events.
        StorageError: the files cannot be written.

    Example:
        >>> import torch, hetero
        >>> model = torch.nn.Linear(4, 1)
        >>> with hetero.profile(model, "run") as run:
        ...     model(torch.ones(2, 4)).sum().backward()
        >>> hetero.report(run, "report.html").mode
        'plain'
    """
    page = Path(path) / PAGE if Path(path).is_dir() else Path(path)
    made = examined(run_or_model, other)
    made.write(page)
    if isinstance(made, PairReport):
        return made.second.summary
    return made.runs[0].summary if isinstance(made, RankReports) else made.summary


def told_apart(first: Any, second: Any) -> tuple[str, str]:
    """Return short names of two runs: the last parts of their paths that differ."""
    folders = [folder_of(each) for each in (first, second)]
    if folders[0] is None or folders[1] is None:
        return "the first", "the second"
    paths = [folder.resolve().parts for folder in folders if folder is not None]
    for count in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-count:]) for parts in paths]
        if names[0] != names[1]:
            return names[0], names[1]
    name = paths[0][-1]
    return f"{name} (first)", f"{name} (second)"


def examined(run_or_model: Any, other: Any = None) -> RunReport | RankReports | PairReport:
    """Return what a run comes to, or the runs of all ranks; with another run, both side by side."""
    if other is not None:
        return PairReport(examine(run_or_model), examine(other), told_apart(run_or_model, other))
    folder = folder_of(run_or_model)
    folders = rank_folders(folder) if folder is not None else []
    return examine_ranks(folders) if folders else examine(run_or_model)
