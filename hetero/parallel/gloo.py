"""Ranks joined by gloo: see `hetero.device.comm` (floor 3).

A collective whose sizes differ between ranks aborts a process of gloo's, so the ranks first compare
what each is about to do. Waits are polls: gloo wakes a waiting thread only when the peer answers or
the group's own timeout passes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist

from hetero.device import Ticket
from hetero.device.comm import Node
from hetero.errors import DivergenceError, RankLost
from hetero.memory.layout import Layout
from hetero.parallel.node import open_node
from hetero.types import Lane

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # until 2.12
SAID_BYTES = 96
"""Of a call's name, in the row by which ranks compare their calls."""
POLL_SECONDS = (0.0, 0.0, 0.0001, 0.001)
"""Between looks at a call that is under way; the last one repeats."""


class CommTicket(Ticket):
    """A collective under way, and the buffers that it uses."""

    __slots__ = ("held", "what", "work")

    def __init__(self, work: dist.Work, what: str, held: tuple[torch.Tensor, ...]) -> None:
        super().__init__(Lane.GATHER, 0.0)
        self.work = work
        self.what = what
        self.held = held


class Gloo:
    """The ranks of a process group, joined by groups of gloo of our own.

    Args:
        ranks: of the default group; None: all. Every rank of that group makes this object.
        timeout_seconds: after which a rank that does not answer is lost.
        one_sided: whether ranks of one machine may read each other's shares.
    """

    def __init__(
        self,
        ranks: Sequence[int] | None,
        timeout_seconds: float,
        *,
        one_sided: bool = True,
    ) -> None:
        self._one_sided = one_sided
        members = list(range(dist.get_world_size())) if ranks is None else list(ranks)
        self.rank = members.index(dist.get_rank())
        self.size = len(members)
        self._ranks = members
        self._timeout = timeout_seconds
        allowed = timedelta(seconds=timeout_seconds)
        self._bytes, self._control = (
            dist.new_group(members, timeout=allowed, backend="gloo") for _ in range(2)
        )
        self._n_calls = 0

    def gather(self, whole: torch.Tensor, what: str) -> Ticket:
        self._meet(f"{what}: {whole.numel()} bytes")
        each = whole.numel() // self.size
        mine = whole[self.rank * each : (self.rank + 1) * each]
        work = all_gather(whole, mine, group=self._bytes, async_op=True)
        return CommTicket(work, what, (whole, mine))

    def exchange(self, received: torch.Tensor, sent: torch.Tensor, what: str) -> Ticket:
        self._meet(f"{what}: {sent.numel()} bytes")
        work = dist.all_to_all_single(received, sent, group=self._bytes, async_op=True)
        return CommTicket(work, what, (received, sent))

    def complete(self, value: torch.Tensor, cuts: Sequence[int], what: str) -> None:
        self._meet(f"{what}: {value.numel()} bytes")
        for rank, (start, end) in enumerate(pairwise(cuts)):
            if start < end:
                part = value[start:end]
                work = dist.broadcast(part, self._ranks[rank], group=self._bytes, async_op=True)
                self.wait(CommTicket(work, what, (part,)))

    def agree(self, row: bytes, what: str) -> list[bytes]:
        sizes = self._meet(what, len(row))
        most = max(sizes)
        if most == 0:
            return [b""] * self.size
        mine = torch.zeros(most, dtype=torch.uint8, device="cpu")
        mine[: len(row)] = torch.frombuffer(bytearray(row), dtype=torch.uint8) if row else mine[:0]
        rows = self._collect(mine, what)
        return [rows[r][:size] for r, size in enumerate(sizes)]

    def wait(self, ticket: Ticket) -> None:
        if isinstance(ticket, CommTicket) and not ticket.done:
            self._poll(ticket.work, ticket.what)
            ticket.done, ticket.held = True, ()

    def open_node(self, layout: Layout) -> Node | None:
        return open_node(self, layout, self._timeout) if self._one_sided else None

    def close(self) -> None:
        for group in (self._bytes, self._control):
            if dist.is_initialized():
                dist.destroy_process_group(group)

    # -- meetings --------------------------------------------------------------------------------

    def _meet(self, what: str, number: int = 0) -> list[int]:
        """Compare what all ranks are about to do; return each one's ``number``."""
        self._n_calls += 1
        said = what.encode()[:SAID_BYTES].ljust(SAID_BYTES)
        head = b"".join(n.to_bytes(8, "little") for n in (self._n_calls, number))
        row = torch.frombuffer(bytearray(head + said), dtype=torch.uint8)
        rows = self._collect(row, what)
        calls = [(int.from_bytes(each[:8], "little"), each[16:].rstrip().decode()) for each in rows]
        if len(set(calls)) > 1:
            raise diverged(calls)
        return [int.from_bytes(each[8:16], "little") for each in rows]

    def _collect(self, mine: torch.Tensor, what: str) -> list[bytes]:
        rows = torch.empty(self.size * mine.numel(), dtype=torch.uint8, device="cpu")
        work = all_gather(rows, mine, group=self._control, async_op=True)
        self._poll(work, what)
        return [each.numpy().tobytes() for each in rows.view(self.size, -1)]

    def _poll(self, work: dist.Work, what: str) -> None:
        """Look again and again whether a call is over."""
        began, looks = time.monotonic(), 0
        while not work.is_completed():
            if time.monotonic() - began > self._timeout:
                raise self._lost(what, f"no answer for {self._timeout:.0f} s")
            time.sleep(POLL_SECONDS[min(looks // 64, len(POLL_SECONDS) - 1)])
            looks += 1
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost(what, str(error).splitlines()[0]) from None

    def _lost(self, what: str, why: str) -> RankLost:
        return RankLost(
            f"rank {self.rank} of {self.size} waits for {what} in vain: {why}",
            advice="look at the first error of any rank: it says why that rank left",
        )


def diverged(calls: Sequence[tuple[int, str]]) -> DivergenceError:
    """Return the error of ranks that are about to do different things."""
    rows = "; ".join(f"rank {r}: call {n}, {what}" for r, (n, what) in enumerate(calls))
    return DivergenceError(
        f"ranks that share a model go different ways ({rows})",
        advice="all ranks must call the model, read weights and gradients, and step alike; a weight"
        " that one rank reads alone is read by all: call the same lines on every rank",
    )
