"""What joins ranks: forked ranks measure it together, and one of them writes it down."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from hetero.cli import main
from hetero.cores import torch_threads
from hetero.device import CpuDevice
from hetero.errors import ConfigError, RankLost
from hetero.parallel import circles
from hetero.parallel.circles import Circle, Machines, carrier_of
from hetero.parallel.launch import Launch, launch
from hetero.plan.hardware import lint, load
from hetero.plan.machine import Net
from hetero.recipes import calibrate, probes, wires
from hetero.recipes.calibrate import CalibrateOptions, Calibration
from hetero.recipes.probes import Probe, Rig
from hetero.recipes.readings import Readings, take_readings
from hetero.recipes.wires import SharedRig, Wiring, bus_rate, net_of
from hetero.testing.ranks import outcomes, run_ranks
from tests.recipes.test_calibrate import FACTS, HOST, TINY, Clock, readings

NEEDED = ("RAM", "matmuls", "launches", "updates")
"""Groups without which there is no profile, or none that plans."""


def known_machine(rig: Rig) -> Iterator[Probe]:
    """Figures of a machine, in no time."""
    for (key, at), value in HOST.items():
        yield Probe(key, at, partial(float, value))


def measured(rank: int, path: Path, n_local: int) -> Calibration:
    """Calibrate on ranks of which as many as ``n_local`` share a machine."""
    os.environ["LOCAL_WORLD_SIZE"] = str(n_local)
    calibrate.GROUPS = {"all": known_machine}
    return calibrate.calibrate(CalibrateOptions(pace=TINY, device="cpu", output=path))


def written(path: Path, n_ranks: int, n_local: int) -> Net:
    """Return what ranks wrote of what joins them, after looking at the rest of the profile."""
    found = run_ranks(n_ranks, measured, path, n_local)
    assert lint(path.read_text()) == []
    assert all(each.profile == load(path) and each.problems == () for each in found)
    assert found[0].profile.host.matmul is not None
    net: Net = found[0].profile.net
    return net


def test_ranks_of_one_machine_write_what_joins_them(tmp_path: Path) -> None:
    net = written(tmp_path / "box.toml", 2, 2)

    assert (net.intra, net.inter) == ("gloo", None)
    assert net.bytes_per_second is not None and net.bytes_per_second.value > 0
    assert net.latency_seconds is not None and net.latency_seconds.value > 0
    assert net.busbw is not None and len(net.busbw.rows) == len(TINY.copy_bytes)
    assert all(rate > 0 for _, rate in net.busbw.rows)
    assert all(a < b for (a, _), (b, _) in pairwise(net.busbw.rows))


@pytest.mark.parametrize(("n_ranks", "n_local"), [(2, 1), (4, 2)])
def test_ranks_of_two_machines_write_what_joins_these(
    n_ranks: int, n_local: int, tmp_path: Path
) -> None:
    path = tmp_path / "box.toml"
    net = written(path, n_ranks, n_local)

    assert net.inter is not None and net.inter.devices_per_node == n_local
    assert net.inter.bytes_per_second.value > 0
    assert net.inter.latency_seconds is not None and net.inter.latency_seconds.value > 0
    assert (net.intra, net.busbw is None) == (("gloo", False) if n_local > 1 else ("none", True))
    assert f"{n_local} rank{'s' * (n_local > 1)} on each of 2 machines, by gloo" in path.read_text()


def small() -> tuple[torch.nn.Module, torch.Tensor]:
    """Return a model to plan, and its batch."""
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)), torch.ones(2, 8)


@pytest.mark.parametrize("n_local", [1, 2])
def test_a_profile_that_ranks_wrote_plans_a_run(n_local: int, tmp_path: Path) -> None:
    path = tmp_path / "box.toml"
    written(path, 2, n_local)
    words = ["--profile", str(path), "--ranks", "2", "--no-estimates", "--json"]

    planned = CliRunner().invoke(main, ["plan", f"{__name__}:small", *words])

    assert planned.exit_code == 0, planned.output
    assert json.loads(planned.stdout)["profile"] == load(path).name


# -- who does what -------------------------------------------------------------------------------


def on_record(rank: int, path: Path) -> tuple[list[str], list[str]]:
    """Return the groups that this rank measured alone, and what it was told of."""
    alone: list[str] = []
    seen: list[str] = []

    def group(rig: Rig) -> Iterator[Probe]:
        alone.append("RAM")
        return known_machine(rig)

    calibrate.GROUPS = {"RAM": group}
    options = CalibrateOptions(pace=TINY, device="cpu", output=path)
    calibrate.calibrate(options, lambda name, *told: seen.append(name))
    return alone, sorted({*seen} - {""})


def test_the_first_rank_alone_measures_its_machine(tmp_path: Path) -> None:
    found = run_ranks(2, on_record, tmp_path / "box.toml")

    assert found == [(["RAM"], ["RAM", "ranks"]), ([], ["ranks"])]


def commanded(rank: int, words: list[str]) -> tuple[int, str]:
    os.environ["WORLD_SIZE"] = "2"
    probes.QUICK = TINY
    calibrate.GROUPS = {name: calibrate.GROUPS[name] for name in NEEDED}
    # in a child of a process that has computed on several threads, a second one would hang
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    result = CliRunner().invoke(main, ["calibrate", "--device", "cpu", "--json", *words])
    return result.exit_code, result.stdout


def test_the_command_prints_on_the_first_rank_alone(tmp_path: Path) -> None:
    path = tmp_path / "box.toml"
    (status, said), others = run_ranks(2, commanded, ["--output", str(path)])

    assert (status, others) == (0, (0, ""))
    figures = {figure["key"] for figure in json.loads(said)["figures"]}
    assert {"net.GBps", "net.alpha_us", "host.dram_GBps"} <= figures


def test_a_command_that_fails_says_so_once_on_standard_output(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = run_ranks(2, commanded, ["--output", str(tmp_path / "file" / "box.toml")])

    assert [status for status, _ in found] == [2, 2]
    assert json.loads(found[0][1])["error"] == "ConfigError"
    assert found[1][1] == ""


def test_a_rank_that_torchrun_left_one_thread_measures_with_all_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calibrate, "usable_cores", lambda: 3)
    monkeypatch.setattr(calibrate.psutil, "cpu_count", lambda logical: 4)
    with torch_threads(1):
        with calibrate.threads_alone(1):
            assert torch.get_num_threads() == 1  # without a launcher it was the user's choice
        with calibrate.threads_alone(2):
            assert torch.get_num_threads() == 3
        assert torch.get_num_threads() == 1


# -- failures ------------------------------------------------------------------------------------


def without_memory(rank: int, path: Path) -> Calibration:
    """The second rank cannot take the memory of an exchange."""

    def exchange(self: Circle, n_bytes: int) -> Callable[[], None]:
        raise MemoryError("no room")

    if rank == 1:
        Circle.exchange = exchange
    return measured(rank, path, 2)


def test_a_rank_that_cannot_measure_is_noted_by_all(tmp_path: Path) -> None:
    path = tmp_path / "box.toml"
    found = run_ranks(2, without_memory, path)

    assert all(each.profile == load(path) for each in found)
    assert found[0].profile.quality.notes[-1] == "ranks: rank 1: no room"
    assert found[0].profile.net.busbw is not None
    assert found[0].profile.net.bytes_per_second is None


def on_unlike_machines(rank: int, path: Path) -> Calibration:
    return measured(rank, path, rank + 1)


def test_machines_with_unlike_numbers_of_ranks_are_refused_on_all(tmp_path: Path) -> None:
    for each in outcomes(2, on_unlike_machines, tmp_path / "box.toml"):
        assert isinstance(each.error, ConfigError), each.text
        assert "2 ranks, and 1, 2 on a machine" in str(each.error)
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_first_rank_is_raised_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for each in outcomes(2, measured, tmp_path / "file" / "box.toml", 2):
        assert isinstance(each.error, ConfigError), each.text
        assert "name another --output" in str(each.error)


def dying(rank: int, path: Path) -> Calibration:
    """The second rank dies in a collective."""

    def gather(self: Circle, n_bytes: int) -> Callable[[], None]:
        return lambda: os._exit(3)

    if rank == 1:
        Circle.gather = gather
    return measured(rank, path, 2)


def test_a_rank_that_dies_leaves_no_other_waiting(tmp_path: Path) -> None:
    first, _ = outcomes(2, dying, tmp_path / "box.toml")

    assert isinstance(first.error, RankLost), first.text
    assert list(tmp_path.iterdir()) == []


def test_a_lost_rank_is_no_group_that_failed() -> None:
    def group(rig: Rig) -> Iterator[Probe]:
        yield Probe("a", (), lambda: 1.0)
        raise RankLost("it left")

    with pytest.raises(RankLost):
        take_readings(Rig(CpuDevice(), TINY), {"ranks": group}, calibrate.silent)


# -- arithmetic, on a clock of its own -----------------------------------------------------------


def test_bus_bandwidth_leaves_out_the_part_that_stays_where_it_is() -> None:
    assert bus_rate(8 * 10**9, 2, 2.0) == 2e9
    assert bus_rate(8 * 10**9, 8, 2.0) == 3.5e9
    assert bus_rate(3 * 10**6, 3, 0.5) == 4e6


class Wires:
    """A circle on a clock: a start, and a rate one way of each rank."""

    def __init__(self, clock: Clock, size: int) -> None:
        self.clock = clock
        self.size = size
        self.made: list[int] = []

    def gather(self, n_bytes: int) -> Callable[[], None]:
        self.made.append(n_bytes)
        return self.clock.work(0.002 + n_bytes * (self.size - 1) / self.size / 1e8)

    exchange = gather


def shared(clock: Clock) -> SharedRig:
    return SharedRig(CpuDevice(), TINY, clock=clock, cores=2, limit_bytes=2**40, ranks=Launch())


def sampled(found: Iterator[Probe]) -> dict[tuple[str, tuple[int, ...]], float]:
    return {(probe.key, probe.at): probe.sample() for probe in found}


def timed(rank: int) -> tuple[float, int]:
    """Time work that takes the second rank three times as long."""
    clock = Clock()
    with launch(60) as ranks:
        rig = SharedRig(CpuDevice(), TINY, clock=clock, ranks=ranks)
        work = clock.work(0.0001 * (1 + 2 * rank))
        return rig.seconds(work, 10), rig.repeats(work)


def test_all_take_the_time_of_the_slowest_rank_for_theirs() -> None:
    assert run_ranks(2, timed) == [(pytest.approx(0.003), 2)] * 2


def test_a_sweep_ends_after_the_first_size_that_takes_long() -> None:
    clock = Clock()
    near: Any = Wires(clock, 4)

    found = sampled(wires.within(Launch(), shared(clock), near, [10**6, 10**7, 10**8]))

    assert found[("net.latency", ())] == pytest.approx(0.002, rel=0.01)
    assert found[("net.gather", (10**6,))] == pytest.approx(750_000 / 0.0095)
    assert found[("net.gather", (10**7,))] == pytest.approx(7_500_000 / 0.077)
    assert found[("net.exchange", (10**7,))] == pytest.approx(7_500_000 / 0.077)
    assert max(near.made) == 10**7  # 0.077 s is too long for a larger one


def test_the_latency_of_machines_is_of_one_message_of_those_in_a_row() -> None:
    clock = Clock()
    far: Any = Wires(clock, 5)

    found = sampled(wires.between(Launch(), shared(clock), far, far, [2**16]))

    assert found[("net.inter.latency", ())] == pytest.approx(0.002 / 4, rel=0.01)
    assert found[("net.inter.exchange", (2**16 - 1,))] > 0  # parts are whole


NET = {
    ("net.latency", ()): 2e-5,
    ("net.gather", (2**20,)): 4e10,
    ("net.gather", (2**24,)): 2e11,
    ("net.exchange", (2**24,)): 3e11,
    ("net.inter.latency", ()): 1e-5,
    ("net.inter.exchange", (2**24,)): 4.2e10,
    ("net.inter.alone", (2**24,)): 4.0e10,
}


def test_a_device_among_others_is_never_faster_than_alone() -> None:
    net = net_of(readings(NET), Wiring(Machines(2, 8), "nccl"))

    assert net is not None and net.inter is not None
    assert net.intra == "nccl"
    assert net.bytes_per_second is not None and net.bytes_per_second.value == 3e11
    assert net.busbw is not None and net.busbw.rows == ((2.0**20, 4e10), (2.0**24, 2e11))
    assert net.inter.bytes_per_second.value == 4.0e10
    assert net.inter.devices_per_node == 8


def test_what_varies_between_ranks_is_named() -> None:
    run = calibrate.CalibrationRun(pace=TINY, seconds=1.0, wiring=Wiring(Machines(2, 8), "nccl"))
    profile = calibrate.profile_of(FACTS, readings(HOST | NET, 0.2), run)

    assert {"net.GBps", "net.busbw", "net.inter.alpha_us"} <= {*profile.quality.noisy}
    assert lint(calibrate.dump(profile)) == []


def test_nothing_that_was_measured_is_no_section() -> None:
    assert net_of(Readings(()), Wiring(Machines(1, 2), "gloo")) is None
    assert net_of(readings(NET), None) is None


def chosen(rank: int, n_devices: list[int], on_cuda: bool) -> str:
    circles.n_accelerators = lambda: n_devices[rank]
    circles.dist.is_nccl_available = lambda: True
    with launch(60) as ranks:
        return carrier_of(ranks, Machines(1, 2), on_cuda=on_cuda)


@pytest.mark.parametrize(
    ("n_devices", "on_cuda", "carrier"),
    [([2, 2], True, "nccl"), ([2, 1], True, "gloo"), ([2, 2], False, "gloo")],
)
def test_nccl_joins_ranks_that_each_have_a_device(
    n_devices: list[int], on_cuda: bool, carrier: str
) -> None:
    assert run_ranks(2, chosen, n_devices, on_cuda) == [carrier] * 2
