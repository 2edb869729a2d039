"""`hetero.report`: write the page of a run, or of the runs of all ranks (floor 4)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hetero.report.examine import PAGE, RunReport, examine, folder_of
from hetero.report.measure import Summary
from hetero.report.ranks import RankReports, examine_ranks, rank_folders


def report(run_or_model: Any, path: str | Path) -> Summary:
    """Write a run's memory report as one HTML file, and ``summary.json`` next to it.

    Args:
        run_or_model: a run's directory, a `Run`, the object that `hetero.profile` yields, or a
            prepared model, whose run is the last events it kept. A directory with a run of each
            rank inside: one page for all, and theirs in directories next to it.
        path: of the HTML file; in an existing directory, ``report.html``.

    Returns:
        The figures, with the keys of ``summary.json``; of several ranks those of the first.

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
    made = examined(run_or_model)
    made.write(page)
    return made.runs[0].summary if isinstance(made, RankReports) else made.summary


def examined(run_or_model: Any) -> RunReport | RankReports:
    """Return what a run comes to, or the runs of all ranks."""
    folder = folder_of(run_or_model)
    folders = rank_folders(folder) if folder is not None else []
    return examine_ranks(folders) if folders else examine(run_or_model)
