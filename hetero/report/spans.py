"""Arithmetic of time: spans of whole nanoseconds, so that parts add up to the whole exactly."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Interval(NamedTuple):
    """Time from ``begin_ns`` to ``end_ns``, exclusive."""

    begin_ns: int
    end_ns: int
    label: str = ""

    @property
    def dur_ns(self) -> int:
        return self.end_ns - self.begin_ns


def flatten(spans: Iterable[Interval]) -> list[Interval]:
    """Return disjoint spans in order: where several overlap, the one that began first counts.

    A span inside another vanishes; one that outlasts it counts from the other's end.
    """
    flat: list[Interval] = []
    end_ns = 0
    for span in sorted(spans, key=lambda s: (s.begin_ns, -s.end_ns)):
        begin_ns = max(span.begin_ns, end_ns) if flat else span.begin_ns
        if span.end_ns > begin_ns:
            flat.append(Interval(begin_ns, span.end_ns, span.label))
            end_ns = span.end_ns
    return flat


def total_ns(spans: Iterable[Interval]) -> int:
    """Return the length of the union of spans."""
    return sum(span.dur_ns for span in flatten(spans))


def uncovered(below: list[Interval], above: list[Interval]) -> list[Interval]:
    """Return the parts of ``below`` that ``above`` leaves free; both disjoint and in order."""
    left: list[Interval] = []
    first = 0
    for span in below:
        at_ns = span.begin_ns
        while first < len(above) and above[first].end_ns <= at_ns:
            first += 1
        for cover in onwards(above, first):
            if cover.begin_ns >= span.end_ns:
                break
            if cover.begin_ns > at_ns:
                left.append(Interval(at_ns, cover.begin_ns, span.label))
            at_ns = max(at_ns, cover.end_ns)
        if at_ns < span.end_ns:
            left.append(Interval(at_ns, span.end_ns, span.label))
    return left


def onwards(spans: list[Interval], first: int) -> Iterator[Interval]:
    """Yield spans from an index on, without a copy of the rest."""
    return (spans[i] for i in range(first, len(spans)))


def stack(layers: Iterable[Iterable[Interval]]) -> list[Interval]:
    """Return disjoint spans, in order, of layers; each layer hides those after it."""
    seen: list[Interval] = []
    for layer in layers:
        seen = sorted(seen + uncovered(flatten(layer), seen))
    return seen


class Stack:
    """Disjoint spans in order, to be queried by window."""

    def __init__(self, spans: list[Interval]) -> None:
        self._spans = spans
        self._ends = [span.end_ns for span in spans]

    def within(self, begin_ns: int, end_ns: int) -> Iterator[Interval]:
        """Yield the spans in a window, cut to it."""
        for span in onwards(self._spans, bisect_right(self._ends, begin_ns)):
            if span.begin_ns >= end_ns:
                return
            yield Interval(max(span.begin_ns, begin_ns), min(span.end_ns, end_ns), span.label)

    def split(self, begin_ns: int, end_ns: int, rest: str) -> dict[str, int]:
        """Return nanoseconds by label, with ``rest`` for uncovered time; their sum is exact."""
        parts: Counter[str] = Counter()
        for span in self.within(begin_ns, end_ns):
            parts[span.label] += span.dur_ns
        free_ns = end_ns - begin_ns - sum(parts.values())
        return {**parts, rest: parts[rest] + free_ns}
