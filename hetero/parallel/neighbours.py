"""Ranks of one machine, joined by memory that they share (floor 3).

No bytes pass through a socket: rows of calls lie on boards, gradients in outboxes, where the others
read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from hetero.device import Device, Ticket
from hetero.device.comm import Comm, Node, OneSided
from hetero.parallel.node import BOXES, SharedNode

if TYPE_CHECKING:
    import torch

    from hetero.device.comm import Addends, Company


class Neighbours(OneSided):
    """The ranks that share a model on one machine.

    Args:
        far: what joined them until now.
    """

    def __init__(self, far: Comm, node: SharedNode) -> None:
        self.rank, self.members = far.rank, far.members
        self.size, self.n_local = far.size, far.n_local
        self.n_shares, self.n_copies = far.n_shares, far.n_copies
        self.n_context = far.n_context
        self.sum_group = far.sum_group
        self.node: Node | None = node
        self._here, self._far = node, far
        self._unlocks: list[Callable[[], None]] = []
        self._sent_bytes = 0

    @property
    def everyone(self) -> Company:
        return self if self._far.everyone is self._far else self._far.everyone

    def outbox(self, n_bytes: int) -> torch.Tensor:
        self._sent_bytes = n_bytes
        return self._here.outbox(self.rank, self._here.swaps.n_calls + 1)[:n_bytes]

    def lock_outboxes(self, device: Device) -> None:
        self._lock_boxes([self.rank], device)

    def lock_inboxes(self, device: Device) -> None:
        self._lock_boxes([rank for rank in range(self.size) if rank != self.rank], device)

    def _lock_boxes(self, ranks: Sequence[int], device: Device) -> None:
        for rank in ranks:
            for number in range(BOXES):
                unlock = device.lock(self._here.outbox(rank, number))
                if unlock is not None:
                    self._unlocks.append(unlock)

    def exchange(self, what: str) -> Addends:
        call = self._here.swaps.post(f"{what}: {self._sent_bytes} bytes", b"")
        return NearAddends(self, self._here, call, self._sent_bytes // self.n_shares)

    def give_up_exchange(self, why: str) -> None:
        self._here.swaps.post(why, b"")

    def agree(self, row: bytes, what: str) -> list[bytes]:
        board = self._here.board
        return board.join(board.post(what, row))

    def agree_aside(self, row: bytes, what: str) -> list[bytes]:
        return self._far.agree_aside(row, what)

    def complete(self, value: torch.Tensor, cuts: Sequence[int], what: str) -> None:
        self.agree(b"", what)
        self._far.complete(value, cuts, what)

    def awaited(self) -> int | None:
        return self._here.awaited()

    def close(self) -> None:
        for unlock in self._unlocks:
            unlock()
        self._unlocks.clear()
        self._here.close()
        self._far.close()


class GatheringNeighbours(Neighbours):
    """Ranks of one machine that gather each other's shares, which may then lie on their devices.

    Args:
        far: gathers for them.
    """

    def __init__(self, far: Comm, node: SharedNode) -> None:
        super().__init__(far, node)
        self.node = None  # of homes; gradients and calls go through memory as ever

    def open_gathers(self, device: Device) -> None:
        self._far.open_gathers(device)

    def gather(self, whole: torch.Tensor, what: str, after: Iterable[Ticket]) -> Ticket:
        return self._far.gather(whole, what, after)

    def wait(self, ticket: Ticket) -> None:
        self._far.wait(ticket)


class NearAddends:
    """What an exchange brings: the parts of all outboxes that are for this rank.

    Exchanges are numbered as calls. The box of exchange n is filled again for n + 2. This rank does
    that once all have begun n + 1, which they do after they have read n.
    """

    def __init__(self, comm: Neighbours, node: SharedNode, call: int, part_bytes: int) -> None:
        self._comm = comm
        self._node = node
        self._call = call
        self._part_bytes = part_bytes

    def wait(self) -> list[torch.Tensor]:
        comm, n_bytes = self._comm, self._part_bytes
        self._node.swaps.join(self._call)
        share = comm.rank % comm.n_shares
        here = slice(share * n_bytes, (share + 1) * n_bytes)
        boxes = (self._node.outbox(rank, self._call) for rank in range(comm.size))
        return [box[here] for box in boxes]
