"""Samples of probes, and their figures: a median and a spread (floor 4)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hetero.errors import DivergenceError, StorageError
from hetero.plan.figures import Figure, Table
from hetero.recipes.probes import Group, Pace, Probe, Rig

DIGITS = 4  # of a measured number: the rest is noise
RUN = "run"  # the key of their source
Watch = Callable[[str, str, int, int], None]
"""Called for each probe with its group, its key, the number of groups done, and of all."""


class Samples(NamedTuple):
    key: str
    at: tuple[int, ...]
    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return rounded(statistics.median(self.samples))

    @property
    def spread(self) -> float:
        """Return the interquartile range over the median."""
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        middle = statistics.median(self.samples)
        return rounded((high - low) / middle, 2) if middle else 0.0


def rounded(value: float, digits: int = DIGITS) -> float:
    return float(f"{value:.{digits}g}")


def measure(probe: Probe, pace: Pace) -> Samples:
    """Take samples of a probe, after those that warm up."""
    for _ in range(pace.warm_ups):
        probe.sample()
    return Samples(probe.key, probe.at, tuple(probe.sample() for _ in range(pace.rounds)))


@dataclass(frozen=True, slots=True)
class Readings:
    """All samples, and notes on failed groups."""

    found: tuple[Samples, ...]
    notes: tuple[str, ...] = ()

    def joined(self, others: Readings) -> Readings:
        return Readings(self.found + others.found, self.notes + others.notes)

    def figure(self, key: str) -> Figure | None:
        """Return the figure of a probe without axes."""
        found = self.of(key)
        return Figure(found[0].median, RUN, found[0].spread) if found else None

    def table(self, key: str) -> Table | None:
        """Return the table of a probe with axes."""
        found = self.of(key)
        rows = tuple((*map(float, each.at), each.median) for each in found)
        return Table(rows, RUN, max(each.spread for each in found)) if found else None

    def best(self, key: str) -> Figure | None:
        """Return the largest figure of a probe along its axes."""
        found = max(self.of(key), key=lambda each: each.median, default=None)
        return Figure(found.median, RUN, found.spread) if found else None

    def last(self, key: str) -> Figure | None:
        """Return the figure of a probe at the largest point of its axes."""
        found = self.of(key)
        return Figure(found[-1].median, RUN, found[-1].spread) if found else None

    def of(self, key: str) -> list[Samples]:
        """Return the samples under a key, in ascending order of its axes."""
        return sorted((each for each in self.found if each.key == key), key=lambda each: each.at)


def take_readings(rig: Rig, groups: Mapping[str, Group], watch: Watch) -> Readings:
    """Measure group by group; a failed group is noted, and the others go on."""
    found: list[Samples] = []
    notes: list[str] = []
    for done, (name, group) in enumerate(groups.items()):
        watch(name, "", done, len(groups))
        try:
            for probe in group(rig):
                watch(name, label(probe.key, probe.at), done, len(groups))
                found.append(measure(probe, rig.pace))
        except DivergenceError:
            raise  # a rank that is lost measures nothing more
        except (RuntimeError, MemoryError, StorageError) as error:
            notes.append(f"{name}: {str(error).splitlines()[0] or type(error).__name__}")
    watch("", "", len(groups), len(groups))
    return Readings(tuple(found), tuple(notes))


def label(key: str, at: Sequence[int]) -> str:
    return f"{key} {' x '.join(map(str, at))}".rstrip()
