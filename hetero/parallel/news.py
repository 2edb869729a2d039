"""Why a rank left, told to all others through a group of gloo of its own (floor 3).

Every rank keeps a row open for a message of each other rank. A rank that leaves writes why, right
before its connections close; the bytes are on their way when its process ends. Nothing waits for a
message: gloo wakes a waiting thread too late or never, so rows are read when a call has failed.

[Note: first causes]  When a rank leaves, the others leave because of it. A rank that has lost
another one therefore passes on what it knows of that one, and says nothing of itself: also to ranks
that share something else with it, which may never have met that one.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from hetero.crc import crc32
from hetero.errors import RankLost
from hetero.forks import Owner
from hetero.members import Members, named
from hetero.parallel.farewell import Parting, parting_of, reason_of, tell_at_end

ROW_BYTES, WHY_BYTES = 640, 400
SENDING_SECONDS = 0.5
"""After which a rank that leaves waits no longer for its message to be on its way."""
HEARING_SECONDS = 1.0
"""After which a message comes no more from a rank whose connection broke."""
LOOK_SECONDS = 0.01
MARK = b"\1"
MESSAGE, PROBE = 0, 1
"""Tags of what is sent; no rank receives a probe."""
RELEASED = "it let go of its model"
KILLED = "it was killed, or its machine left"
ADVICE = {
    Parting.FAILED: "look at the error of {}",
    Parting.DIVERGED: "look at the first error of any rank",
    Parting.ENDED: "give every rank as many batches, and let all end together",
    Parting.KILLED: "look at what the launcher and the system's log say of {}: it may have run out"
    " of RAM",
    Parting.SILENT: "look at what the ranks wait for; raise timeout_seconds= if one may take"
    " so long",
}


class Left(NamedTuple):
    """A rank that left, or does not answer; the smallest of several is the cause."""

    how: Parting
    rank: int
    """Of the world: what is passed on from group to group has one meaning in all of them."""
    why: str

    def __str__(self) -> str:
        name = named(self.rank)
        return f"{name} {self.why}" if self.how is Parting.SILENT else f"{name} left ({self.why})"


class News:
    """What this rank tells the others, and hears of them.

    Args:
        group: of gloo, of all members, for nothing else.
        number: this rank's among them.
    """

    def __init__(self, group: dist.ProcessGroup, members: Members, number: int) -> None:
        self._owner = Owner("the ranks' news, which its parent tells", self)
        self.members, self.number = members, number
        self.size = size = len(members.ranks)
        self._group = group
        self._others = [other for other in range(size) if other != number]
        rows = torch.zeros(size, ROW_BYTES, dtype=torch.uint8, device="cpu")
        self._rows: npt.NDArray[np.uint8] = rows.numpy()
        self._heard_at: float | None = None
        self._cause: Left | None = None
        self._has_told = False
        # until this object goes, gloo writes to the rows and reads what was sent
        self._works = [group.recv([rows[other]], other, MESSAGE) for other in self._others]
        self._probe = torch.zeros(1, dtype=torch.uint8, device="cpu")
        tell_at_end(self)

    @property
    def rank(self) -> int:
        """This one, of the world."""
        return self.members.ranks[self.number]

    # -- telling ---------------------------------------------------------------------------------

    def tell(self, how: Parting, why: str) -> None:
        """Tell all others how this rank leaves, or of the rank that it has lost."""
        if self._has_told or not self._owner.is_here:  # a child does not speak for its parent
            return
        self._has_told = True
        row = packed(self._cause or Left(how, self.rank, shortened(why)))  # [Note: first causes]
        works = []
        for other in self._others:
            with suppress(RuntimeError):  # that rank left, too
                works.append(self._group.send([row], other, MESSAGE))
        deadline = time.monotonic() + SENDING_SECONDS
        for work in works:
            with suppress(RuntimeError):
                left = max(0.001, deadline - time.monotonic())
                work.wait(timedelta(seconds=left))

    def close(self) -> None:
        """Say that this rank needs the others no more, or the error because of which that is so."""
        error = sys.exc_info()[1]
        if error is None:
            self.tell(Parting.ENDED, RELEASED)
        else:
            self.tell_error(error)

    def tell_error(self, error: BaseException) -> None:
        """Tell all others of an error, or of the rank that it is about."""
        self._cause = self._cause or loss_in(error)
        self.tell(parting_of(error), reason_of(error))

    # -- hearing ---------------------------------------------------------------------------------

    def known(self) -> Left | None:
        """Return the cause, if any rank is known to have left."""
        closed = [other for other in self._others if self._is_closed(other)]
        told = dict(self._heard())  # after `closed`: a message comes before its connection closes
        silent = (self.members.ranks[other] for other in closed if other not in told)
        killed = [Left(Parting.KILLED, rank, KILLED) for rank in silent]
        return min([*told.values(), *killed], default=None)

    def cause(self, otherwise: Left, seconds: float = HEARING_SECONDS) -> Left:
        """Return the cause as soon as it is known."""
        deadline = time.monotonic() + seconds
        while (found := self.known()) is None and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)
        return found or otherwise

    def overdue(self, seconds: float) -> Left | None:
        """Return the cause, if a rank said so long ago that it failed, or lost another; one that is
        at its end may have sent all that others wait for."""
        failed = [left for _, left in self._heard() if left.how is not Parting.ENDED]
        if not failed:
            return None
        now = time.monotonic()
        self._heard_at = now if self._heard_at is None else self._heard_at
        return min(failed) if now - self._heard_at > seconds else None

    def lost(self, what: str, left: Left) -> RankLost:
        """Return the error of a wait that ends because of a rank."""
        self._cause = self._cause or left
        error = RankLost(
            f"{self.members.name_in_world(self.number)} waits for {what} in vain: {left}",
            advice=ADVICE[left.how].format(named(left.rank)),
        )
        error.left = left
        return error

    def _seen_from_here(self, other: int, left: Left) -> Left:
        """Return what another rank said; one that lost this rank waited for it in another call."""
        if left.how is Parting.SILENT and left.rank == self.rank:
            rank = self.members.ranks[other]
            return Left(Parting.SILENT, rank, "waited for this rank in another call, in vain")
        return left

    def _heard(self) -> Iterator[tuple[int, Left]]:
        """Yield what others have said, by their numbers."""
        if self._rows[:, 0].any():
            for other in self._others:
                left = unpacked(self._rows[other].tobytes())
                if left is not None:
                    yield other, self._seen_from_here(other, left)

    def _is_closed(self, other: int) -> bool:
        """Whether the connection to a rank is: only a send shows it."""
        try:
            self._works.append(self._group.send([self._probe], other, PROBE))
        except RuntimeError:
            return True
        return False


def loss_in(error: BaseException | None) -> Left | None:
    """Return what is known of the rank whose loss an error is about, or one that led to it."""
    while error is not None:
        if isinstance(error, RankLost) and error.left is not None:
            left: Left = error.left
            return left
        error = error.__cause__ or error.__context__
    return None


def packed(left: Left) -> torch.Tensor:
    """Return a row: a mark that there is one, and what is said, with its length and checksum."""
    said = pickle.dumps((int(left.how), left.rank, left.why))
    head = MARK + len(said).to_bytes(2, "little") + crc32(said).to_bytes(4, "little")
    return torch.frombuffer(bytearray((head + said).ljust(ROW_BYTES)), dtype=torch.uint8)


def unpacked(row: bytes) -> Left | None:
    """Return what a row says; None as long as a part of it is not there."""
    n_bytes, checksum = (int.from_bytes(row[i:j], "little") for i, j in ((1, 3), (3, 7)))
    said = row[7 : 7 + n_bytes]
    if row[:1] != MARK or crc32(said) != checksum:
        return None
    how, rank, why = pickle.loads(said)  # of this very program
    return Left(Parting(how), rank, why)


def shortened(why: str) -> str:
    return why.encode(errors="replace")[:WHY_BYTES].decode(errors="ignore")
