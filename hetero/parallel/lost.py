"""Collectives that torch makes in a tensor parallel model say which rank was lost (floor 3).

DTensors wait for their collectives in one function of torch's, on any thread. When a rank leaves,
gloo ends such a wait with an error about a connection; the news that ranks of a prepared model have
of each other say which rank left first, and why.

torch compares no calls: ranks that go different ways wait for each other in collectives of another
kind, or add up numbers of different layers. Before a step all ranks of a tensor therefore meet:
one that made other calls finds the rest waiting, and all of them end.
"""

from __future__ import annotations

import functools
import pickle
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hetero.errors import DivergenceError, HeteroError
from hetero.internals import Replacement, collective_wait, install, n_calls
from hetero.parallel.gloo import Talks
from hetero.parallel.limits import lower
from hetero.train.model.parts import Parts

WHAT = "a part of a tensor"
_following: weakref.WeakSet[TensorRanks] = weakref.WeakSet()


class TensorRanks:
    """The ranks of a prepared model's tensors.

    Args:
        talks: of all ranks of the model.
        n_ranks: those that have the parts of one tensor, which follow each other.
        groups: of torch's, in which tensors' collectives are: they end when our own waits do.
    """

    def __init__(self, talks: Talks, n_ranks: int, groups: Iterable[Any]) -> None:
        self._talks, self._n_ranks = talks, n_ranks
        self._groups = tuple(groups)
        self._begun = self._n_begun()
        self.n_waits = 0
        """For collectives, since the last step."""
        self._uninstall = weakref.finalize(self, install(guards()))
        limited = lower(self._groups, talks.waits.timeout_seconds)
        self._take_back = weakref.finalize(self, limited)
        _following.add(self)

    def meet(self, facts: Mapping[str, str]) -> None:
        """Compare what ranks of a tensor have done since the last step, and how they step now: what
        ``facts`` say, by name. Raises DivergenceError on all of them.

        Collectives have to differ in how many were begun and in how many were waited for: which
        results a rank reads is its own matter, and calls of two ranks count as begun, too.
        """
        before, self._begun = self._begun, self._n_begun()
        begun, waits = self._begun - before, self.n_waits
        self.n_waits = 0
        mine = {name: (fact,) for name, fact in facts.items()} | {"collectives": (begun, waits)}
        told = self._talks.agree(pickle.dumps(mine), "a step")
        first = self._talks.rank // self._n_ranks * self._n_ranks
        rows = [pickle.loads(row) for row in told[first : first + self._n_ranks]]
        for name in mine:
            found = [row[name] for row in rows]
            if all(len(set(each)) > 1 for each in zip(*found, strict=True)):
                facts_told = (", ".join(map(str, each)) for each in found)
                said = self._talks.members.listed(facts_told, first)
                raise DivergenceError(
                    f"ranks of a tensor come to a step in different ways ({name}: {said})",
                    advice="give them the same batches, passes and settings, let all go the same"
                    " way through the model, and change weights and gradients alike",
                )

    def _n_begun(self) -> int:
        return sum(map(n_calls, self._groups))

    def ask_why(self, error: RuntimeError, began: float) -> None:
        """Raise RankLost if a rank has left, or did not answer within the group's time limit."""
        lost = self._talks.waits.explained(error, WHAT, began)
        if lost is not None:
            raise lost from error

    def close(self) -> None:
        _following.discard(self)
        self._uninstall()
        self._take_back()


class NoTensors:
    """No rank has a part of another one's tensor."""

    def meet(self, facts: Mapping[str, str]) -> None: ...

    def close(self) -> None: ...


def follow_tensors(company: object, parts: Parts) -> TensorRanks | NoTensors:
    """Return the ranks of a model's tensors; their waits say from now on which rank they have lost.

    Args:
        company: all ranks of the model, or this one alone.
        parts: of the model's parameters.
    """
    if isinstance(company, Talks) and parts.ranks:
        return TensorRanks(company, len(parts.ranks), parts.groups)
    return NoTensors()


def _asking(wait: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return torch's wait, whose errors are ours if a rank is lost."""

    @functools.wraps(wait)
    def waited(tensor: Any) -> Any:
        began = time.monotonic()
        for ranks in _following:
            ranks.n_waits += 1
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
