"""Calibration: samples become figures, figures a profile without a problem; one tiny real run."""

from __future__ import annotations

import dataclasses
import json
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode

from hetero.cli import main
from hetero.device import Accelerator, CpuDevice, UncountedMemory, open_device
from hetero.errors import ConfigError, DiskFull
from hetero.mounts import Mount
from hetero.plan.hardware import find, lint, load, parse
from hetero.plan.lint import curve_problems
from hetero.plan.machine import MachineProfile
from hetero.recipes import calibrate, drive, facts, probes, show
from hetero.recipes.calibrate import CalibrateOptions, CalibrationRun, profile_of, size_curve
from hetero.recipes.drive import Cliff, cliff
from hetero.recipes.facts import MachineFacts
from hetero.recipes.probes import LATENCY_BYTES, QUICK, Pace, Probe, Rig
from hetero.recipes.readings import Readings, Samples, measure, take_readings
from hetero.types import Lane

KIB, MIB = 2**10, 2**20
TINY = Pace(
    name="quick",
    warm_ups=1,
    rounds=3,
    sample_seconds=0.0005,
    matmul_seconds=0.0005,
    matmul_divisors=(2, 1),
    array_bytes=MIB,
    copy_bytes=(64 * KIB, MIB),
    update_numel=MIB,
    disk_bytes=8 * MIB,
)
FACTS = MachineFacts(
    name="box",
    cores=2,
    numa_nodes=1,
    isa=("avx2",),
    ram_bytes=2**34,
    limit_bytes=2**33,
    memlock_bytes=None,
    device="cpu",
    link_type="ram",
)
CUDA_FACTS = dataclasses.replace(
    FACTS,
    device="cuda:0",
    link_type="pcie5x16",
    accelerator=Accelerator("NVIDIA H200", "sm_90", 132, 150_754_820_096),
    accelerators=8,
    context_bytes=500_000_000,
    driver="570.1",
)
HOST = {
    ("host.dram", (1,)): 20e9,
    ("host.dram", (2,)): 30e9,
    ("host.update", (1,)): 0.7e9,
    ("host.update", (2,)): 1.3e9,
    ("matmul.launch", ()): 3e-6,
    **{("matmul.fp32", shape): 1e9 * sum(shape) / 4 for shape in probes.shapes(128, (2, 1))},
    ("nvme.read", ()): 3e9,
    ("nvme.write", ()): 2e9,
    ("nvme.mixed", ()): 3e9,
}
GRID = {("matmul.bf16", (m, n, 512)): 5e14 for m in (512, 8192) for n in (512, 8192)}
LINK = {
    ("link.h2d", (LATENCY_BYTES,)): 2e9,
    ("link.h2d", (65536,)): 20e9,
    ("link.h2d", (2**26,)): 55e9,
    ("link.d2h", (LATENCY_BYTES,)): 2e9,
    ("link.d2h", (65536,)): 20e9,
    ("link.d2h", (2**26,)): 50e9,
    ("link.duplex.h2d", ()): 40e9,
    ("link.duplex.d2h", ()): 51e9,
    ("link.h2d.pageable", ()): 11e9,
}
CUDA = {
    **{key: value for key, value in HOST.items() if not key[0].startswith("matmul.fp32")},
    **GRID,
    **LINK,
    ("gpu.copy", ()): 4.2e12,
    ("gpu.triad", ()): 4.0e12,
    ("overlap.gemm_under_h2d", ()): 1.05,
    ("overlap.gemm_under_d2h", ()): 0.99,
}


def readings(values: dict[tuple[str, tuple[int, ...]], float], spread: float = 0.01) -> Readings:
    """Return three samples around each value."""
    around = (1 - 2 * spread, 1, 1 + 2 * spread)
    found = [
        Samples(key, at, tuple(value * x for x in around)) for (key, at), value in values.items()
    ]
    return Readings(tuple(found))


def made(
    facts: MachineFacts, values: dict[tuple[str, tuple[int, ...]], float], spread: float = 0.01
) -> MachineProfile:
    profile = profile_of(facts, readings(values, spread), CalibrationRun(pace=QUICK, seconds=12.34))
    assert lint(calibrate.dump(profile)) == []
    assert parse(calibrate.dump(profile)) == profile
    return profile


# -- samples -------------------------------------------------------------------------------------


def test_a_figure_is_the_median_and_its_spread_the_middle_half_over_it() -> None:
    measured = Samples("x", (), (10.0, 12.0, 11.0, 100.0, 9.0))

    assert measured.median == 11
    assert measured.spread == pytest.approx(2 / 11, abs=0.01)  # from 10 to 12
    assert Samples("x", (), (5.0, 5.0, 5.0)).spread == 0


def test_a_median_has_four_digits() -> None:
    assert Samples("x", (), (123456.0,) * 3).median == 123500


def test_samples_that_warm_up_are_thrown_away() -> None:
    taken = iter(range(100))

    measured = measure(
        Probe("x", (), lambda: float(next(taken))), dataclasses.replace(TINY, warm_ups=2, rounds=4)
    )

    assert measured.samples == (2.0, 3.0, 4.0, 5.0)


def test_thorough_means_seven_samples_after_three_and_quick_three() -> None:
    assert probes.FULL.rounds >= 7 and probes.FULL.warm_ups >= 3
    assert QUICK.rounds >= 3 and QUICK.warm_ups >= 1


def test_a_group_that_fails_is_noted_and_the_others_go_on() -> None:
    def broken(rig: Rig) -> Iterator[Probe]:
        yield Probe("a", (), lambda: 1.0)
        raise torch.OutOfMemoryError("out of memory\nand a long story")

    def works(rig: Rig) -> Iterator[Probe]:
        yield Probe("b", (7,), lambda: 2.0)

    seen: list[tuple[str, str, int, int]] = []
    rig = Rig(CpuDevice(), TINY)
    found = take_readings(rig, {"one": broken, "two": works}, lambda *told: seen.append(told))

    assert [measured.key for measured in found.found] == ["a", "b"]
    assert found.notes == ("one: out of memory",)
    assert ("two", "b 7", 1, 2) in seen
    assert seen[-1] == ("", "", 2, 2)


# -- from readings to a profile ------------------------------------------------------------------


def test_a_profile_without_a_gpu_computes_on_the_host() -> None:
    profile = made(FACTS, HOST | {("overlap.gemm_under_update", ()): 2.0})

    host = profile.host
    assert profile.kind == "measured" and profile.gpu is None and profile.link is None
    assert host.dram_bytes_per_second.value == 30e9
    assert host.update_per_second.value == 1.3e9
    assert host.gemm_fp32_per_second is not None and host.gemm_fp32_per_second.value == 96e9
    assert host.threads.dram is not None
    assert host.threads.dram.rows == ((1.0, 20e9), (2.0, 30e9))
    assert host.memlock_bytes is None
    assert profile.op_seconds(0, 0) == 3e-6
    assert profile.overlap.gemm_under_update is not None


def test_a_profile_with_a_gpu_has_its_memory_link_and_peaks() -> None:
    profile = made(CUDA_FACTS, CUDA)

    gpu, link = profile.gpu, profile.link
    assert gpu is not None and link is not None and profile.host.matmul is None
    assert (gpu.name, gpu.arch, gpu.count, gpu.sm) == ("NVIDIA H200", "sm_90", 8, 132)
    assert gpu.hbm_bytes_per_second.value == 4.2e12
    assert gpu.hbm_efficiency.value == pytest.approx(4.0 / 4.2, rel=1e-3)
    assert gpu.tflops.bf16 is not None and gpu.tflops.bf16.source == "spec"
    assert gpu.tflops.bf16.value == 989e12
    assert gpu.tflops.fp32 is None  # nobody measured what it reaches of it
    assert gpu.context_bytes is not None
    assert link.h2d.bytes_per_second.value == 55e9
    assert link.h2d.latency_seconds.value == pytest.approx(LATENCY_BYTES / 2e9, rel=1e-3)
    assert link.h2d.pageable_factor is not None and link.h2d.pageable_factor.value == 0.2
    assert link.d2h.pageable_factor is None
    assert profile.copy_seconds(Lane.H2D, 2**26) == pytest.approx(2**26 / 55e9)


def test_a_peak_that_something_measured_is_above_is_left_out() -> None:
    faster = {key: 1.1e15 if key[0] == "matmul.bf16" else value for key, value in CUDA.items()}
    profile = made(CUDA_FACTS, faster)

    assert profile.gpu is not None
    assert profile.gpu.tflops.bf16 is None


def test_a_grid_that_broke_off_is_left_out() -> None:
    values = {key: value for key, value in HOST.items() if key != ("matmul.fp32", (64, 128, 64))}
    profile = made(FACTS, values)

    assert profile.host.matmul is not None and profile.host.matmul.fp32_grid is None
    assert profile.matmul_seconds(1, 1, 48 * 10**9, "fp32") == 1.0


def test_noise_never_makes_a_profile_impossible() -> None:
    profile = made(CUDA_FACTS, CUDA | {("nvme.mixed", ()): 9e9})

    assert profile.link is not None and profile.nvme is not None
    assert profile.link.duplex.d2h_bytes_per_second.value == 50e9  # 51 beside, 50 alone
    assert profile.overlap.gemm_under_d2h is not None
    assert profile.overlap.gemm_under_d2h.value == 1.0
    assert profile.nvme.mixed_factor is not None and profile.nvme.mixed_factor.value == 1.0


def test_what_varies_is_named_and_not_hidden() -> None:
    calm, noisy = made(FACTS, HOST, spread=0.01), made(FACTS, HOST, spread=0.2)

    assert calm.quality.noisy == ()
    assert noisy.quality.spread_percent == pytest.approx(40, rel=0.01)
    assert {"host.dram_GBps", "host.matmul.fp32_grid", "nvme.read_GBps"} <= {*noisy.quality.noisy}


def test_reading_and_writing_in_turns_is_half_of_each_rate() -> None:
    n_bytes, rate = 1e9, 2e9  # of each: all of it takes 2 n / rate, and full duplex n / rate
    turns = {("nvme.read", ()): rate, ("nvme.write", ()): rate, ("nvme.mixed", ()): rate}
    profile = made(FACTS, HOST | turns)

    both = profile.read_seconds(n_bytes, both_ways=True)
    assert both == profile.write_seconds(n_bytes, both_ways=True) == 2 * n_bytes / rate


def test_a_drives_latency_is_what_small_blocks_take_beyond_their_bytes() -> None:
    blocks = {
        ("nvme.read", (131072,)): 1e9,
        ("nvme.read", (4194304,)): 2e9,
        ("nvme.write", (131072,)): 3e9,
        ("nvme.write", (4194304,)): 2e9,
    }
    others = {key: value for key, value in HOST.items() if not key[0].startswith("nvme.")}
    nvme = made(FACTS, {**others, **blocks, ("nvme.mixed", (4194304,)): 3e9}).nvme

    assert nvme is not None
    assert nvme.read_latency_seconds is not None and nvme.write_latency_seconds is not None
    assert nvme.read_bytes_per_second.value == 2e9
    assert nvme.read_latency_seconds.value == pytest.approx(131072 / 1e9 - 131072 / 2e9, rel=1e-3)
    assert nvme.write_latency_seconds.value == 0.0


def test_attention_is_a_share_of_a_matmul_and_never_more() -> None:
    rates = {("attention.forward", ()): 1e10, ("attention.backward", ()): 1e15}
    work = {("host.elementwise", (2**16,)): 9e9, ("host.functions", ()): 7e8}
    profile = made(FACTS, {**HOST, **rates, **work})

    matmul = profile.host.matmul
    assert matmul is not None and matmul.attention is not None
    assert 0 < matmul.attention.value < 1
    assert matmul.attention_backward is not None and matmul.attention_backward.value == 1.0
    forward, backward = (profile.attention_seconds(1e9, "fp32", backward=b) for b in (False, True))
    assert forward == pytest.approx(backward / matmul.attention.value)
    assert profile.compute.function_seconds(7 * 10**8) == pytest.approx(1.0)
    assert profile.memory_seconds(9e9) == pytest.approx(1.0)


def test_a_cliff_is_the_drives_bucket() -> None:
    run = CalibrationRun(pace=QUICK, seconds=1.0, cliff=Cliff(4e11, 0.7e9))
    profile = profile_of(FACTS, readings(HOST), run)

    assert lint(calibrate.dump(profile)) == []
    assert profile.write_seconds(0.7e9, 4e11) == pytest.approx(1.0)


def test_a_machine_whose_ram_could_not_be_measured_is_an_error_that_says_why() -> None:
    with pytest.raises(ConfigError, match="no room"):
        profile_of(FACTS, Readings((), ("RAM: no room",)), CalibrationRun(pace=QUICK, seconds=1.0))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1e6, 1e12), min_size=1, max_size=8))
def test_any_rates_make_a_curve_that_the_linter_takes(rates: list[float]) -> None:
    sized = [Samples("link.h2d", (4**i * KIB,), (rate,) * 3) for i, rate in enumerate(rates)]

    rows = size_curve(sized).rows

    assert list(curve_problems(rows)) == []
    assert len(rows) == len(rates)


def test_a_card_joined_by_c2c_has_no_pcie_link_and_a_virtual_one_does_not_say() -> None:
    assert facts.link_type("NVIDIA GH200 480GB", "pcie5x16") == "c2c"
    assert facts.link_type("NVIDIA H200", "pcie5x16") == "pcie5x16"
    assert facts.link_type("GRID A100", "pcieunknown") == "unknown"
    assert facts.link_type("NVIDIA H200", "") == "unknown"


def test_instruction_sets_are_those_that_the_processor_lists(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nflags\t\t: fpu sse2 avx2 amx_tile\n\nflags : avx512f\n")

    assert facts.instruction_sets(path) == ("avx2", "amx_tile")
    assert facts.instruction_sets(tmp_path / "missing") == ()


def test_a_host_name_becomes_a_file_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, stem in (("Node_7.local/../x", "node-7-local-x"), ("", "machine")):
        monkeypatch.setattr(platform, "node", lambda name=name: name)
        assert calibrate.host_name() == stem


# -- probes, on a clock of their own -------------------------------------------------------------


class Clock:
    """A clock that work moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pace = 1.0

    def __call__(self) -> float:
        return self.now

    def work(self, seconds: float) -> Callable[[], None]:
        def call() -> None:
            self.now += seconds * self.pace

        return call


def clocked(clock: Clock, pace: Pace = TINY) -> Rig:
    return Rig(CpuDevice(), pace, clock=clock, cores=2, limit_bytes=2**30)


def test_a_sample_repeats_short_work_until_it_is_long_enough() -> None:
    clock = Clock()
    rig = clocked(clock, dataclasses.replace(TINY, sample_seconds=1.0))
    sample = rig.per_second(clock.work(0.01), amount=5)

    began = clock.now
    assert sample() == pytest.approx(500)
    assert clock.now - began == pytest.approx(1.0, rel=0.02)


def test_one_slow_call_does_not_make_matmuls_small_or_samples_short() -> None:
    clock, calls = Clock(), iter(range(10**6))

    def call() -> None:
        clock.now += 10.0 if next(calls) == 1 else 0.001

    rig = clocked(clock, dataclasses.replace(TINY, sample_seconds=1.0))

    assert rig.repeats(call) == pytest.approx(1000, abs=1)


def test_a_slowdown_is_the_time_beside_over_the_time_alone() -> None:
    clock = Clock()

    @contextmanager
    def beside(seconds: float) -> Iterator[None]:
        clock.pace = 1.25
        yield
        clock.pace = 1.0

    assert probes.slowdown(clocked(clock), clock.work(0.1), beside) == pytest.approx(1.25)


@pytest.mark.parametrize(("rate", "side"), [(1e16, 8192), (1e15, 4096), (2e10, 128), (1e6, 32)])
def test_the_largest_matmul_takes_what_the_pace_allows(
    monkeypatch: pytest.MonkeyPatch, rate: float, side: int
) -> None:
    clock = Clock()
    monkeypatch.setattr(
        probes, "matmul", lambda device, kind, m, n, k: clock.work(2 * m * n * k / rate)
    )

    assert probes.largest_side(clocked(clock), torch.float32) == side


def test_waiting_for_threads_does_not_make_matmuls_small(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(
        probes, "matmul", lambda device, kind, m, n, k: clock.work(0.01 + 2 * m * n * k / 2e11)
    )

    assert probes.largest_side(clocked(clock), torch.float32) >= 512


def test_a_grid_is_every_combination_of_its_sides() -> None:
    assert len(probes.shapes(1024, (16, 4, 1))) == 27
    assert probes.shapes(32, (2, 1))[0] == (16, 16, 16)
    assert probes.shapes(1, (8, 1)) == [(1, 1, 1)]


def test_threads_are_powers_of_two_and_all_of_them() -> None:
    assert probes.thread_counts(1) == [1]
    assert probes.thread_counts(2) == [1, 2]
    assert probes.thread_counts(12) == [1, 2, 4, 8, 12]


def test_copies_of_a_sample_lie_side_by_side_and_a_large_one_is_done_twice() -> None:
    ends = probes.Ends(torch.zeros(1024, dtype=torch.uint8), torch.ones(1024, dtype=torch.uint8))

    small, large = ends.moves(Lane.H2D, 256), ends.moves(Lane.D2H, 1024)
    assert [move.dst.data_ptr() - ends.here.data_ptr() for move in small] == [0, 256, 512, 768]
    assert [move.src.data_ptr() - ends.here.data_ptr() for move in large] == [0, 0]


@pytest.mark.parametrize("name", ["cpu", "cpu:sim"])
def test_a_lane_moves_what_it_is_timed_with(name: str) -> None:
    device = open_device(name)
    up = probes.Ends(device.arena(4096).block, device.slab(4096).block)
    down = probes.Ends(device.arena(4096).block, device.slab(4096).block)
    up.below.fill_(7)
    down.here.fill_(9)

    seconds = device.lane_seconds(Lane.H2D, up.moves(Lane.H2D, 1024), down.moves(Lane.D2H, 1024))

    assert seconds > 0
    assert up.here.eq(7).all() and down.below.eq(9).all()


def test_the_link_is_measured_by_size_against_the_other_lane_and_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig(open_device("cpu:sim"), TINY)
    keys = [(probe.key, probe.at) for probe in probes.link(rig) if probe.sample() > 0]

    sizes = (LATENCY_BYTES, *TINY.copy_bytes)
    assert keys == [
        *(("link.h2d", (size,)) for size in sizes),
        ("link.duplex.h2d", ()),
        *(("link.d2h", (size,)) for size in sizes),
        ("link.duplex.d2h", ()),
    ]


def test_work_in_another_thread_goes_on_until_it_is_told_to_stop() -> None:
    done: list[int] = []
    with probes.looping(lambda: done.append(1), 0.0):
        while not done:
            pass
    count = len(done)

    assert count > 0
    assert len(done) == count


class MostlyTaken(UncountedMemory):
    def free_bytes(self) -> int:
        return 2**28


class Accelerated(CpuDevice):
    """A processor that says it is an accelerator."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = MostlyTaken(2**30)

    def facts(self) -> Accelerator:
        return Accelerator("NVIDIA H200", "sm_90", 132, 2**30)


def test_a_device_of_its_own_is_measured_with_its_memory_and_what_copies_slow() -> None:
    rig = Rig(Accelerated(), TINY, cores=1, limit_bytes=2**28)
    found = take_readings(
        rig,
        {"memory": probes.device_memory, "overlap": probes.overlaps},
        calibrate.silent,
    )

    assert found.notes == ()
    assert [measured.key for measured in found.found] == [
        "gpu.copy",
        "gpu.triad",
        "overlap.gemm_under_h2d",
        "overlap.gemm_under_d2h",
        "overlap.update_under_dma",
    ]
    assert all(sample > 0 for measured in found.found for sample in measured.samples)


def test_calls_in_turn_have_memory_of_their_own_and_hold_what_they_made() -> None:
    made: list[torch.Tensor] = []

    def make() -> Callable[[], object]:
        mine = torch.zeros(2**16)
        made.append(mine)
        return lambda: mine

    call = probes.in_turn(make, 2**24)
    for _ in range(9):
        call()

    assert len(made) == probes.COLD_BYTES // 2**24
    assert len({tensor.data_ptr() for tensor in made}) == len(made)


@pytest.mark.parametrize("sides", [(3, 5, 7)])
def test_a_matmul_is_timed_in_each_layout_that_training_has(sides: tuple[int, int, int]) -> None:
    seen: list[tuple[bool, bool]] = []

    class Layouts(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten.mm.default:
                seen.append((args[0].is_contiguous(), args[1].is_contiguous()))
            return func(*args, **(kwargs or {}))

    with Layouts():
        probes.matmul_of_each_layout(open_device("cpu"), torch.float32, *sides)()

    assert seen == [(True, False), (True, True), (False, True)]


@pytest.mark.parametrize(
    ("rates", "found"),
    [
        ([6.0] * 8, None),
        ([6.0, 6.1, 5.9, 1.4, 1.5, 1.4, 1.3], Cliff(3.0, 1.4)),
        ([6.0, 2.0, 6.0, 6.0], None),  # a hiccup
        ([6.0, 6.0, 6.0, 1.0], Cliff(3.0, 1.0)),
        ([], None),
    ],
)
def test_a_cliff_is_where_a_drive_falls_and_stays(rates: list[float], found: Cliff | None) -> None:
    assert cliff(rates, 1) == found


def test_burning_in_writes_what_was_asked_for_and_leaves_nothing(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = iter([6e9] * 6 + [1e9] * 6)
    sizes: list[int] = []

    def raw(file: object, use: object, n_threads: int, n_bytes: int) -> float:
        sizes.append(n_bytes)
        return next(rates)

    monkeypatch.setattr(drive, "raw", raw)

    window = drive.SIZE
    assert drive.burn_in(disk, 12 * window, window_bytes=window) == Cliff(6 * window, 1e9)
    assert sizes == [window] * 12
    assert list(disk.iterdir()) == []


def test_a_burn_in_that_fails_or_finds_nothing_is_noted(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, n_bytes: int) -> None:
        raise DiskFull("no room")

    options = CalibrateOptions(burn_in_bytes=8 * MIB)
    assert calibrate.find_cliff(CalibrateOptions(), disk, calibrate.silent) == (None, ())
    found, (note,) = calibrate.find_cliff(options, disk, calibrate.silent)
    assert found is None and "8 MiB were written" in note
    monkeypatch.setattr(calibrate, "burn_in", full)
    assert calibrate.find_cliff(options, disk, calibrate.silent) == (None, ("burn-in: no room",))


# -- the run -------------------------------------------------------------------------------------


def test_a_tiny_real_run_writes_a_profile_without_a_problem(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "mount_of", lambda path: Mount("ext4"))  # whatever it is here
    path = disk / "profiles" / "box.toml"
    threads = torch.get_num_threads()
    options = CalibrateOptions(pace=TINY, device="cpu", output=path, nvme=disk)

    result = calibrate.calibrate(options)

    profile = load(path)
    assert result.problems == () == result.profile.quality.notes
    assert lint(path.read_text()) == []
    assert profile == result.profile
    assert profile.link is not None and profile.nvme is not None
    assert profile.host.matmul is not None
    assert all(profile.host.matmul.grid(dtype) for dtype in ("fp32", "bf16", "fp16"))
    assert profile.host.matmul.attention is not None
    assert profile.host.matmul.attention_backward is not None
    assert profile.host.elementwise is not None and profile.host.functions_per_second is not None
    assert profile.nvme.read_latency_seconds is not None
    assert profile.overlap.gemm_under_update is not None
    assert profile.update_seconds(10**9, 26 * 10**9) > 0
    assert torch.get_num_threads() == threads
    assert [entry.name for entry in disk.iterdir()] == ["profiles"]


def test_a_reference_is_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "rtx4090.toml"
    text = calibrate.dump(find("rtx4090"))
    path.write_text(text)

    with pytest.raises(ConfigError, match="is a reference profile"):
        calibrate.calibrate(CalibrateOptions(pace=TINY, output=path))
    assert path.read_text() == text


def test_an_output_that_cannot_be_written_fails_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "take_readings", None)
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match="output") as caught:
        calibrate.calibrate(CalibrateOptions(pace=TINY, output=tmp_path / "file" / "x.toml"))
    assert "--output" in caught.value.advice


def test_a_path_that_was_only_tried_is_not_left_behind(tmp_path: Path) -> None:
    assert calibrate.writable(tmp_path / "new.toml") == tmp_path / "new.toml"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["tmpfs", "nfs4", "overlay", "fuse.sshfs"])
def test_a_drive_that_is_none_is_refused_when_asked_for_and_noted_otherwise(
    disk: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(calibrate, "mount_of", lambda path: Mount(kind))

    with pytest.raises(ConfigError, match=f"is on {kind}"):
        calibrate.drive_folder(CalibrateOptions(nvme=disk))
    folder, (note,) = calibrate.drive_folder(CalibrateOptions())
    assert folder is None
    assert kind in note and "--nvme" in note


def test_a_drive_folder_that_is_missing_is_refused(disk: Path) -> None:
    with pytest.raises(ConfigError, match="is no directory"):
        calibrate.drive_folder(CalibrateOptions(nvme=disk / "missing"))


# -- the command ---------------------------------------------------------------------------------


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the command measure the RAM and the update alone, in no time."""
    monkeypatch.setattr(probes, "QUICK", TINY)
    kept = ("RAM", "matmuls", "launches", "updates")
    monkeypatch.setattr(calibrate, "GROUPS", {name: calibrate.GROUPS[name] for name in kept})


def call(*words: str) -> click.testing.Result:
    return CliRunner().invoke(main, ["calibrate", *words])


def test_the_command_writes_under_the_machines_name_and_prints_one_json_line(
    few: None, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(disk)
    result = call("--device", "cpu", "--json")

    (line,) = result.stdout.splitlines()
    data = json.loads(line)
    assert result.exit_code == 0
    assert data["path"] == f"profiles/{calibrate.host_name()}.toml"
    assert load(disk / data["path"]).name == data["name"]
    assert data["problems"] == []
    figures = {figure["key"]: figure for figure in data["figures"]}
    assert figures["host.dram_GBps"]["value"] > 0
    assert figures["host.dram_GBps"]["source"] == "run"
    assert "measuring: RAM" in result.stderr


def test_the_command_shows_a_table_for_people(
    few: None, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(disk)
    result = call("--device", "cpu", "--output", "mine.toml")

    assert result.exit_code == 0
    for word in ("host.dram_GBps", "host.threads.adam_Gparam_s 1", "spread", "mine.toml"):
        assert word in result.stdout
    assert re.search(r"measured +[\d.]+ GiB of RAM; RAM [\d.]+ GB/s", result.stdout)
    assert result.stdout.rstrip().endswith("hetero plan MODEL --profile mine.toml")


def test_what_varies_is_marked_in_the_table() -> None:
    profile = made(FACTS, HOST, spread=0.2)
    console = Console(record=True, width=100)

    show.calibration(console, calibrate.Calibration(path="x", profile=profile, problems=()))

    text = console.export_text()
    assert "varies" in text
    assert "vary by more than 5 %" in text


def test_lint_says_what_is_wrong_and_ends_with_one(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
    good.write_text(calibrate.dump(find("rtx4090")))
    bad.write_text(good.read_text().replace("v = 165.2", "v = 330"))

    assert call("--lint", str(good)).exit_code == 0
    result = call("--lint", str(good), str(bad), str(tmp_path / "missing"))
    assert result.exit_code == 1
    assert f"{good}: good" in result.stdout
    assert f"{bad}: gpu.tflops.bf16: 330 is a sparse" in result.stdout
    assert "missing: No such file" in result.stdout
    data = json.loads(call("--lint", str(bad), "--json").stdout)
    assert len(data[str(bad)]) == 2


@pytest.mark.parametrize("words", [["--lint"], ["a.toml"]])
def test_files_and_lint_go_together(words: list[str]) -> None:
    result = call(*words)

    assert result.exit_code == 2
    assert "--lint takes FILES" in result.stderr


def test_a_burn_in_size_that_is_none_is_refused(few: None) -> None:
    result = call("--nvme-burnin", "much")

    assert result.exit_code == 2
    assert "--nvme-burnin much is not a size" in result.stderr
