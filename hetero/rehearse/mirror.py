"""Ranks that are as this one, made of numbers (floor 4).

The first of N ranks is rehearsed; the others do what it does at the same time. What those of its
machine do with one memory takes as many times as long as for one. Between machines, gathers and
sums take the times of a network, which each of these two has to itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from hetero.config import Config
from hetero.device import Device, Slab, Ticket
from hetero.device.comm import ALONE_COMM, Alone, Comm, Company, Relay, relay_of
from hetero.dry import DryDevice
from hetero.errors import ConfigError
from hetero.members import all_of
from hetero.parallel.mesh import (
    REPLICATE,
    SHARD,
    STAGES,
    TENSOR,
    check_axes,
    check_group,
    refuse_context,
)
from hetero.plan.machine import MachineProfile
from hetero.plan.network import (
    Cluster,
    exchange_seconds,
    gather_seconds,
    on_machines,
    pass_on_seconds,
)
from hetero.types import Kind, Lane

NO_CONTEXT = f"leave cp out: {SHARD} as many times as large plans the same shares"


class MirrorNode:
    """Homes of the other ranks: always as new as this one's."""

    def __init__(self, device: DryDevice) -> None:
        self._device = device

    def slab(self, name: str, bucket: int, n_bytes: int) -> Slab:
        return self._device.slab(n_bytes, travels=name == Kind.PARAM.value)

    def memory(self, name: str, bucket: int, share: int, n_bytes: int) -> torch.Tensor:
        return self._device.arena(n_bytes).carve(0, n_bytes)

    def begin(self, counter: int) -> None: ...

    def changed(self, counter: int) -> None: ...

    def is_current(self, counter: int) -> bool:
        return True

    def wait(self, counter: int) -> None: ...

    def awaited(self) -> int | None:
        return None

    def close(self) -> None: ...


class Mirror:
    """The first of the ranks of a mesh."""

    rank = 0
    n_context = 1

    def __init__(
        self, ranks: Cluster, device: DryDevice, profile: MachineProfile, *, gathers: bool
    ) -> None:
        self.n_shares, self.n_copies, self.n_local = ranks.n_shares, ranks.n_copies, ranks.n_here
        self.sum_group = ranks.sum_group
        self.size, self.members = ranks.size, all_of(ranks.size)
        self.relay: Relay | None = None  # of one machine, where every rank reads all addends
        if ranks.n_machines > 1:
            self.relay = relay_of(0, self.size, self.n_shares, self.sum_group)
        self.node = None if gathers or not ranks.is_near else MirrorNode(device)
        self._device = device
        self._gather_seconds = partial(gather_seconds, profile, ranks)
        self._exchange_seconds = partial(exchange_seconds, profile, ranks)
        self._pass_on_seconds = partial(pass_on_seconds, profile, ranks)
        self._memory_seconds = profile.host.memory_seconds
        self._sent_bytes = 0

    @property
    def everyone(self) -> Company:
        return self

    def open_gathers(self, device: Device) -> None: ...

    def gather(self, whole: torch.Tensor, what: str, after: Iterable[Ticket]) -> Ticket:
        return self._device.occupy(Lane.GATHER, self._gather_seconds(whole.numel()), after)

    def wait(self, ticket: Ticket) -> None:
        self._device.wait(ticket)

    def outbox(self, n_bytes: int) -> torch.Tensor:
        self._sent_bytes = n_bytes
        return self._device.arena(n_bytes).carve(0, n_bytes)

    def lock_outboxes(self, device: Device) -> None: ...

    def lock_inboxes(self, device: Device) -> None: ...

    def exchange(self, what: str) -> MirrorAddends:
        return MirrorAddends(partial(self._arrive, self._sent_bytes))

    def pass_on(self, sums: torch.Tensor, what: str) -> MirrorAddends:
        return MirrorAddends(partial(self._arrive_sums, sums.numel()))

    def summed(self, n_bytes: int) -> None:
        """Let the time pass in which every rank of this machine does that with its memory."""
        self._device.compute(self._memory_seconds(self.n_local * n_bytes))

    def give_up_exchange(self, why: str) -> None: ...

    def agree(self, row: bytes, what: str) -> list[bytes]:
        return [row] * self.size

    agree_aside = agree

    def complete(self, value: torch.Tensor, cuts: Sequence[int], what: str) -> None: ...

    def nearer(self, layout: Any) -> Comm:
        return self

    def awaited(self) -> int | None:
        return None

    def close(self) -> None: ...

    def _arrive(self, n_bytes: int) -> list[torch.Tensor]:
        """Let the time pass in which addends of ``n_bytes`` for all shares arrive."""
        n_parts, n_ranks = 1, self.size
        if self.relay is not None:
            n_parts, n_ranks = len(self.relay.shares), self.sum_group
        part_bytes = n_bytes // self.n_shares * n_parts
        self._device.compute(self._exchange_seconds(n_bytes))
        return [self.outbox(part_bytes)] * n_ranks

    def _arrive_sums(self, n_bytes: int) -> list[torch.Tensor]:
        """Let the time pass in which sums of groups go on. Of ``n_bytes`` are those that one rank
        sends."""
        assert self.relay is not None
        part_bytes, n_groups = n_bytes // len(self.relay.shares), len(self.relay.keepers)
        self._device.compute(self._pass_on_seconds(part_bytes))
        return [self.outbox(part_bytes)] * n_groups


class MirrorAddends:
    """What comes from ranks that send what this one does."""

    def __init__(self, arrive: Callable[[], list[torch.Tensor]]) -> None:
        self._arrive = arrive

    def wait(self) -> list[torch.Tensor]:
        return self._arrive()


def mirrored(config: Config, device: DryDevice, profile: MachineProfile) -> Comm:
    """Return the ranks of the setting `mesh`; ConfigError if it does not say how many, or if they
    do not form groups."""
    ranks, sum_group = ranks_of(config.mesh, profile), config.sum_group
    check_group(sum_group, ranks.n_shares, ranks.n_copies)
    ranks = ranks._replace(sum_group=sum_group)
    if ranks.size == 1:
        return ALONE_COMM if ranks.n_here == 1 else Alone(ranks.n_here)
    return Mirror(ranks, device, profile, gathers=config.gather_shares)


def ranks_of(mesh: Any, profile: MachineProfile) -> Cluster:
    """Return the ranks that share a model; one if each keeps a whole one."""
    if mesh is None:
        return Cluster(1, 1, 1)
    if not isinstance(mesh, Mapping):
        raise ConfigError(
            f"a plan with mesh={mesh!r}, which does not say how many ranks there are",
            advice=f"plan with mesh={{'{SHARD}': 4}} for four",
        )
    check_axes(mesh)
    refuse_context(mesh, "a plan", NO_CONTEXT)
    n_shares, *others = (int(mesh.get(axis, 1)) for axis in (SHARD, TENSOR, STAGES))
    n_copies = int(mesh.get(REPLICATE, 1)) if n_shares > 1 else 1
    return on_machines(profile, n_shares, n_copies, *others)
