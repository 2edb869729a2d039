"""Ranks joined by gloo: see `hetero.device.comm` (floor 3).

A collective whose sizes differ between ranks aborts a process of gloo's, so the ranks first compare
what each is about to do.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from hetero.device import CudaDevice, Device, Ticket
from hetero.device.comm import Addends, Comm, Company, Node, relay_of
from hetero.errors import ConfigError, RankLost
from hetero.forks import Owner
from hetero.members import Members, all_of
from hetero.memory.layout import Layout
from hetero.parallel.board import CALLS, SAID_BYTES, check_calls
from hetero.parallel.gathers import DeviceGathers, Gathers, HostGathers, all_gather, connected
from hetero.parallel.groups import Box, Grouped, Straight
from hetero.parallel.neighbours import GatheringNeighbours, Neighbours
from hetero.parallel.news import News
from hetero.parallel.node import open_node
from hetero.parallel.waits import Waits

Teams = Sequence[Sequence[int]]
"""Ranks of the process group that share something, team by team; no rank is in two."""
ROW_BYTES = 128
"""Of a row that goes along with a call's name; longer ones go by themselves."""


class Gloo:
    """The ranks of a process group, joined by groups of gloo of our own; if they gather on CUDA
    devices, NCCL does that.

    Args:
        n_shares: see `Comm.n_shares`; a divisor of the number of ranks.
        timeout_seconds: after which a rank that does not answer is lost.
        sum_group: as `Config.sum_group`.
        n_context: see `Comm.n_context`.
        one_sided: whether ranks of one machine may read each other's memory.
        gather_shares: whether they gather shares even so.
        teams: ranks that share a model each, in the same order on all ranks; None: all share one.
        everyone: those that have the other parts of its tensors, and these; None: there are none.
    """

    def __init__(
        self,
        n_shares: int,
        timeout_seconds: float,
        sum_group: int = 1,
        *,
        n_context: int = 1,
        one_sided: bool = True,
        gather_shares: bool = False,
        teams: Teams | None = None,
        everyone: Company | None = None,
    ) -> None:
        self._owner = Owner(CALLS, self)
        self.node: Node | None = None
        self._one_sided, self._gather_shares = one_sided, gather_shares
        world = dist.get_world_size()
        self._teams = [range(world)] if teams is None else teams
        self._ranks = list(own_of(self._teams))
        self.rank, self.size = self._ranks.index(dist.get_rank()), len(self._ranks)
        self.n_shares, self.n_copies = n_shares, self.size // n_shares
        self.n_context = n_context
        self.n_local = min(world, local_ranks() or world)
        self.sum_group = sum_group
        self.relay = relay_of(self.rank, self.size, n_shares, sum_group)
        self._timeout = timeout_seconds
        self._groups: list[dist.ProcessGroup] = []
        self._bytes, swaps = (self._open(range(self.size)) for _ in range(2))
        self._gathers: Gathers | None = None  # `open_gathers` makes them
        self._talks = Talks(self._teams, timeout_seconds)
        self._everyone = everyone
        self.members = self._talks.members
        self._news, self._waits = self._talks.news, self._talks.waits
        self._meetings = self._talks.meetings
        self._swaps = Meetings(swaps, self._waits)
        self._ways: Straight | Grouped = (
            Straight(swaps, n_shares, self._waits)
            if self.relay is None
            else Grouped(self.relay, self._open, self._waits)
        )
        self._outbox = Box()
        self._sent_bytes = 0

    def _open(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Open a group of each team; every rank opens the same ones."""
        rows = [[team[rank] for rank in ranks] for team in self._teams]
        group: dist.ProcessGroup = new_group(rows, self._timeout)
        if self.rank in ranks:
            self._groups.append(group)
        return group

    @property
    def everyone(self) -> Company:
        return self if self._everyone is None else self._everyone

    def open_gathers(self, device: Device) -> None:
        if self.node is not None:
            return
        copies = [range(at, at + self.n_shares) for at in range(0, self.size, self.n_shares)]
        at = self.rank // self.n_shares
        if isinstance(device, CudaDevice) and len(self._teams) > 1:
            raise ConfigError(
                "CUDA devices would gather shares of stages, or of tensors that ranks divide",
                advice="leave gather_shares= out"
                if self._gather_shares
                else 'let the ranks of a copy be on one machine, with "tp" and "pp" between them',
            )
        if isinstance(device, CudaDevice):
            on_device = connected(copies, self._timeout)[at]
            self._groups.append(on_device)
            self._gathers = DeviceGathers(device, on_device, self._waits)
        else:
            group = [self._open(copy) for copy in copies][at] if len(copies) > 1 else self._bytes
            self._gathers = HostGathers(device, group, self._waits)

    @property
    def _opened(self) -> Gathers:
        if self._gathers is None:
            raise AssertionError("gathers are opened before the first one")
        return self._gathers

    def gather(self, whole: torch.Tensor, what: str, after: Iterable[Ticket]) -> Ticket:
        each, share = whole.numel() // self.n_shares, self.rank % self.n_shares
        mine = whole[share * each : (share + 1) * each]
        return self._opened.begin(whole, mine, what, after)

    def complete(self, value: torch.Tensor, cuts: Sequence[int], what: str) -> None:
        self._meetings.meet(f"{what}: {value.numel()} bytes")
        for share, (start, end) in enumerate(pairwise(cuts)):
            if start < end:
                part = value[start:end]
                work = dist.broadcast(part, self._ranks[share], group=self._bytes, async_op=True)
                self._waits.until(work, what)

    def outbox(self, n_bytes: int) -> torch.Tensor:
        self._sent_bytes = n_bytes
        return self._outbox.of(n_bytes)

    def lock_outboxes(self, device: Device) -> None:
        self._outbox.lock(device)

    def lock_inboxes(self, device: Device) -> None:
        for box in self._ways.inboxes:
            box.lock(device)

    def exchange(self, what: str) -> Addends:
        self._swaps.meet(f"{what}: {self._sent_bytes} bytes")
        return self._ways.begin(self._outbox.of(self._sent_bytes), what)

    def pass_on(self, sums: torch.Tensor, what: str) -> Addends:
        assert isinstance(self._ways, Grouped)
        self._swaps.meet(f"sums of groups, {what}: {sums.numel()} bytes")
        return self._ways.pass_on(sums, what)

    def summed(self, n_bytes: int) -> None: ...

    def give_up_exchange(self, why: str) -> None:
        self._swaps.say(why)

    def agree(self, row: bytes, what: str) -> list[bytes]:
        return self._talks.agree(row, what)

    def agree_aside(self, row: bytes, what: str) -> list[bytes]:
        return self._talks.agree_aside(row, what)

    def wait(self, ticket: Ticket) -> None:
        self._opened.wait(ticket)

    def nearer(self, layout: Layout) -> Comm:
        node = open_node(self, layout, self._news, self._timeout) if self._one_sided else None
        if node is not None and node.has_all(self.size):
            return (GatheringNeighbours if self._gather_shares else Neighbours)(self, node)
        if node is not None and self._gather_shares:
            node.close()
            return self
        self.node = node  # homes are read on a machine, gradients and calls go between machines
        return self

    def awaited(self) -> int | None:
        return None if self.node is None else self.node.awaited()

    def close(self) -> None:
        if self.node is not None:
            self.node.close()
        for box in (self._outbox, *self._ways.inboxes):
            box.close()
        if self._gathers is not None:
            self._gathers.close()
        self._talks.close()
        if self._everyone is not None:
            self._everyone.close()
        give_up(self._groups, self._owner)


class Talks:
    """The rows that ranks tell each other, and why one of them left, on groups of their own.

    Args:
        teams: ranks of the process group that talk, this one's and others, as all ranks know them.
        timeout_seconds: after which a rank that does not answer is lost.
    """

    node: Node | None = None

    def __init__(self, teams: Teams, timeout_seconds: float) -> None:
        self._owner = Owner(CALLS, self)
        ranks = own_of(teams)
        self.rank, self.size = ranks.index(dist.get_rank()), len(ranks)
        self.members = Members(tuple(ranks), dist.get_world_size())
        opened = (new_group(teams, timeout_seconds) for _ in range(3))
        control, aside, news = self._groups = list(opened)
        self.news = News(news, self.members, self.rank)
        self.waits = Waits(self.news, timeout_seconds)
        self.meetings = Meetings(control, self.waits)
        # a save of a rank whose program has failed goes on until it is whole
        patient = Waits(self.news, timeout_seconds, patience_seconds=timeout_seconds)
        self._aside = Meetings(aside, patient)

    def agree(self, row: bytes, what: str) -> list[bytes]:
        return self.meetings.meet(what, row)

    def agree_aside(self, row: bytes, what: str) -> list[bytes]:
        return self._aside.meet(what, row)

    def close(self) -> None:
        self.news.close()
        give_up(self._groups, self._owner)


class Meetings:
    """Numbered calls on a group of their own, compared before any goes on."""

    def __init__(self, group: dist.ProcessGroup, waits: Waits) -> None:
        self._owner = Owner(CALLS, self)
        self.group = group
        self.waits = waits
        self._n_calls = 0
        self._said: object = None  # a call under way, and its buffers

    def meet(self, what: str, row: bytes = b"") -> list[bytes]:
        """Compare what all ranks are about to do; return each one's row."""
        self._owner.check()
        heads = self._collect(self._head(what, row), what)
        end = 16 + SAID_BYTES
        check_calls(
            [(number(each), each[16:end].rstrip().decode(errors="replace")) for each in heads],
            self.waits.members,
        )
        sizes = [number(each[8:]) for each in heads]
        if max(sizes) <= ROW_BYTES:
            return [each[end : end + size] for each, size in zip(heads, sizes, strict=True)]
        mine = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        if row:
            mine[: len(row)] = torch.frombuffer(bytearray(row), dtype=torch.uint8)
        rows = self._collect(mine, what)
        return [each[:size] for each, size in zip(rows, sizes, strict=True)]

    def say(self, what: str) -> None:
        """Make a call without waiting for the others, which hear of it in theirs."""
        mine = self._head(what, b"")
        rows = torch.empty(self.waits.size * mine.numel(), dtype=torch.uint8, device="cpu")
        self._said = all_gather(rows, mine, self.group), rows, mine

    def _head(self, what: str, row: bytes) -> torch.Tensor:
        """Return what all ranks tell each other of the next call."""
        self._n_calls += 1
        said, short = what.encode()[:SAID_BYTES], row if len(row) <= ROW_BYTES else b""
        numbers = b"".join(n.to_bytes(8, "little") for n in (self._n_calls, len(row)))
        head = numbers + said.ljust(SAID_BYTES) + short.ljust(ROW_BYTES, b"\0")
        return torch.frombuffer(bytearray(head), dtype=torch.uint8)

    def _collect(self, mine: torch.Tensor, what: str) -> list[bytes]:
        size = self.waits.size
        rows = torch.empty(size * mine.numel(), dtype=torch.uint8, device="cpu")
        self.waits.until(all_gather(rows, mine, self.group), what)
        return [each.numpy().tobytes() for each in rows.view(size, -1)]


def own_of(teams: Teams) -> Sequence[int]:
    """Return the ranks that this one is among."""
    return next(ranks for ranks in teams if dist.get_rank() in ranks)


def new_group(rows: Teams, timeout_seconds: float) -> Any:
    """Open a group of gloo for each row; return this rank's own, or torch's mark that it has none.

    All ranks of the process group open all of them: a name that members alone agree on
    (``use_local_synchronization``) comes again after groups were closed, and with it the addresses
    of those, where ranks would wait for ever. Raises RankLost if a member does not come.
    """
    allowed, mine = timedelta(seconds=timeout_seconds), dist.GroupMember.NON_GROUP_MEMBER
    for ranks in rows:
        try:
            group = dist.new_group(list(ranks), timeout=allowed, backend="gloo")
        except dist.DistError as error:
            me = all_of(dist.get_world_size()).name_in_world(dist.get_rank())
            raise RankLost(
                f"{me} waits for the others in hetero.prepare in vain: one did not come within"
                f" {timeout_seconds:g} s, or has left ({str(error).partition(chr(10))[0]})",
                advice="call hetero.prepare on every rank; raise timeout_seconds= if one may come"
                " so much later",
            ) from error
        mine = group if dist.get_rank() in ranks else mine
    return mine


def local_ranks() -> int:
    """Return the ranks that a launcher has started on this machine; 0 if it does not say."""
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(given) if given.isdecimal() else 0


def give_up(groups: list[Any], owner: Owner) -> None:
    """Close groups that were opened; a child leaves its parent's alone."""
    for group in groups:
        if dist.is_initialized() and owner.is_here:
            dist.destroy_process_group(group)
    groups.clear()


def number(raw: bytes) -> int:
    return int.from_bytes(raw[:8], "little")
