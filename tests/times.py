"""Seconds of every test, its children's CPU included: what a run leaves in runs/times.tsv.

`python -m tests.times [FILE]` prints the sums of a file, and the tests that took most.
"""

from __future__ import annotations

import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

LAST = Path(__file__).parent.parent / "runs" / "times.tsv"
SLOWEST = 10


class Seconds(NamedTuple):
    wall: float
    cpu: float
    """User and system time of this process, and of its children that ended and were waited for."""


class Row(NamedTuple):
    test: str
    seconds: Seconds
    is_case: bool
    """Whether it is one case of a campaign."""


def now() -> Seconds:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return Seconds(time.perf_counter(), sum(use.ru_utime + use.ru_stime for use in used))


class Times:
    """Measures where tests run, and writes where reports arrive: under xdist, two processes.

    What a fixture of the whole run takes is counted with the first test that asks for it.
    """

    def __init__(self, path: Path = LAST) -> None:
        self.path = path
        self.rows: list[Row] = []
        self._began = Seconds(0.0, 0.0)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        self._began = now()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        report = yield
        if report.when == "teardown":
            report.seconds = [end - start for end, start in zip(now(), self._began, strict=True)]
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            is_case = "campaign" in report.keywords
            self.rows.append(Row(report.nodeid, Seconds(*report.seconds), is_case))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.rows and not hasattr(session.config, "workerinput"):  # the workers' rows are here
            write(self.rows, self.path)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if terminalreporter.config.getoption("times"):
            terminalreporter.section("seconds by file")
            terminalreporter.write_line(show(self.rows))


def write(rows: Iterable[Row], path: Path) -> None:
    """Write a line a test: CPU seconds, wall seconds, campaign or not, its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        f"{seconds.cpu:.3f}\t{seconds.wall:.3f}\t{'campaign' if is_case else ''}\t{test}\n"
        for test, seconds, is_case in sorted(rows)
    ]
    path.write_text("".join(["cpu\twall\tkind\ttest\n", *lines]))


def read(path: Path) -> list[Row]:
    rows = [line.split("\t", 3) for line in path.read_text().splitlines()[1:]]
    return [
        Row(test, Seconds(float(wall), float(cpu)), bool(kind)) for cpu, wall, kind, test in rows
    ]


def by_file(rows: Iterable[Row]) -> dict[str, Seconds]:
    """Return the sum of each file, the most CPU first."""
    sums: defaultdict[str, Seconds] = defaultdict(lambda: Seconds(0.0, 0.0))
    for test, seconds, _ in rows:
        name = test.partition("::")[0]
        sums[name] = total([sums[name], seconds])
    return dict(sorted(sums.items(), key=lambda item: -item[1].cpu))


def show(rows: list[Row]) -> str:
    sums = by_file(rows)
    slowest = sorted(rows, key=lambda row: -row.seconds.cpu)[:SLOWEST]
    both = [*sums.items(), ("all files", total(sums.values()))]
    both += [(row.test, row.seconds) for row in slowest]
    return "\n".join(f"{s.cpu:8.1f} s CPU {s.wall:8.1f} s wall  {name}" for name, s in both)


def total(values: Iterable[Seconds]) -> Seconds:
    rows = [Seconds(0.0, 0.0), *values]
    return Seconds(*map(sum, zip(*rows, strict=True)))


if __name__ == "__main__":
    print(show(read(Path(sys.argv[1]) if len(sys.argv) > 1 else LAST)))
