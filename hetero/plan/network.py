"""Times of what ranks tell each other: between devices of a machine, and between machines (floor 1;
no torch).

A rank is a device, machines are alike, and ranks are numbered machine by machine.
"""

from __future__ import annotations

from typing import NamedTuple

from hetero.plan.machine import MachineProfile
from hetero.plan.rates import interpolated


class Cluster(NamedTuple):
    """Ranks that train one model, on machines that are alike."""

    n_shares: int
    """Ranks in a row that keep one copy of it."""
    n_copies: int
    n_local: int
    """Ranks on one machine."""
    sum_group: int = 1
    """Ranks in a row that add up gradients first, machines or parts of one."""
    n_beside: int = 1
    """Ranks on a machine for each of these: with other parts of its tensors, or other stages."""

    @property
    def n_here(self) -> int:
        """All ranks on one machine, which divide its RAM and its processors."""
        return self.n_local * self.n_beside

    @property
    def size(self) -> int:
        return self.n_shares * self.n_copies

    @property
    def n_machines(self) -> int:
        return -(-self.size // self.n_local)

    @property
    def is_near(self) -> bool:
        """Whether each copy's ranks are on one machine, where they read each other's homes."""
        return self.n_machines == 1 or self.n_local % self.n_shares == 0


def on_machines(
    profile: MachineProfile, n_shares: int, n_copies: int, n_parts: int = 1, n_stages: int = 1
) -> Cluster:
    """Return ranks as they are on machines of a profile; without [net.inter] there is only one.

    ``n_parts`` ranks in a row divide tensors, and stages are outermost.
    """
    size, whole = n_shares * n_copies, n_shares * n_copies * n_parts * n_stages
    devices = min(whole, node_size(profile, whole))
    n_local = max(1, min(size, devices // n_parts))
    return Cluster(n_shares, n_copies, n_local, n_beside=max(1, devices // n_local))


def node_size(profile: MachineProfile, n_ranks: int) -> int:
    """Return the devices of a machine; all of them, if there is only one."""
    inter = profile.net and profile.net.inter
    return inter.devices_per_node if inter else n_ranks


def gather_seconds(profile: MachineProfile, ranks: Cluster, n_bytes: int) -> float:
    """Return the time in which all ranks of a copy gather ``n_bytes``, of which each has a share.

    Every device receives what others keep: on its machine at the bandwidth of collectives there
    (the bytes that arrive at a device over the time). Into a machine come the shares of other
    machines, once, through the network cards of all its devices. The longer of both counts, and a
    latency for each machine that a ring passes.
    """
    n, devices = ranks.n_shares, min(ranks.n_shares, ranks.n_local)
    inside = n_bytes * (n - 1) / n / near_rate(profile, ranks, n_bytes)
    return max(inside, far_seconds(profile, n_bytes * (n - devices) / n / devices, n // devices))


def exchange_seconds(profile: MachineProfile, ranks: Cluster, n_bytes: int) -> float:
    """Return the time on the network in which every rank sends ``n_bytes`` of addends to those that
    keep them, in every copy; 0 on one machine, where they are read in memory.

    Ranks in groups send them within the group, whose members divide all shares.
    """
    group = ranks.sum_group
    if group == 1:
        away = (ranks.size - ranks.n_local) / ranks.n_shares
        return far_seconds(profile, n_bytes * away, ranks.n_machines)
    away = max(0, group - ranks.n_local) / min(group, ranks.n_shares)
    return far_seconds(profile, n_bytes * away, -(-group // ranks.n_local))


def pass_on_seconds(profile: MachineProfile, ranks: Cluster, n_bytes: int) -> float:
    """Return the time on the network in which every rank sends a group's sums of a share, of
    ``n_bytes``, to each rank of another machine to which it sends any: one of each group there."""
    away = (ranks.size - max(ranks.n_local, ranks.sum_group)) / ranks.sum_group
    return far_seconds(profile, n_bytes * away, ranks.n_machines)


def far_seconds(profile: MachineProfile, n_bytes: float, n_machines: int) -> float:
    """Return the time in which a device's part of the network cards moves bytes one way."""
    inter = profile.net and profile.net.inter
    if not inter or n_machines < 2:
        return 0.0
    late = inter.latency_seconds.value if inter.latency_seconds else 0.0
    return n_bytes / inter.bytes_per_second.value + (n_machines - 1) * late


def near_rate(profile: MachineProfile, ranks: Cluster, n_bytes: int) -> float:
    """Return the bytes that arrive at a device of a machine in a second, from all others there.

    Without a figure they go through RAM, of which every rank has a part: written and read.
    """
    net = profile.net
    if net is not None and net.busbw is not None:
        return interpolated(net.busbw.rows, n_bytes)
    if net is not None and net.bytes_per_second is not None:
        return net.bytes_per_second.value
    return profile.host.dram_bytes_per_second.value / 2 / ranks.n_here


def sum_seconds(profile: MachineProfile, n_ranks: int, n_bytes: float) -> float:
    """Return the time in which ranks in a row add up ``n_bytes``, which each of them has: a ring
    moves twice what a gather does (T8)."""
    if n_ranks == 1:
        return 0.0
    moved, n_local = 2 * n_bytes * (n_ranks - 1) / n_ranks, node_size(profile, n_ranks)
    if n_ranks > n_local:
        return far_seconds(profile, moved, -(-n_ranks // n_local))
    late = profile.net and profile.net.latency_seconds
    cluster = Cluster(n_ranks, 1, n_ranks)
    return moved / near_rate(profile, cluster, int(n_bytes)) + (late.value if late else 0.0)


def send_seconds(profile: MachineProfile, n_bytes: float, *, near: bool) -> float:
    """Return the time in which a rank sends ``n_bytes`` to one of the next stage: on its machine,
    or through its part of the network cards."""
    net = profile.net
    if not near:
        return far_seconds(profile, n_bytes, 2)
    if net is None or net.bytes_per_second is None:
        return 2 * n_bytes / profile.host.dram_bytes_per_second.value
    late = net.latency_seconds.value if net.latency_seconds else 0.0
    return n_bytes / net.bytes_per_second.value + late
