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
    """FETCH ``bucket`` into the frames at ``start``, after EVICT of the buckets named.

    A DEMAND is a fetch that no earlier point had room for: the access itself makes it, before its
    pins; the plan only gives the address.
    """

    bucket: int
    start: int
    evict: tuple[int, ...] = ()
    demand: bool = False

    def __str__(self) -> str:
        verb = "DEMAND" if self.demand else "FETCH"
        return " ".join(
            [f"{verb} b{self.bucket}@{self.start}", *(f"EVICT b{b}" for b in self.evict)]
        )


class Shape(NamedTuple):
    """A bucket as the planner sees it: its frames, and whether an update rewrites it."""

    granules: int
    rewritten: bool


class Schedule(NamedTuple):
    """Accesses of one step, and the ops issued at each point; ``ops[0]`` is of point -1."""

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
        """Parse the output of `show`; ValueError names the line that does not parse."""
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


class ScheduleVerdict(NamedTuple):
    """The result of symbolic execution, of the second (steady) step."""

    demand_misses: int
    fetches: int
    peak_granules: int


def verify(schedule: Schedule, shapes: Mapping[int, Shape]) -> ScheduleVerdict:
    """Execute a schedule symbolically against its limit; the second step is judged.

    Raises StateError, with the printed line, if an op overlaps buckets that it does not evict,
    touches buckets of the access under way, or passes the limit.
    """
    frames = _Frames(shapes, schedule.limit)
    verdict = ScheduleVerdict(0, 0, 0)
    for steady in (False, True):
        frames.update()
        misses = fetches = peak = 0
        for point in range(-1, len(schedule.trace.accesses)):
            needed = schedule.trace.accesses[point].buckets if point >= 0 else ()
            demands = [op for op in schedule.at(point) if op.demand]
            misses += sum(frames.apply(op, (), f"{point}: {op}", steady) for op in demands)
            misses += frames.demand(needed)
            planned = [op for op in schedule.at(point) if not op.demand]
            fetches += sum(frames.apply(op, needed, f"{point}: {op}", steady) for op in planned)
            peak = max(peak, sum(shapes[b].granules for b in frames.resident))
        verdict = ScheduleVerdict(misses, fetches, peak)
    return verdict


class _Frames:
    """Residency of a symbolic execution: bucket -> first frame."""

    def __init__(self, shapes: Mapping[int, Shape], limit: int) -> None:
        self.shapes = shapes
        self.limit = limit
        self.resident: dict[int, int] = {}

    def update(self) -> None:
        """Drop the buckets that a step's update rewrites."""
        for bucket in [b for b in self.resident if self.shapes[b].rewritten]:
            del self.resident[bucket]

    def apply(self, op: Op, needed: Sequence[int], line: str, strict: bool) -> bool:
        """Carry out one op; False if there is nothing to do or, unless ``strict``, on a clash."""
        if op.bucket in self.resident and op.bucket not in op.evict and not op.demand:
            for bucket in op.evict:
                self.resident.pop(bucket, None)
            return False
        if op.start < 0 or op.start + self.shapes[op.bucket].granules > self.limit:
            raise StateError(f"{line}   <-- past the limit of {self.limit} frames")
        hit = self.overlapping(op.start, self.shapes[op.bucket].granules)
        used = [b for b in (*hit, *op.evict) if b in needed]
        left = [b for b in hit if b not in op.evict]
        if used or left:
            if strict:
                why = f"b{used[0]} is in use here" if used else f"b{left[0]} is not evicted"
                raise StateError(f"{line}   <-- {why}")
            if used:
                return False
        for bucket in (*hit, *op.evict):
            self.resident.pop(bucket, None)
        self.resident[op.bucket] = op.start
        return True

    def demand(self, needed: Sequence[int]) -> int:
        """Fetch the missing buckets of an access, with fewest evictions; return how many."""
        missing = [b for b in dict.fromkeys(needed) if b not in self.resident]
        if all(self._place(bucket, needed) for bucket in missing):
            return len(missing)
        self.resident.clear()  # too scattered: start over from empty frames
        for bucket in dict.fromkeys(needed):
            if not self._place(bucket, needed):
                raise StateError(f"b{bucket} does not fit with {list(needed)} in {self.limit}")
        return len(missing)

    def overlapping(self, start: int, length: int) -> list[int]:
        """Return the buckets that share frames with [start, start + length)."""
        return [
            b
            for b, at in self.resident.items()
            if at < start + length and start < at + self.shapes[b].granules
        ]

    def _place(self, bucket: int, needed: Sequence[int]) -> bool:
        size = self.shapes[bucket].granules
        ends = [at + self.shapes[b].granules for b, at in self.resident.items()]
        best: tuple[int, int, list[int]] | None = None
        for start in sorted({0, self.limit - size, *self.resident.values(), *ends}):
            hit = self.overlapping(start, size)
            fits = 0 <= start <= self.limit - size and not any(b in needed for b in hit)
            if fits and (best is None or len(hit) < best[0]):
                best = (len(hit), start, hit)
        if best is None:
            return False
        for other in best[2]:
            del self.resident[other]
        self.resident[bucket] = best[1]
        return True


def _tail(ops: Sequence[Op]) -> str:
    return "".join(f" {op};" for op in ops)


def _parse_op(text: str) -> Op:
    match = re.fullmatch(r"\s*(FETCH|DEMAND) b(\d+)@(\d+)((?: EVICT b\d+)*)\s*", text)
    if not match:
        raise ValueError(f"not an op: {text!r}")
    evict = tuple(int(b) for b in re.findall(r"EVICT b(\d+)", match[4]))
    return Op(int(match[2]), int(match[3]), evict, match[1] == "DEMAND")
