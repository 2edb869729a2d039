"""Times of a network: what is gathered comes from devices here, and from machines further away."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetero.plan.figures import Figure
from hetero.plan.hardware import find
from hetero.plan.machine import InterNet, MachineProfile, Net
from hetero.plan.network import (
    exchange_seconds,
    gather_seconds,
    on_machines,
    pass_on_seconds,
)

NEAR, FAR, LATE = 100e9, 10e9, 1e-3


def cluster(devices: int, near: float | None = NEAR) -> MachineProfile:
    """Return machines of so many devices."""
    inter = InterNet(
        bytes_per_second=Figure(FAR, "est"),
        latency_seconds=Figure(LATE, "est"),
        devices_per_node=devices,
    )
    rate = None if near is None else Figure(near, "est")
    return replace(find("h200-sxm"), net=Net(bytes_per_second=rate, inter=inter))


def test_ranks_fill_one_machine_after_the_other() -> None:
    ranks = on_machines(cluster(4), n_shares=10, n_copies=1)

    assert (ranks.size, ranks.n_local, ranks.n_machines) == (10, 4, 3)


def test_without_figures_between_machines_all_ranks_are_on_one() -> None:
    ranks = on_machines(find("rtx4090"), n_shares=1000, n_copies=1)

    assert (ranks.n_local, ranks.n_machines, ranks.is_near) == (1000, 1, True)


@pytest.mark.parametrize(
    ("n_shares", "n_copies", "is_near"), [(4, 2, True), (2, 4, True), (8, 1, False), (3, 4, False)]
)
def test_a_copy_is_near_if_no_two_machines_keep_it(
    n_shares: int, n_copies: int, is_near: bool
) -> None:
    assert on_machines(cluster(4), n_shares, n_copies).is_near is is_near


def test_what_a_machine_gathers_passes_its_own_links() -> None:
    machine = cluster(4)
    ranks = on_machines(machine, n_shares=4, n_copies=1)

    assert gather_seconds(machine, ranks, 400) == pytest.approx(300 / NEAR)


def test_what_machines_gather_comes_in_once_through_all_cards() -> None:
    machine, n_bytes = cluster(4), 10**10
    ranks = on_machines(machine, n_shares=16, n_copies=1)

    # 12 of 16 shares are on the other three machines
    expected = n_bytes * 12 / 16 / (4 * FAR) + 3 * LATE
    assert gather_seconds(machine, ranks, n_bytes) == pytest.approx(expected)


def test_slow_links_of_a_machine_bound_what_machines_gather() -> None:
    machine, n_bytes = cluster(4, near=1e9), 10**10
    ranks = on_machines(machine, n_shares=16, n_copies=1)

    assert gather_seconds(machine, ranks, n_bytes) == pytest.approx(n_bytes * 15 / 16 / 1e9)


def test_copies_on_machines_of_their_own_gather_nothing_from_others() -> None:
    machine, n_bytes = cluster(4), 10**10
    alone = on_machines(machine, n_shares=4, n_copies=1)
    copied = on_machines(machine, n_shares=4, n_copies=8)

    assert gather_seconds(machine, copied, n_bytes) == gather_seconds(machine, alone, n_bytes)


def test_addends_go_to_the_owners_in_every_copy() -> None:
    machine, n_bytes = cluster(4), 10**10

    # every rank sends each of the others, but the four of its machine, a share
    for n_shares, n_copies in ((16, 1), (4, 4)):
        ranks = on_machines(machine, n_shares, n_copies)
        expected = n_bytes * 12 / n_shares / FAR + 3 * LATE
        assert exchange_seconds(machine, ranks, n_bytes) == pytest.approx(expected)


def test_groups_of_a_machine_send_one_sum_of_each_share() -> None:
    machine, n_bytes = cluster(4), 10**10

    for n_shares, n_copies in ((16, 1), (4, 4)):
        ranks = on_machines(machine, n_shares, n_copies)._replace(sum_group=4)
        assert exchange_seconds(machine, ranks, n_bytes) == 0.0
        # each rank sends three of the other machines' ranks a sum, as a part of a machine's four
        assert pass_on_seconds(machine, ranks, n_bytes) == pytest.approx(
            n_bytes * 3 / FAR + 3 * LATE
        )


def test_groups_of_two_machines_send_addends_between_them() -> None:
    machine, n_bytes = cluster(4), 10**10
    ranks = on_machines(machine, 16, 1)._replace(sum_group=8)

    # four members are on the other machine, each of which adds up an eighth
    assert exchange_seconds(machine, ranks, n_bytes) == pytest.approx(n_bytes * 4 / 8 / FAR + LATE)
    assert pass_on_seconds(machine, ranks, n_bytes) == pytest.approx(n_bytes / FAR + 3 * LATE)


def test_addends_of_one_machine_need_no_network() -> None:
    machine = cluster(4)

    assert exchange_seconds(machine, on_machines(machine, 4, 1), 10**10) == 0.0
    assert exchange_seconds(find("rtx4090"), on_machines(find("rtx4090"), 4, 1), 10**10) == 0.0


def test_without_links_shares_go_through_ram() -> None:
    machine = cluster(2, near=None)
    ranks, ram = on_machines(machine, 2, 1), machine.host.dram_bytes_per_second.value

    # each of two ranks writes what it read: half of the bytes
    assert gather_seconds(machine, ranks, 10**9) == pytest.approx(2 * 2 * 5e8 / ram)
