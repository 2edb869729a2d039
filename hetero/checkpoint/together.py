"""What ranks do together, or not at all (no torch)."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Sequence
from typing import Protocol

from hetero import errors
from hetero.errors import CheckpointError, HeteroError, RankLost
from hetero.members import ONE_MEMBER, Members

Agree = Callable[[bytes, str], Sequence[bytes]]
DONE, FAILED = b"+", b"-"


class Ranks(Protocol):
    """Those that share a model, and make the same calls in the same order."""

    rank: int
    size: int
    members: Members

    def agree(self, row: bytes, what: str) -> Sequence[bytes]:
        """Return the rows of all ranks; blocks."""

    def agree_aside(self, row: bytes, what: str) -> Sequence[bytes]:
        """As `agree`, of the calls that the thread of a save makes."""


class OneRank:
    """The only one."""

    rank, size, members = 0, 1, ONE_MEMBER

    def agree(self, row: bytes, what: str) -> Sequence[bytes]:
        return [row]

    agree_aside = agree


ONE_RANK = OneRank()


def together(
    ranks: Ranks, what: str, act: Callable[[], bytes], agree: Agree | None = None
) -> list[bytes]:
    """Return what ``act`` returned on each rank. If it raised on one, all raise: that rank its own
    error, the others one of its class that names the rank. They ``agree`` by ``ranks.agree``, or by
    the call that is given.

    If a rank has left meanwhile, an error of this rank's own matters more, unless it missed what
    the other one may have taken away.
    """
    agree = agree or ranks.agree
    try:
        row = DONE + act()
    except BaseException as error:
        try:
            agree(FAILED + _told(error), what)
        except RankLost as lost:
            if _has_missed(error):
                raise lost from error
        raise
    rows = agree(row, what)
    for number, each in enumerate(rows):
        if each[:1] == FAILED:
            raise _failure(ranks.members.name(number), what, each[1:])
    return [each[1:] for each in rows]


def _has_missed(error: BaseException) -> bool:
    """Whether an error is of a file that is not there."""
    causes = (error, error.__cause__)
    return any(isinstance(each, OSError) and each.errno == errno.ENOENT for each in causes)


def _told(error: BaseException) -> bytes:
    first = error.args[0] if isinstance(error, HeteroError) and error.args else error
    text = f"{type(error).__name__}: {first}" if first is error else str(first)
    return json.dumps([type(error).__name__, text, getattr(error, "advice", "")]).encode()


def _failure(name_of_rank: str, what: str, raw: bytes) -> CheckpointError:
    name, text, advice = json.loads(raw)
    known = getattr(errors, name, CheckpointError)
    kind = known if issubclass(known, CheckpointError) else CheckpointError
    return kind(f"{what} failed on {name_of_rank}: {text}", advice=advice)
