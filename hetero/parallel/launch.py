"""The processes that a launcher, as torchrun, started together (floor 3)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from hetero.device import use_accelerator
from hetero.parallel.farewell import tell_error
from hetero.parallel.mesh import launched


class Launch:
    """This process and those that were started with it; alone without a launcher."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    def first(self, make: Callable[[], str]) -> str:
        """Return what the first rank makes; its error is raised on all of them."""
        if self.size == 1:
            return make()
        told: list[str | BaseException | None] = [None]
        if self.rank == 0:
            try:
                told[0] = make()
            except Exception as error:  # of any kind: the others wait for an answer
                told[0] = error
        dist.broadcast_object_list(told, src=0)
        if isinstance(told[0], BaseException):
            raise told[0]
        return str(told[0])


def launch_rank() -> int:
    """Return this process's number among those that were started together; 0 without a launcher."""
    return int(os.environ["RANK"]) if launched() > 1 else 0


@contextmanager
def launch(timeout_seconds: float) -> Iterator[Launch]:
    """Join the processes that were started together in a process group of gloo, for a block.

    Each takes the CUDA device of its number on this machine. A group that there is already is used,
    and left. An error that ends the block is told to the others.
    """
    makes = not (dist.is_available() and dist.is_initialized())
    if makes and launched() == 1:
        yield Launch()
        return
    if makes:
        use_accelerator(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_seconds))
    try:
        yield Launch(dist.get_rank(), dist.get_world_size())
    except (Exception, KeyboardInterrupt) as error:
        if makes:
            tell_error(error)  # a caller may turn it into an exit status
        raise
    finally:
        if makes:
            dist.destroy_process_group()
