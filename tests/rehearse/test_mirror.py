"""Ranks made of numbers: what they move takes the time of the machines they are on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hetero.config import Config
from hetero.device import Device, SimDevice
from hetero.dry import DryDevice
from hetero.errors import ConfigError
from hetero.events import EventLog
from hetero.plan.figures import Figure
from hetero.plan.hardware import find
from hetero.plan.machine import InterNet, MachineProfile, Net
from hetero.plan.network import gather_seconds, on_machines
from hetero.rehearse.mirror import mirrored, ranks_of
from hetero.types import Lane

FAR = 10e9


def cluster(devices: int) -> MachineProfile:
    inter = InterNet(bytes_per_second=Figure(FAR, "est"), devices_per_node=devices)
    return replace(find("h200-sxm"), net=Net(bytes_per_second=Figure(100e9, "est"), inter=inter))


def device() -> DryDevice:
    return DryDevice(is_cuda=True, ram_bytes=2**40, copy_seconds=lambda lane, n, both: n / 50e9)


def bytes_of(dry: DryDevice, n_bytes: int) -> torch.Tensor:
    return dry.arena(n_bytes).carve(0, n_bytes)


def test_ranks_of_one_machine_read_each_others_homes() -> None:
    assert mirrored(Config(mesh={"dp_shard": 4}), device(), cluster(4)).node is not None
    assert (
        mirrored(Config(mesh={"dp_replicate": 8, "dp_shard": 4}), device(), cluster(4)).node
        is not None
    )
    assert mirrored(Config(mesh={"dp_shard": 8}), device(), cluster(4)).node is None


def test_ranks_of_one_machine_that_gather_read_no_homes() -> None:
    gathers = Config(mesh={"dp_shard": 4}, gather_shares=True)

    assert mirrored(gathers, device(), cluster(4)).node is None


def test_a_gather_takes_its_lane_while_compute_goes_on() -> None:
    dry, machine = device(), cluster(4)
    comm = mirrored(Config(mesh={"dp_shard": 8}), dry, machine)
    expected = gather_seconds(machine, on_machines(machine, 8, 1), 10**9)

    place, source = bytes_of(dry, 10**6), bytes_of(dry, 10**6)
    share = dry.copy(Lane.H2D, place, source)
    first = comm.gather(bytes_of(dry, 10**9), "bucket", (share,))
    second = comm.gather(bytes_of(dry, 10**9), "bucket", ())
    assert dry.now() == 0.0
    dry.compute(expected / 2)
    comm.wait(first)
    assert dry.now() == pytest.approx(share.end + expected)
    comm.wait(second)

    assert dry.now() == pytest.approx(share.end + 2 * expected)
    assert dry.is_busy(Lane.GATHER) is False


def test_sums_wait_for_the_network_and_for_the_memory_of_a_machine() -> None:
    dry, machine = device(), cluster(4)
    comm = mirrored(Config(mesh={"dp_shard": 8}), dry, machine)
    comm.outbox(8 * 10**6)

    found = comm.exchange("bucket").wait()
    comm.summed(9 * 10**6)

    # four ranks are on another machine; four here each read eight addends and write one sum
    wire, summed = 4 * 10**6 / FAR, machine.host.memory_seconds(9 * 4 * 10**6)
    assert dry.now() == pytest.approx(wire + summed)
    assert [part.numel() for part in found] == [10**6] * 8


def test_groups_wait_for_their_own_memory_and_for_sums_of_others() -> None:
    dry, machine = device(), cluster(4)
    comm = mirrored(Config(mesh={"dp_shard": 8}, sum_group=4), dry, machine)
    comm.outbox(8 * 10**6)

    found = comm.exchange("bucket").wait()
    comm.summed(5 * 2 * 10**6)

    # four ranks each read four addends of two shares, and write two sums
    assert dry.now() == pytest.approx(machine.host.memory_seconds(5 * 4 * 2 * 10**6))
    assert [part.numel() for part in found] == [2 * 10**6] * 4

    before = dry.now()
    found = comm.pass_on(bytes_of(dry, 2 * 2 * 10**6), "bucket").wait()
    comm.summed(3 * 2 * 10**6)

    # one sum goes to the other machine; four ranks each read two and write one
    wire, summed = 2 * 10**6 / FAR, machine.host.memory_seconds(3 * 4 * 2 * 10**6)
    assert dry.now() - before == pytest.approx(wire + summed)
    assert [part.numel() for part in found] == [2 * 10**6] * 2


def test_groups_on_one_machine_read_all_addends() -> None:
    assert mirrored(Config(mesh={"dp_shard": 4}, sum_group=2), device(), cluster(4)).relay is None
    with pytest.raises(ConfigError, match="sum_group=3"):
        mirrored(Config(mesh={"dp_shard": 4}, sum_group=3), device(), cluster(4))


@pytest.mark.parametrize("make", [device, SimDevice])
def test_what_passes_on_a_thread_of_its_own_is_no_wait_of_compute(make: Any) -> None:
    place: Device = make()
    log = EventLog(place.clock)

    with place.aside(), log.standing("ranks"):
        pass

    assert len(log) == 0
    with log.standing("ranks"):
        pass
    assert len(log) == 1


def test_a_plan_of_unknown_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not say how many"):
        ranks_of("world", cluster(4))


def test_a_plan_of_parts_of_sequences_is_refused() -> None:
    with pytest.raises(ConfigError, match="a plan knows no parts of sequences"):
        ranks_of({"cp": 2}, cluster(4))


def test_ranks_with_other_parts_and_stages_are_on_the_machine_as_well() -> None:
    """Of eight devices two have the same part of a stage; all eight divide RAM and processors."""
    ranks = ranks_of({"pp": 2, "dp_shard": 8, "tp": 4}, cluster(8))
    small = ranks_of({"pp": 4, "dp_shard": 2}, cluster(8))

    assert (ranks.n_local, ranks.n_here, ranks.n_machines) == (2, 8, 4)
    assert (small.n_local, small.n_here, small.n_machines) == (2, 8, 1)


def test_copies_that_are_not_cut_are_no_ranks() -> None:
    assert ranks_of({"dp_replicate": 4}, cluster(4)).size == 1
