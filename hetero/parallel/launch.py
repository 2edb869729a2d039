"""The processes that a launcher, as torchrun, started together (floor 3)."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist

from hetero.device import use_accelerator
from hetero.errors import DivergenceError
from hetero.members import all_of
from hetero.parallel.farewell import tell_error
from hetero.parallel.gloo import Meetings
from hetero.parallel.news import News
from hetero.parallel.started import launched
from hetero.parallel.waits import POLL_SECONDS, Waits

PAUSES_SECONDS = (*POLL_SECONDS, 0.05)
"""Between looks: a rank that waits long leaves the processors to those that work."""
T = TypeVar("T")


class Launch:
    """This process and those that were started with it; alone without a launcher.

    All of them make the same calls in the same order. Waits are polls.
    """

    def __init__(self, rank: int = 0, size: int = 1, calls: Meetings | None = None) -> None:
        self.rank = rank
        self.size = size
        self.members = all_of(size)
        self._calls = calls

    @property
    def _name(self) -> str:
        return self.members.name(self.rank)

    def each(self, make: Callable[[], T], what: str) -> list[T]:
        """Return what every rank makes, by rank; an error of one is raised on all."""
        if self._calls is None:
            return [make()]
        try:
            row = pickle.dumps((make(), None))
        except Exception as error:  # of any kind: the others wait for an answer
            with suppress(DivergenceError):  # this rank's own error matters more
                self._calls.meet(what, pickle.dumps((None, told(error, self._name))))
            raise
        rows = [pickle.loads(each) for each in self._calls.meet(what, row)]
        for _, failure in rows:
            if failure is not None:
                raise failure
        return [made for made, _ in rows]

    def finish(self, work: dist.Work, what: str) -> None:
        """As `Waits.finish`, of a call of a group of these processes."""
        assert self._calls is not None
        self._calls.waits.finish(work, what)

    def spread(self, row: torch.Tensor, source: int, what: str) -> None:
        """Let all ranks have the bytes of one: uint8 on HOST, written where they are not."""
        if self._calls is not None:
            group = self._calls.group
            self.finish(dist.broadcast(row, source, group=group, async_op=True), what)

    def first(self, make: Callable[[], T], what: str) -> T:
        """Return what the first rank makes; its error is raised on all of them."""
        return cast("T", self.each(lambda: make() if self.rank == 0 else None, what)[0])

    def ready(self, make: Callable[[], T], what: str) -> T:
        """Return what this rank makes for itself; an error of one is raised on all."""
        made: list[T] = []
        self.each(lambda: made.append(make()), what)
        return made[0]


def told(error: Exception, name: str) -> Exception:
    """Return the error of a rank as the others raise it; one that cannot be pickled by its text."""
    try:
        found: Exception = pickle.loads(pickle.dumps(error))
    except Exception:  # an error's own class may raise anything
        found = RuntimeError(f"{type(error).__name__}: {error}")
    if found.args and isinstance(found.args[0], str):
        found.args = (f"{name}: {found.args[0]}", *found.args[1:])
    return found


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
    allowed = timedelta(seconds=timeout_seconds)
    if makes:
        use_accelerator(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("gloo", timeout=allowed)
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(timeout=allowed, backend="gloo") for _ in range(2)]
    news = News(groups[0], all_of(size), rank)
    waits = Waits(news, timeout_seconds, pauses_seconds=PAUSES_SECONDS)
    try:
        yield Launch(rank, size, Meetings(groups[1], waits))
    except (Exception, KeyboardInterrupt) as error:
        if makes:
            tell_error(error)  # a caller may turn it into an exit status
        raise
    finally:
        news.close()
        if dist.is_initialized():
            for group in [None] if makes else groups:
                dist.destroy_process_group(group)
