"""Where the time of a step went: a partition of it, exact to the nanosecond.

Every moment of a step belongs to the first of these that holds:

1. something waits (WAIT): ``wait_<for what>``; of overlapping waits, the first to begin
2. a unit computes (ACCESS): ``compute_<phase>``
3. it is in a phase: ``rest_forward``, ``rest_backward``, ``step``
4. it is in the step: ``between``

So the parts of a step sum to it by construction, and no moment counts twice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hetero.events import Event, What
from hetero.report.spans import Interval, Stack, stack
from hetero.report.words import LANES

BETWEEN = "between"
WARMUP = 2  # steps: the first is traced, the second confirms it; from then on the plan works


@dataclass(frozen=True, slots=True)
class StepTime:
    number: int
    begin_ns: int
    end_ns: int
    parts: dict[str, int]
    """Nanoseconds by part; their sum is ``wall_ns``."""

    @property
    def wall_ns(self) -> int:
        return self.end_ns - self.begin_ns


@dataclass(frozen=True, slots=True)
class Steps:
    """The complete steps of a run."""

    all: tuple[StepTime, ...]
    warmup: tuple[int, ...]
    """Numbers of the steps left out of steady figures."""
    steady: tuple[StepTime, ...]

    @property
    def begin_ns(self) -> int:
        """The begin of the first steady step."""
        return self.steady[0].begin_ns if self.steady else 0

    @property
    def end_ns(self) -> int:
        return self.steady[-1].end_ns if self.steady else 0

    def at(self, t_ns: int) -> StepTime | None:
        place = bisect_right(self.all, t_ns, key=lambda step: step.begin_ns) - 1
        found = self.all[place] if place >= 0 else None
        return found if found is not None and t_ns < found.end_ns else None

    def typical(self) -> StepTime | None:
        """Return the steady step of median length."""
        ordered = sorted(self.steady, key=lambda step: step.wall_ns)
        return ordered[len(ordered) // 2] if ordered else None


def span_of(event: Event, label: str = "") -> Interval:
    return Interval(event.t_ns, event.t_ns + event.dur_ns, label)


def moments(events: Sequence[Event]) -> Stack:
    """Return the part that each moment belongs to, except ``between``."""
    waits = (span_of(e, f"wait_{e.why}") for e in events if e.what == What.WAIT.value)
    accesses = (span_of(e, f"compute_{e.phase}") for e in events if e.what == What.ACCESS.value)
    phases = (span_of(e, phase_part(e.why)) for e in events if e.what == What.PHASE.value)
    return Stack(stack((waits, accesses, phases)))


def phase_part(why: str) -> str:
    return "step" if why == "step" else f"rest_{why}"


def steps_of(events: Sequence[Event], warmup: int = WARMUP) -> Steps:
    """Return the complete steps, each with its parts; the first ``warmup`` are not steady."""
    here = moments(events)
    found = []
    end_ns = 0
    for event in (e for e in events if e.what == What.STEP.value):
        begin_ns = max(event.t_ns, end_ns)  # the clocks' rounding may let two overlap
        end_ns = max(begin_ns, event.t_ns + event.dur_ns)
        parts = here.split(begin_ns, end_ns, BETWEEN)
        found.append(StepTime(event.step, begin_ns, end_ns, parts))
    early = warmup_of([step.number for step in found], warmup)
    return Steps(tuple(found), early, tuple(s for s in found if s.number not in early))


def warmup_of(numbers: Sequence[int], warmup: int = WARMUP) -> tuple[int, ...]:
    """Return the steps left out of steady figures: numbers below ``warmup``, if others remain."""
    early = tuple(number for number in numbers if number < warmup)
    return early if len(early) < len(numbers) else early[:-1]


def sums(steps: Iterable[StepTime]) -> dict[str, int]:
    """Return nanoseconds by part, summed over steps."""
    found: dict[str, int] = {}
    for step in steps:
        for part, ns in step.parts.items():
            found[part] = found.get(part, 0) + ns
    return {part: found[part] for part in sorted(found, key=part_order) if found[part]}


PART_ORDER = ("compute", "wait", "rest", "step", "between")
WITHIN = ("forward", "backward", *LANES)


def part_order(part: str) -> tuple[int, int, str]:
    """Order parts: compute, waits, the rest of phases, step, between."""
    head, _, tail = part.partition("_")
    place = PART_ORDER.index(head) if head in PART_ORDER else len(PART_ORDER)
    return place, WITHIN.index(tail) if tail in WITHIN else len(WITHIN), part
