"""In which order a rank runs the micro-batches of a pipeline, and how long all ranks take (floor 1;
no torch).

Orders are those of torch.distributed.pipelining. A rank begins an action when the one before it is
over and what it needs has come; sends go on meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from hetero.errors import ConfigError

SCHEDULES = ("1f1b", "gpipe")


class Pass(NamedTuple):
    """A forward or a backward of a micro-batch."""

    batch: int
    forward: bool


WHOLE_BATCH = (Pass(0, forward=True), Pass(0, forward=False))


def order_of(schedule: str, n_stages: int, n_batches: int, stage: int) -> list[Pass]:
    """Return what a stage does in a step; ConfigError for a schedule that has no order here."""
    if schedule not in SCHEDULES:
        raise ConfigError(
            f"schedule={schedule!r} is not planned", advice=f"use one of {', '.join(SCHEDULES)}"
        )
    forwards = [Pass(batch, forward=True) for batch in range(n_batches)]
    backwards = [Pass(batch, forward=False) for batch in range(n_batches)]
    if schedule == "gpipe":
        return forwards + backwards
    ahead = min(n_batches, n_stages - 1 - stage)
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[n_batches - ahead :]


def most_in_flight(order: Sequence[Pass]) -> int:
    """Return how many micro-batches wait for their backward at once."""
    most = now = 0
    for each in order:
        now += 1 if each.forward else -1
        most = max(most, now)
    return most


class Played(NamedTuple):
    """A step of a pipeline."""

    seconds: float
    """Until the last rank is done."""
    ends: tuple[float, ...]
    """When each rank is done with its passes."""
    busy: tuple[float, ...]
    """How long each one computes."""

    @property
    def bubble(self) -> float:
        """The part of a step in which the busiest rank waits for others."""
        return 1 - max(self.busy) / self.seconds if self.seconds else 0.0


PassSeconds = Callable[[int, int], float]
"""(stage, place in its order) -> seconds."""


def played(
    orders: Sequence[Sequence[Pass]],
    seconds: PassSeconds,
    send_seconds: Callable[[int], float] = lambda stage: 0.0,
) -> Played:
    """Run all stages' orders, each on a rank of its own.

    ``send_seconds`` is the time between stage n and n + 1, either way.
    """
    done: dict[tuple[int, Pass], float] = {}
    places, clocks = [0] * len(orders), [0.0] * len(orders)
    busy = [0.0] * len(orders)
    left = sum(map(len, orders))
    while left:
        before = left
        for stage, order in enumerate(orders):
            while places[stage] < len(order):
                here = order[places[stage]]
                arrival = _arrival(done, stage, len(orders), here, send_seconds)
                if arrival is None:
                    break
                spent = seconds(stage, places[stage])
                clocks[stage] = max(clocks[stage], arrival) + spent
                busy[stage] += spent
                done[stage, here] = clocks[stage]
                places[stage] += 1
                left -= 1
        if left == before:
            raise ValueError("a pipeline whose stages wait for each other")
    return Played(max(clocks), tuple(clocks), tuple(busy))


def _arrival(
    done: dict[tuple[int, Pass], float],
    stage: int,
    n_stages: int,
    here: Pass,
    send_seconds: Callable[[int], float],
) -> float | None:
    """Return when what a pass needs is there; None if another stage has not made it."""
    needs = stage - 1 if here.forward else stage + 1
    if not here.forward and (stage, here._replace(forward=True)) not in done:
        return None
    if not 0 <= needs < n_stages:
        return 0.0
    made = done.get((needs, here))
    return None if made is None else made + send_seconds(min(needs, stage))
