"""The schedule: planned operations per program point; it prints, parses and verifies (floor 1).

A schedule is advice. Point ``i`` of ``n`` accesses is the moment just after access ``i`` has its
pins; point -1 is the border before the first access, right after the update.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hetero.errors import StateError
from hetero.plan.trace import Access, Trace
from hetero.types import Phase


class Op(NamedTuple):
    """FETCH ``bucket`` into the frames at ``start``, after EVICT of the buckets named."""

    bucket: int
    start: int
    evict: tuple[int, ...] = ()

    def __str__(self) -> str:
        return " ".join(
            [f"FETCH b{self.bucket}@{self.start}", *(f"EVICT b{b}" for b in self.evict)]
        )


class Shape(NamedTuple):
    """What the planner knows of a bucket: frames it fills, and whether an update rewrites it."""

    granules: int
    rewritten: bool


class Schedule(NamedTuple):
    """Accesses of one step and the ops issued at each point; ``ops[0]`` belongs to point -1."""

    trace: Trace
    ops: tuple[tuple[Op, ...], ...]
    limit: int

    def at(self, point: int) -> tuple[Op, ...]:
        """Return the ops of a point, -1 being the border before the first access."""
        return self.ops[point + 1]

    def show(self, names: Sequence[str] | None = None) -> str:
        """Print the schedule, one line per point; `parse` reads it back."""
        rows = [f"# limit {self.limit}", f"{-1:>4}  border |" + _tail(self.at(-1))]
        for i, access in enumerate(self.trace.accesses):
            buckets = ",".join(map(str, access.buckets))
            name = f" {names[access.unit]}" if names else ""
            point = f"{access.phase.value} u{access.unit}[{buckets}]{name}"
            rows.append(f"{i:>4}  {point} |{_tail(self.at(i))}")
        return "\n".join(rows)

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Read what `show` printed; ValueError names the line that does not parse."""
        accesses: list[Access] = []
        ops: list[tuple[Op, ...]] = []
        limit = 0
        for line in text.strip().splitlines():
            if line.startswith("# limit "):
                limit = int(line.removeprefix("# limit "))
                continue
            head, bar, tail = line.partition("|")
            if not bar:
                raise ValueError(f"no program point in {line!r}")
            ops.append(tuple(_parse_op(part) for part in tail.split(";") if part.strip()))
            match = re.match(r"\s*\d+  (\w) u(\d+)\[([\d,]*)\]", head)
            if match:
                buckets = tuple(int(b) for b in match[3].split(",") if b)
                accesses.append(Access(Phase(match[1]), int(match[2]), buckets))
            elif "border" not in head:
                raise ValueError(f"no program point in {line!r}")
        return cls(Trace(tuple(accesses)), tuple(ops), limit)


class Verdict(NamedTuple):
    """What symbolic execution of a schedule found, in its second (steady) step."""

    demand_misses: int
    fetches: int
    peak_granules: int


def verify(schedule: Schedule, shapes: Mapping[int, Shape]) -> Verdict:
    """Execute a schedule symbolically against its limit.

    Raises StateError, with the printed line, when an op overlaps what it does not evict, evicts
    what the access under way needs, or passes the limit.
    """
    resident: dict[int, int] = {}
    misses = fetches = peak = 0
    accesses = schedule.trace.accesses
    for step in range(2):
        resident = {b: at for b, at in resident.items() if not shapes[b].rewritten}
        misses = fetches = 0
        for point in range(-1, len(accesses)):
            needed = accesses[point].buckets if point >= 0 else ()
            for bucket in needed:
                if bucket not in resident:
                    misses += step  # the first step starts cold
                    _demand(resident, shapes, bucket, needed, schedule.limit)
            for op in schedule.at(point):
                if op.bucket in resident:
                    continue
                _apply(resident, shapes, op, needed, schedule.limit, f"{point}: {op}")
                fetches += 1
            peak = max(peak, sum(shapes[b].granules for b in resident))
    return Verdict(misses, fetches, peak)


def _apply(
    resident: dict[int, int],
    shapes: Mapping[int, Shape],
    op: Op,
    needed: Sequence[int],
    limit: int,
    line: str,
) -> None:
    end = op.start + shapes[op.bucket].granules
    if op.start < 0 or end > limit:
        raise StateError(f"{line}   <-- past the limit of {limit} frames")
    for bucket, at in list(resident.items()):
        if at < end and op.start < at + shapes[bucket].granules:
            if bucket in needed:
                raise StateError(f"{line}   <-- b{bucket} is in use here")
            del resident[bucket]
    resident[op.bucket] = op.start


def _demand(
    resident: dict[int, int],
    shapes: Mapping[int, Shape],
    bucket: int,
    needed: Sequence[int],
    limit: int,
) -> None:
    """Place a demand fetch where fewest others have to leave."""
    size = shapes[bucket].granules
    best: tuple[int, int, list[int]] | None = None
    ends = [at + shapes[b].granules for b, at in resident.items()]
    for start in sorted({0, limit - size, *resident.values(), *ends}):
        if start < 0 or start + size > limit:
            continue
        hit = [
            b for b, at in resident.items() if at < start + size and start < at + shapes[b].granules
        ]
        if not any(b in needed for b in hit) and (best is None or len(hit) < best[0]):
            best = (len(hit), start, hit)
    if best is None:
        raise StateError(f"b{bucket} does not fit beside {list(needed)} in {limit} frames")
    for b in best[2]:
        del resident[b]
    resident[bucket] = best[1]


def _tail(ops: Sequence[Op]) -> str:
    return "".join(f" {op};" for op in ops)


def _parse_op(text: str) -> Op:
    match = re.fullmatch(r"\s*FETCH b(\d+)@(\d+)((?: EVICT b\d+)*)\s*", text)
    if not match:
        raise ValueError(f"not an op: {text!r}")
    evict = tuple(int(b) for b in re.findall(r"EVICT b(\d+)", match[3]))
    return Op(int(match[1]), int(match[2]), evict)
