"""The interface of what joins ranks: collectives that move bytes and never add them (floor 0).

Every rank makes the same calls in the same order, from its main thread. Before bytes move, the
ranks compare what they are about to do; where that differs, all of them raise DivergenceError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from hetero.device.face import Slab, Ticket
from hetero.types import Lane


class Node(Protocol):
    """Ranks of one machine that read each other's PARAM homes where they lie."""

    def slab(self, bucket: int) -> Slab:
        """Return the memory of this rank's home of a bucket."""

    def memory(self, bucket: int, rank: int) -> torch.Tensor:
        """Return the bytes of a rank's home of a bucket, of which its share is there."""

    def changed(self, bucket: int) -> None:
        """This rank's share was changed once more; on any thread."""

    def is_current(self, bucket: int, n_changes: int) -> bool:
        """Whether every rank has changed its share of a bucket so often."""

    def wait(self, bucket: int, n_changes: int) -> None:
        """Block until that is so; raises RankLost if it never will be."""

    def close(self) -> None:
        """Let go of the other ranks."""


class Comm(Protocol):
    """The ranks that share one model. Buffers are 1-D uint8 tensors, held until a call's ticket
    was waited for; ``what`` names a call in errors."""

    rank: int
    size: int

    def gather(self, whole: torch.Tensor, what: str) -> Ticket:
        """Begin to fill ``whole`` in place: rank r has the r-th of ``size`` equal parts."""

    def exchange(self, received: torch.Tensor, sent: torch.Tensor, what: str) -> Ticket:
        """Begin to send the r-th of ``size`` equal parts to rank r, and to receive one from it."""

    def complete(self, value: torch.Tensor, cuts: Sequence[int], what: str) -> None:
        """Fill ``value``, of which rank r has bytes [cuts[r], cuts[r + 1]); blocks."""

    def agree(self, row: bytes, what: str) -> list[bytes]:
        """Return the rows of all ranks, of any length; blocks."""

    def wait(self, ticket: Ticket) -> None:
        """Block until a call that was begun is over; raises RankLost if it never will be."""

    def open_node(self, sizes_bytes: Sequence[int]) -> Node | None:
        """Return the memory that all ranks share, for homes of these sizes; None if they are not
        on one machine. Collective."""

    def close(self) -> None:
        """Give up groups and connections; no call is under way."""


class Alone:
    """The only rank: nothing is exchanged."""

    rank = 0
    size = 1

    def gather(self, whole: torch.Tensor, what: str) -> Ticket:
        return DONE

    def exchange(self, received: torch.Tensor, sent: torch.Tensor, what: str) -> Ticket:
        received.copy_(sent)
        return DONE

    def complete(self, value: torch.Tensor, cuts: Sequence[int], what: str) -> None: ...

    def agree(self, row: bytes, what: str) -> list[bytes]:
        return [row]

    def wait(self, ticket: Ticket) -> None: ...

    def open_node(self, sizes_bytes: Sequence[int]) -> None: ...

    def close(self) -> None: ...


DONE = Ticket(Lane.GATHER, 0.0, done=True)
ALONE_COMM = Alone()
