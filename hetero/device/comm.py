"""The interface of what joins ranks: collectives that move bytes and never add them (floor 0).

Every rank makes the same calls in the same order, from its main thread unless a call says
otherwise. Before bytes move, the ranks compare what they are about to do; where that differs, all
of them raise DivergenceError.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hetero.device.face import Device, Slab, Ticket
from hetero.events import EventLog
from hetero.members import ONE_MEMBER, Members
from hetero.types import Lane


class Node(Protocol):
    """Ranks of one machine that read each other's homes where they lie."""

    def slab(self, name: str, bucket: int, n_bytes: int) -> Slab:
        """Return this rank's memory for the home of a name, of which others see a share."""

    def memory(self, name: str, bucket: int, share: int, n_bytes: int) -> torch.Tensor:
        """Return the bytes of the home of the rank that keeps a share of this one's copy; only that
        share is there. Blocks until that rank has made it."""

    def begin(self, counter: int) -> None:
        """All ranks are about to change the homes of a counter."""

    def changed(self, counter: int) -> None:
        """This rank has made a change that it began; on any thread."""

    def is_current(self, counter: int) -> bool:
        """Whether all ranks have made the changes that this one has begun."""

    def wait(self, counter: int) -> None:
        """Block until they have; raises RankLost for a rank that died, or takes too long."""

    def awaited(self) -> int | None:
        """As `Comm.awaited`."""

    def close(self) -> None:
        """Let go of the other ranks."""


class Addends(Protocol):
    """An exchange under way."""

    def wait(self) -> list[torch.Tensor]:
        """Return the bytes that every rank has for this one; blocks.

        They are valid until the exchange after the next begins.
        """


@dataclass(frozen=True)
class Relay:
    """A rank's part in sums that ranks make group by group.

    A rank sends its addends to the members of its group, each of which adds up some shares; these
    sums go on to the ranks of every group that keep those shares. Group sizes divide the number of
    shares, or are multiples of it.
    """

    rank: int
    size: int
    n_shares: int
    sum_group: int

    @property
    def members(self) -> range:
        """The ranks whose addends come to this one."""
        first = self.rank // self.sum_group * self.sum_group
        return range(first, first + self.sum_group)

    @property
    def shares(self) -> range:
        """The shares that this rank adds up for its group."""
        apart = min(self.sum_group, self.n_shares)
        return range(self.rank % apart, self.n_shares, apart)

    @property
    def keepers(self) -> range:
        """The ranks that exchange sums of groups with this one: one of each group."""
        return range(self.rank % self.sum_group, self.size, self.sum_group)

    def numbers(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return those of the ranks that are members, as numbers of members."""
        members = self.members
        return tuple(rank - members.start for rank in ranks if rank in members)

    def groups(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return the numbers of the groups in which any of the ranks is."""
        return tuple(dict.fromkeys(rank // self.sum_group for rank in ranks))

    def place(self, share: int) -> int:
        """Return the place in an outbox of the part for a share: those for one member follow each
        other."""
        return share % min(self.sum_group, self.n_shares) * len(self.shares) + self.number(share)

    def number(self, share: int) -> int:
        """Return the place of a share among those that one member adds up."""
        return share // min(self.sum_group, self.n_shares)


def relay_of(rank: int, size: int, n_shares: int, sum_group: int) -> Relay | None:
    """Return a rank's relay, if ranks form groups of which some sum has to leave one."""
    return Relay(rank, size, n_shares, sum_group) if 1 < sum_group < size else None


class Company(Protocol):
    """Ranks that make the same calls in the same order, and tell each other rows."""

    rank: int
    """This one's number among them, an index; `members` has names for what a user reads."""
    size: int
    members: Members

    @property
    def node(self) -> Node | None:
        """Where ranks read each other's homes; None if they gather."""

    def agree(self, row: bytes, what: str) -> list[bytes]:
        """Return the rows of all ranks, of any length; blocks."""

    def agree_aside(self, row: bytes, what: str) -> list[bytes]:
        """As `agree`, of calls with an order of their own, made by one other thread at a time."""

    def close(self) -> None:
        """Give up groups and connections; no call is under way."""


class Comm(Company, Protocol):
    """The ranks that share one model. Buffers are 1-D uint8 tensors on HOST or, of `gather`, where
    frames are; ``what`` names a call in errors."""

    n_shares: int
    """Parts into which homes are cut: rank r keeps that of number r % n_shares. As many ranks in a
    row keep one copy of the model: they read each other's shares."""
    n_context: int
    """Ranks in a row that have parts of the same sequences: units of theirs make calls together, so
    that none may choose alone to compute one again."""
    n_local: int
    """Ranks on this machine."""
    sum_group: int
    """As `Config.sum_group`."""
    relay: Relay | None
    """How sums are made group by group; None if every addend comes to the rank of its share."""

    @property
    def n_copies(self) -> int:
        """Copies of the model."""

    @property
    def everyone(self) -> Company:
        """The ranks that have the model together: these, and of a tensor parallel model those with
        the other parts of its tensors."""

    def open_gathers(self, device: Device) -> None:
        """Be ready to gather in frames of a device, unless ranks read each other's homes.
        Collective."""

    def gather(self, whole: torch.Tensor, what: str, after: Iterable[Ticket]) -> Ticket:
        """Begin to fill ``whole`` in place from the ranks of this one's copy, after tickets: each
        has the part of its share, and all are equal. It is held until the ticket was waited for.

        All ranks are about to make it: they have told each other (`agree`)."""

    def wait(self, ticket: Ticket) -> None:
        """Block until a gather is over, in RAM; one on a device is a ticket of the device's, for
        which compute waits. Raises RankLost if it never will be."""

    def complete(self, value: torch.Tensor, cuts: Sequence[int], what: str) -> None:
        """Fill ``value`` where no rank reads another's home: bytes [cuts[s], cuts[s + 1]) are those
        of share s in the first copy; blocks."""

    def outbox(self, n_bytes: int) -> torch.Tensor:
        """Return the memory of the next exchange: the s-th of ``n_shares`` equal parts is for the
        ranks that keep share s (with a relay, the part at `Relay.place`).

        The exchange before the last one was waited for.
        """

    def lock_outboxes(self, device: Device) -> None:
        """Page-lock what gradients of a device leave through, until `close`."""

    def lock_inboxes(self, device: Device) -> None:
        """Page-lock what gradients of other ranks arrive in, for copies to a device."""

    def exchange(self, what: str) -> Addends:
        """Begin to send the outbox to all ranks (with a relay, to those of this one's group, in
        whose parts are all of `Relay.shares`). Exchanges are calls with an order of their own, made
        by one thread at a time."""

    def pass_on(self, sums: torch.Tensor, what: str) -> Addends:
        """Begin to send this group's sums of `Relay.shares`, in their order, to the keepers, from
        each of which comes its group's sum of this rank's share. A call among exchanges; the sums
        before these were waited for."""

    def summed(self, n_bytes: int) -> None:
        """CPUs read and wrote so many bytes for sums: where time is modelled, it passes."""

    def give_up_exchange(self, why: str) -> None:
        """Say in place of the next exchange, or of its end, that this rank makes none: all others
        raise DivergenceError there."""

    def nearer(self, layout: Any) -> Comm:
        """Return what joins the ranks from here on, if they find that they share a machine and may
        read each other's homes of a `Layout`; else this one. Collective."""

    def awaited(self) -> int | None:
        """Return the number of the rank that came last in what this thread waited for since it
        asked last; None if it waited for none, or cannot tell."""


class Alone:
    """The only rank: nothing is exchanged.

    Args:
        n_local: ranks on this machine, each with parts of its own of the model's tensors.
        everyone: those, if there are any.
        members: this rank, by its number in the world.
    """

    rank = 0
    size = n_shares = n_copies = n_context = sum_group = 1
    node = None
    relay: Relay | None = None

    def __init__(
        self, n_local: int = 1, everyone: Company | None = None, members: Members = ONE_MEMBER
    ) -> None:
        self.n_local = n_local
        self.members = members
        self._everyone = everyone

    @property
    def everyone(self) -> Company:
        return self if self._everyone is None else self._everyone

    def open_gathers(self, device: Device) -> None: ...

    def gather(self, whole: torch.Tensor, what: str, after: Iterable[Ticket]) -> Ticket:
        return DONE

    def wait(self, ticket: Ticket) -> None: ...

    def complete(self, value: torch.Tensor, cuts: Sequence[int], what: str) -> None: ...

    def outbox(self, n_bytes: int) -> torch.Tensor:
        raise AssertionError("a rank that is alone exchanges nothing")

    def lock_outboxes(self, device: Device) -> None: ...

    def lock_inboxes(self, device: Device) -> None: ...

    def exchange(self, what: str) -> Addends:
        raise AssertionError("a rank that is alone exchanges nothing")

    def pass_on(self, sums: torch.Tensor, what: str) -> Addends:
        raise AssertionError("a rank that is alone exchanges nothing")

    def summed(self, n_bytes: int) -> None: ...

    def give_up_exchange(self, why: str) -> None: ...

    def agree(self, row: bytes, what: str) -> list[bytes]:
        return [row]

    agree_aside = agree

    def nearer(self, layout: Any) -> Comm:
        return self

    def awaited(self) -> int | None:
        return None

    def close(self) -> None:
        if self._everyone is not None:
            self._everyone.close()


def standing_for(comm: Comm, log: EventLog) -> AbstractContextManager[None]:
    """Log the length of a block as a wait for other ranks, and for which."""
    comm.awaited()
    return log.standing("ranks", lambda: last_of(comm))


def last_of(comm: Comm) -> str:
    number = comm.awaited()
    return "" if number is None else comm.members.name(number)


class OneSided:
    """What ranks need not do that read each other's homes and addends."""

    relay: Relay | None = None

    def open_gathers(self, device: Device) -> None: ...

    def gather(self, whole: torch.Tensor, what: str, after: Iterable[Ticket]) -> Ticket:
        raise AssertionError("ranks that read each other's homes gather nothing")

    def pass_on(self, sums: torch.Tensor, what: str) -> Addends:
        raise AssertionError("ranks that read each other's addends pass no sums on")

    def summed(self, n_bytes: int) -> None: ...

    def wait(self, ticket: Ticket) -> None: ...

    def nearer(self, layout: Any) -> Any:
        return self


DONE = Ticket(Lane.GATHER, 0.0, done=True)
ALONE_COMM = Alone()
