"""The passes of a step, dealt out to the ranks that share the model (floor 4)."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from hetero.device.comm import Comm, Company
from hetero.errors import ConfigError

T = TypeVar("T")


class Passes:
    """Which passes are this rank's: of N ranks, rank r has those of numbers r, r + N, ...

    A sum over ranks adds in just that order, so N ranks come to the weights of one that makes all
    passes (bit for bit if N is a power of two, without dropout).

    Ranks that divide a tensor make the same passes.

    Args:
        comm: ranks that divide the passes.
        everyone: all ranks of the run.
        count: passes of a step.
        seed: of the run.
    """

    def __init__(self, comm: Comm, everyone: Company, count: int, seed: int) -> None:
        if count % comm.size:
            raise ConfigError(
                f"--accumulate {count} on {comm.size} ranks, which divide the passes of a step",
                advice=f"use --accumulate {-(-count // comm.size) * comm.size}",
            )
        self.size = comm.size
        self._comm = comm
        self._everyone = everyone
        self._count = count
        self._seed = seed

    def mine(self, items: Sequence[T]) -> list[tuple[int, T]]:
        """Return this rank's items with their numbers."""
        return list(enumerate(items))[self._comm.rank :: self.size]

    def begin(self, step: int, number: int) -> None:
        """Seed the global generators for a pass if ranks divide them: dropout then depends on the
        pass, and not on how many ranks there are. One rank draws on, as in a plain loop."""
        if self.size > 1:
            torch.manual_seed(self._seed * 1_000_003 + step * self._count + number)

    def all(self, mine: Sequence[T]) -> list[T]:
        """Return what ranks found for their items, in the items' order. Collective."""
        told: list[list[T]] = self._told(list(mine), "figures of a step")
        return [row[at] for at in range(len(mine)) for row in told]

    def dealt(self, items: Sequence[T]) -> list[T]:
        """Return items of which ranks take equally many, the last one perhaps more than once: those
        that gather have to ask for the same parameters."""
        most = -(-len(items) // self.size) * self.size
        return [*items, *[items[-1]] * (most - len(items))] if items else []

    def any(self, mine: T | None) -> T | None:
        """Return the first rank's answer that is not None. Collective."""
        rows = self._everyone.agree(pickle.dumps(mine), "whether to stop")
        told: list[T | None] = [pickle.loads(row) for row in rows]
        return next((each for each in told if each is not None), None)

    def _told(self, mine: Any, what: str) -> list[Any]:
        rows = self._comm.agree(pickle.dumps(mine), what)
        return [pickle.loads(row) for row in rows]  # of this very program
