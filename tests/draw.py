"""Which cases of a campaign are run: as many as fit its seconds, in an order that a seed shuffles.

The seed is the commit, so that over many commits all cases are run. What is left of the seconds is
the chance of one case more: a campaign whose cases are longer than its seconds is run by some
commits only, and over many commits each campaign takes its seconds. How long a case takes is the
mean of its campaign in `case_seconds.tsv`, which is committed: every process of a run, and every
repetition of it, draws the same cases. All campaigns of a run take `ALL_SECONDS` at most.
`python -m tests.draw [FILE]` brings the file up to date from the seconds that a run left
(`bash tests/run.sh --all` runs all cases).
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path

from tests.times import LAST, Row, read

ROOT = Path(__file__).parent.parent
KNOWN = ROOT / "tests/case_seconds.tsv"
ALL_SECONDS = 210.0
"""CPU seconds of all campaigns of a run."""
UNKNOWN_SECONDS = 4.0
"""CPU seconds that are expected of a case of a campaign that was not measured yet."""


def campaign_of(test: str) -> str:
    """Return the name of a test without that of its case."""
    return test.partition("[")[0]


def commit() -> str:
    """Return the commit of this checkout, "" where there is none."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def drawn(tests: Collection[str], seconds: float, case_seconds: float, seed: str) -> set[str]:
    """Return the cases of one campaign that a seed draws: as many as fit ``seconds``, on average.

    ``case_seconds`` are expected of a case.
    """
    order = sorted(tests)
    dice = random.Random(f"{seed} {campaign_of(order[0])}")
    dice.shuffle(order)
    return set(order[: int(seconds / max(case_seconds, 0.001) + dice.random())])


def share_of_all(asked: Iterable[float]) -> float:
    """Return the part of its seconds that each campaign gets, so that all of them take at most
    `ALL_SECONDS`: a new campaign takes from the others, and not from the time of a commit."""
    return min(1.0, ALL_SECONDS / max(sum(asked), 0.001))


def expected(path: Path = KNOWN) -> dict[str, float]:
    """Return {campaign: CPU seconds of a case} as they were when the file was made."""
    rows = (line.split("\t") for line in path.read_text().splitlines())
    return {campaign: float(seconds) for seconds, campaign in rows}


def record(rows: Iterable[Row], path: Path = KNOWN) -> None:
    """Write the means of campaigns that ran; others stay as they were while their file is there."""
    ran: defaultdict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.is_case:
            ran[campaign_of(row.test)].append(row.seconds.cpu)
    known = {name: mean for name, mean in expected(path).items() if file_of(name).exists()}
    known.update((name, sum(each) / len(each)) for name, each in ran.items())
    path.write_text("".join(f"{mean:.2f}\t{name}\n" for name, mean in sorted(known.items())))


def file_of(test: str) -> Path:
    return ROOT / test.partition("::")[0]


if __name__ == "__main__":
    record(read(Path(sys.argv[1]) if len(sys.argv) > 1 else LAST))
