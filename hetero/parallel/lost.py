"""Collectives that torch makes in a tensor parallel model say which rank was lost (floor 3).

DTensors wait for their collectives in one function of torch's, on any thread. When a rank leaves,
gloo ends such a wait with an error about a connection; the news that ranks of a prepared model have
of each other say which rank left first, and why.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable
from typing import Any

from hetero.errors import HeteroError
from hetero.internals import Replacement, collective_wait, install
from hetero.parallel.farewell import Parting
from hetero.parallel.gloo import Talks
from hetero.parallel.news import HEARING_SECONDS, Left
from hetero.parallel.waits import TIMED_OUT
from hetero.types import noop

WHAT = "a part of a tensor"
_following: weakref.WeakSet[TensorRanks] = weakref.WeakSet()


class TensorRanks:
    """The ranks of a prepared model's tensors."""

    def __init__(self, talks: Talks) -> None:
        self._talks = talks
        self._uninstall = weakref.finalize(self, install(guards()))
        _following.add(self)

    def ask_why(self, error: RuntimeError, began: float) -> None:
        """Raise RankLost if a rank has left, or did not answer within the group's time limit."""
        waits = self._talks.waits
        if TIMED_OUT in str(error):
            raise waits.failed(error, WHAT, began) from error
        unknown = Left(Parting.SILENT, -1, "")
        left = self._talks.news.cause(unknown, HEARING_SECONDS)
        if left is not unknown:
            raise waits.lose(WHAT, left) from error

    def close(self) -> None:
        _following.discard(self)
        self._uninstall()


def follow_tensors(company: object) -> Callable[[], object]:
    """Let waits for collectives of a model's tensors say which rank they have lost.

    Args:
        company: all ranks of the model, or this one alone.

    Returns a function that ends this.
    """
    return TensorRanks(company).close if isinstance(company, Talks) else noop


def _asking(wait: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return torch's wait, whose errors are ours if a rank is lost."""

    @functools.wraps(wait)
    def waited(tensor: Any) -> Any:
        began = time.monotonic()
        try:
            return wait(tensor)
        except RuntimeError as error:
            if not isinstance(error, HeteroError):
                for ranks in list(_following):
                    ranks.ask_why(error, began)
            raise

    return waited


@functools.cache
def guards() -> tuple[Replacement, ...]:
    """Return the function of torch that is replaced while a model of tensors is prepared."""
    return (collective_wait().replaced(_asking),)
