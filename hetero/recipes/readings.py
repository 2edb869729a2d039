"""Samples of probes, and the figures that they make: a median and a spread (floor 4)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hetero.errors import StorageError
from hetero.plan.machine import Figure, Table
from hetero.recipes.probes import Group, Pace, Probe, Rig

DIGITS = 4  # of a measured number: more would be noise
RUN = "run"  # key of their source
Watch = Callable[[str, str, int, int], None]
"""Told of each probe: its group, its key, how many groups are done, and how many there are."""


class Samples(NamedTuple):
    """The samples of one probe."""

    key: str
    at: tuple[int, ...]
    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """Return the median, to `DIGITS` digits."""
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
    """Take samples of a probe: those that warm up are thrown away."""
    for _ in range(pace.warm_ups):
        probe.sample()
    return Samples(probe.key, probe.at, tuple(probe.sample() for _ in range(pace.rounds)))


@dataclass(frozen=True, slots=True)
class Readings:
    """Everything measured, and what could not be."""

    found: tuple[Samples, ...]
    notes: tuple[str, ...] = ()

    def figure(self, key: str) -> Figure | None:
        """Return what a probe without axes found."""
        found = self.of(key)
        return Figure(found[0].median, RUN, found[0].spread) if found else None

    def table(self, key: str) -> Table | None:
        """Return what a probe found along its axes."""
        found = self.of(key)
        rows = tuple((*map(float, each.at), each.median) for each in found)
        return Table(rows, RUN, max(each.spread for each in found)) if found else None

    def best(self, key: str) -> Figure | None:
        """Return the largest of what a probe found along its axes."""
        found = max(self.of(key), key=lambda each: each.median, default=None)
        return Figure(found.median, RUN, found.spread) if found else None

    def last(self, key: str) -> Figure | None:
        """Return what a probe found where its axes are largest."""
        found = self.of(key)
        return Figure(found[-1].median, RUN, found[-1].spread) if found else None

    def of(self, key: str) -> list[Samples]:
        """Return what was measured under a key, in ascending order of its axes."""
        return sorted((each for each in self.found if each.key == key), key=lambda each: each.at)


def take_readings(rig: Rig, groups: Mapping[str, Group], watch: Watch) -> Readings:
    """Measure group by group; one that fails is noted, and the others go on."""
    found: list[Samples] = []
    notes: list[str] = []
    for done, (name, group) in enumerate(groups.items()):
        watch(name, "", done, len(groups))
        try:
            for probe in group(rig):
                watch(name, label(probe.key, probe.at), done, len(groups))
                found.append(measure(probe, rig.pace))
        except (RuntimeError, MemoryError, StorageError) as error:
            notes.append(f"{name}: {str(error).splitlines()[0] or type(error).__name__}")
    watch("", "", len(groups), len(groups))
    return Readings(tuple(found), tuple(notes))


def label(key: str, at: Sequence[int]) -> str:
    return f"{key} {' x '.join(map(str, at))}".rstrip()
