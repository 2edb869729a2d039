"""Where a chain of units is cut into stages that weigh alike (pure, no torch)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

ENDLESS = float("inf")


@dataclass(frozen=True, slots=True)
class Weight:
    """What a unit costs the rank that has it."""

    seconds: float
    """Of its forward and backward, once."""
    n_bytes: int
    """Of its parameters."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Units in a row, with what each run of them weighs."""

    seconds: tuple[float, ...]
    """Of all units before each one, and of all."""
    n_bytes: tuple[int, ...]

    @staticmethod
    def of(units: Sequence[Weight]) -> Chain:
        seconds = accumulate((unit.seconds for unit in units), initial=0.0)
        n_bytes = accumulate((unit.n_bytes for unit in units), initial=0)
        return Chain(tuple(seconds), tuple(n_bytes))

    def weight(self, start: int, end: int) -> Weight:
        """Return what the units from one to before another weigh."""
        seconds, n_bytes = self.seconds, self.n_bytes
        return Weight(seconds[end] - seconds[start], n_bytes[end] - n_bytes[start])


def cut(units: Sequence[Weight], n_stages: int) -> list[int]:
    """Return the first unit of each stage; every stage has one at least.

    No other cut has a faster slowest stage; of those that are as fast, none has a smaller largest
    stage; of these, none has a smaller sum of squared seconds. Exact, by dynamic programming over
    the stages; takes time as ``n_stages * len(units) ** 2``.

    Raises ValueError if there are fewer units than stages.
    """
    if not 0 < n_stages <= len(units):
        raise ValueError(f"{len(units)} units are not cut into {n_stages} stages")
    chain = Chain.of(units)
    slowest = chain.weight(*worst(chain, n_stages, max, lambda w: w.seconds)).seconds
    fast = partial_cost(lambda w: w.n_bytes, lambda w: w.seconds <= slowest)
    largest = chain.weight(*worst(chain, n_stages, max, fast)).n_bytes
    even = partial_cost(
        lambda w: w.seconds**2, lambda w: w.seconds <= slowest and w.n_bytes <= largest
    )
    return best(chain, n_stages, lambda before, own: before + own, even)


def partial_cost(
    cost: Callable[[Weight], float], allowed: Callable[[Weight], bool]
) -> Callable[[Weight], float]:
    """Return a cost that is endless for a stage that is not allowed."""
    return lambda weight: cost(weight) if allowed(weight) else ENDLESS


def worst(
    chain: Chain,
    n_stages: int,
    joined: Callable[[float, float], float],
    cost: Callable[[Weight], float],
) -> tuple[int, int]:
    """Return the ends of the dearest stage of the best cut."""
    starts = best(chain, n_stages, joined, cost)
    ends = [*starts[1:], len(chain.seconds) - 1]
    return max(zip(starts, ends, strict=True), key=lambda run: cost(chain.weight(*run)))


def best(
    chain: Chain,
    n_stages: int,
    joined: Callable[[float, float], float],
    cost: Callable[[Weight], float],
) -> list[int]:
    """Return the first units of the stages of a cut of the least cost, which is ``joined`` from the
    costs of its stages."""
    n = len(chain.seconds) - 1
    # by the number of units in the stages so far: the least cost, and where the last one begins
    costs = [0.0, *[ENDLESS] * n]
    begins: list[list[int]] = []
    for stage in range(n_stages):
        left = n_stages - 1 - stage  # stages still to come
        row, at = [ENDLESS] * (n + 1), [0] * (n + 1)
        for end in range(stage + 1, n - left + 1):
            for start in range(stage, end):
                found = joined(costs[start], cost(chain.weight(start, end)))
                if found < row[end]:
                    row[end], at[end] = found, start
        costs = row
        begins.append(at)
    starts, end = [], n
    for at in reversed(begins):
        end = at[end]
        starts.append(end)
    return starts[::-1]
