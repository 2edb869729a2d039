"""In which order a rank runs the micro-batches of a pipeline, and how long all ranks take (floor 1;
no torch).

Orders are those of torch.distributed.pipelining. A rank begins an action when the one before it is
over and what it needs has come; sends go on meanwhile.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from hetero.errors import ConfigError

INTERLEAVED = "interleaved"
KINDS = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    INTERLEAVED: "Interleaved1F1B",
    "interleaved-zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
"""Schedules whose backwards come in the order of micro-batches, by name: torch's."""
HALVED = ("interleaved-zb", "zbv", "dualpipev")
"""Those that compute gradients of weights apart from those of inputs."""
LOOPED = (INTERLEAVED, "interleaved-zb")
"""Those that go round the ranks several times."""
V_SHAPED = ("zbv", "dualpipev")
"""Those whose ranks have two stages each, the first rank the first and the last."""
SCHEDULES = tuple(KINDS)


class Pass(NamedTuple):
    """A forward or a backward of a micro-batch."""

    batch: int
    forward: bool
    turn: int = 0
    """Which of its rank's stages runs it, the one with the first layers first."""
    half: str = ""
    """Of a backward: I for gradients of inputs, W for those of weights; empty for both."""


WHOLE_BATCH = (Pass(0, forward=True), Pass(0, forward=False))


def round_of(schedule: str, n_ranks: int, n_batches: int, n_turns: int) -> int:
    """Return how many micro-batches a stage runs before its rank turns to its next one.

    Schedules of halves have no rounds: all micro-batches are one. Raises ConfigError for a schedule
    that has no order, or that cannot have this one.
    """
    if schedule not in SCHEDULES:
        raise ConfigError(
            f"schedule={schedule!r} is not planned", advice=f"use one of {', '.join(SCHEDULES)}"
        )
    takes = n_turns == 2 if schedule in V_SHAPED else (n_turns > 1) == (schedule in LOOPED)
    if not takes:
        raise ConfigError(
            f"schedule={schedule!r} with {n_turns} stages a rank",
            advice=f"{' and '.join(LOOPED)} take 2 or more, {' and '.join(V_SHAPED)} 2, the others"
            " one",
        )
    if schedule in HALVED:
        return n_batches
    rounds = max(1, n_batches // n_ranks) if n_turns > 1 else 1
    if n_batches % rounds:
        raise ConfigError(
            f"{INTERLEAVED} makes no equal rounds of {n_batches} micro-batches on {n_ranks} ranks",
            advice=f"use a multiple of {n_ranks} micro-batches",
        )
    return n_batches // rounds


def ranks_of(schedule: str, n_ranks: int, n_turns: int) -> list[int]:
    """Return the rank of each stage."""
    ranks = list(range(n_ranks))
    return [*ranks, *reversed(ranks)] if schedule in V_SHAPED else ranks * n_turns


def order_of(
    schedule: str, n_ranks: int, n_batches: int, rank: int, n_turns: int = 1, at_once: int = 0
) -> list[Pass]:
    """Return what a rank does in a step, of a schedule without halves; ConfigError for what
    `round_of` refuses.

    Args:
        n_turns: stages of a rank: of so many times ``n_ranks``, each ``n_ranks``-th one.
        at_once: micro-batches of a round; 0: `round_of`. Without turns it says nothing.
    """
    at_once = at_once or round_of(schedule, n_ranks, n_batches, n_turns)
    if schedule in HALVED:
        raise ValueError(f"the order of {schedule!r} is torch's own")
    turns = [step // at_once % n_turns for step in range(n_batches * n_turns)]
    forwards = [Pass(n, forward=True, turn=turn) for n, turn in numbered(turns)]
    backwards = [Pass(n, forward=False, turn=n_turns - 1 - turn) for n, turn in numbered(turns)]
    if schedule == "gpipe":
        return forwards + backwards
    after = n_ranks - 1 - rank
    ahead = min(len(forwards), after if n_turns == 1 else (n_turns - 1) * at_once + 2 * after)
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(forwards) - ahead :]


def numbered(turns: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield a micro-batch with each turn: each stage runs them in their order."""
    counts = [itertools.count() for _ in range(max(turns, default=0) + 1)]
    return ((next(counts[turn]), turn) for turn in turns)


def most_in_flight(order: Sequence[Pass]) -> int:
    """Return how many micro-batches wait for their backward, or its second half, at once."""
    most = now = 0
    for each in order:
        now += 1 if each.forward else -(each.half != "I")
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
"""(rank, place in its order) -> seconds."""


def played(
    orders: Sequence[Sequence[Pass]],
    seconds: PassSeconds,
    send_seconds: Callable[[int], float] = lambda stage: 0.0,
    ranks: Sequence[int] = (),
) -> Played:
    """Run all ranks' orders.

    ``send_seconds`` is the time between stage n and n + 1, either way; ``ranks`` are those of each
    stage, which go round the ranks if it is left out.
    """
    n_turns = 1 + max((each.turn for order in orders for each in order), default=0)
    sent = _Sent(ranks or [*range(len(orders))] * n_turns, send_seconds)
    places, clocks = [0] * len(orders), [0.0] * len(orders)
    busy = [0.0] * len(orders)
    left = sum(map(len, orders))
    while left:
        before = left
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                here = order[places[rank]]
                arrival = sent.arrival(rank, here)
                if arrival is None:
                    break
                spent = seconds(rank, places[rank])
                clocks[rank] = max(clocks[rank], arrival) + spent
                busy[rank] += spent
                sent.done(rank, here, clocks[rank])
                places[rank] += 1
                left -= 1
        if left == before:
            raise ValueError("a pipeline whose stages wait for each other")
    return Played(max(clocks), tuple(clocks), tuple(busy))


class _Sent:
    """When passes were done, and what they sent is there."""

    def __init__(self, ranks: Sequence[int], seconds: Callable[[int], float]) -> None:
        self._stages = [[s for s, r in enumerate(ranks) if r == rank] for rank in {*ranks}]
        self._n_stages = len(ranks)
        self._seconds = seconds
        self._done: dict[tuple[int, int, bool], float] = {}

    def done(self, rank: int, here: Pass, at: float) -> None:
        """Note a pass; the second half of a backward sends nothing."""
        if here.half != "W":
            self._done[self._stages[rank][here.turn], here.batch, here.forward] = at

    def arrival(self, rank: int, here: Pass) -> float | None:
        """Return when what a pass needs is there; None if another stage has not made it."""
        stage = self._stages[rank][here.turn]
        if here.half == "W":
            return self._done.get((stage, here.batch, False))
        needs = stage - 1 if here.forward else stage + 1
        if not here.forward and (stage, here.batch, True) not in self._done:
            return None
        if not 0 <= needs < self._n_stages:
            return 0.0
        made = self._done.get((needs, here.batch, here.forward))
        return None if made is None else made + self._seconds(min(needs, stage))
