"""torch's orders of passes through stages, of all ranks, without any of them (floor 3)."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from torch import nn

from hetero.internals import StagePass, passes_of
from hetero.parallel.splitting import is_multi, refused


def orders_of(kind: Any, ranks: Sequence[int], n_batches: int) -> list[list[StagePass]]:
    """Return what each rank of a pipeline does in a step.

    Args:
        kind: torch's class of a schedule.
        ranks: of each stage, its rank.

    Raises ConfigError if the schedule does not take so few micro-batches, or that number.
    """
    return [order_of(kind, ranks, n_batches, rank) for rank in range(max(ranks) + 1)]


def order_of(kind: Any, ranks: Sequence[int], n_batches: int, rank: int) -> list[StagePass]:
    """Return what one rank of a pipeline does; see `orders_of`."""
    stages = [
        SimpleNamespace(
            stage_index=index,
            num_stages=len(ranks),
            group_size=max(ranks) + 1,
            group_rank=rank,
            is_first=index == 0,
            is_last=index == len(ranks) - 1,
            submod=nn.Identity(),
        )
        for index, owner in enumerate(ranks)
        if owner == rank
    ]
    try:
        schedule = kind(stages if is_multi(kind) else stages[0], n_batches, nn.MSELoss())
    except ValueError as error:
        raise refused(error, n_batches, len(ranks)) from error
    return passes_of(schedule, rank)
