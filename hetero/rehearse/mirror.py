"""Ranks that are as this one, made of numbers (floor 4).

The first of N ranks on one machine is rehearsed; the others do what it does at the same time. What
all of them do with one memory takes N times as long as for one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hetero.device import Device, Slab
from hetero.device.comm import ALONE_COMM, Comm, OneSided
from hetero.dry import DryDevice
from hetero.errors import ConfigError
from hetero.parallel.mesh import REPLICATE, SHARD, check_axes
from hetero.types import Kind

MemorySeconds = Callable[[int], float]
"""The time in which the machine's processors read and write so many bytes."""


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


class Mirror(OneSided):
    """The first of the ranks of a mesh."""

    rank = 0

    def __init__(
        self, n_shares: int, n_copies: int, device: DryDevice, memory_seconds: MemorySeconds
    ) -> None:
        self.n_shares, self.n_copies = n_shares, n_copies
        self.size = self.n_local = n_shares * n_copies
        self.node = MirrorNode(device)
        self._device = device
        self._seconds = memory_seconds
        self._sent_bytes = 0

    def outbox(self, n_bytes: int) -> torch.Tensor:
        self._sent_bytes = n_bytes
        return self._device.arena(n_bytes).carve(0, n_bytes)

    def lock_outboxes(self, device: Device) -> None: ...

    def exchange(self, what: str) -> MirrorAddends:
        return MirrorAddends(self, self._sent_bytes)

    def give_up_exchange(self, why: str) -> None: ...

    def agree(self, row: bytes, what: str) -> list[bytes]:
        return [row] * self.size

    agree_aside = agree

    def complete(self, value: torch.Tensor, cuts: Sequence[int], what: str) -> None: ...

    def awaited(self) -> int | None:
        return None

    def close(self) -> None: ...

    def sum_up(self, n_bytes: int) -> list[torch.Tensor]:
        """Let the time pass in which every rank reads all addends of its share, of ``n_bytes``
        for all shares, and writes their sum."""
        part_bytes = n_bytes // self.n_shares
        self._device.compute(self._seconds((self.size + 1) * self.size * part_bytes))
        return [self.outbox(part_bytes)] * self.size


class MirrorAddends:
    """An exchange with ranks that send what this one does."""

    def __init__(self, comm: Mirror, n_bytes: int) -> None:
        self._comm = comm
        self._n_bytes = n_bytes

    def wait(self) -> list[torch.Tensor]:
        return self._comm.sum_up(self._n_bytes)


def mirrored(mesh: Any, device: DryDevice, memory_seconds: MemorySeconds) -> Comm:
    """Return the ranks of the setting `mesh`; ConfigError if it does not say how many."""
    n_shares, n_copies = shares_of(mesh)
    if n_shares == 1:
        return ALONE_COMM
    return Mirror(n_shares, n_copies, device, memory_seconds)


def n_sharing(mesh: Any) -> int:
    """Return how many ranks share a model."""
    n_shares, n_copies = shares_of(mesh)
    return 1 if n_shares == 1 else n_shares * n_copies


def shares_of(mesh: Any) -> tuple[int, int]:
    """Return in how many shares ranks keep a model, and how many copies of it."""
    if mesh is None:
        return 1, 1
    if not isinstance(mesh, Mapping):
        raise ConfigError(
            f"a plan with mesh={mesh!r}, which does not say how many ranks there are",
            advice=f"plan with mesh={{'{SHARD}': 4}} for four",
        )
    check_axes(mesh)
    return int(mesh.get(SHARD, 1)), int(mesh.get(REPLICATE, 1))
