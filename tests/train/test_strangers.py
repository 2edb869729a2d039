"""Tensors on the device that are not the model's own are no activations."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from hetero.config import Config
from hetero.device import CpuDevice, UncountedMemory
from hetero.train.activations.allocator import AllocatorMeter, LiveOutputs
from hetero.train.activations.held import GraphFootprint
from hetero.train.engine.blueprint import draw
from hetero.train.engine.budget import CUDA_SHARE, decide


class CountedMemory(UncountedMemory):
    """An allocator that counts what a test says."""

    def __init__(self) -> None:
        super().__init__(10_000_000)
        self.now = self.peak = 0

    def take(self, n_bytes: int) -> None:
        self.now += n_bytes
        self.peak = max(self.peak, self.now)

    def passes(self, n_bytes: int) -> None:
        self.take(n_bytes)
        self.take(-n_bytes)

    def reset_peak(self) -> None:
        self.peak = self.now

    def allocated_peak(self) -> int:
        return self.peak

    def free_bytes(self) -> int:
        return 10_000_000 - self.now


class Counted(CpuDevice):
    """RAM whose allocator counts what a test says."""

    is_cuda = True
    numbers = itertools.count(1)

    def __init__(self) -> None:
        super().__init__(torch.device("cpu", next(self.numbers)))
        self.memory: CountedMemory = CountedMemory()


def metered(
    device: Counted, *, arena: int = 100, slack: int = 0, trains: bool = True
) -> AllocatorMeter:
    """Return a meter of a model that was just prepared, with so many bytes of frames."""
    device.memory.take(arena)
    meter = AllocatorMeter(
        device,
        GraphFootprint(),
        lambda: arena,
        passing=tuple,
        trains=trains,
        slack_bytes=slack,
    )
    meter.prepared()
    return meter


def step(device: Counted, meter: AllocatorMeter, activations: int = 50) -> int:
    """Make a step with activations; return the bytes that were seen."""
    with meter.watching():
        device.memory.take(activations)
    device.memory.take(-activations)
    seen = meter.seen_bytes()
    meter.restart()
    return seen


def test_a_teacher_that_was_there_before_is_no_activation() -> None:
    device = Counted()
    device.memory.take(4000)
    meter = metered(device)
    assert [step(device, meter) for _ in range(3)] == [50, 50, 50]


def test_a_teacher_that_comes_later_takes_what_a_given_budget_leaves() -> None:
    device = Counted()
    meter = metered(device, slack=3000)
    assert step(device, meter) == 50
    device.memory.take(3000)
    assert step(device, meter) == 50
    device.memory.take(500)  # more than the device has: frames give way
    assert step(device, meter) == 550


def test_a_teacher_that_comes_later_counts_where_the_budget_is_all_of_the_device() -> None:
    device = Counted()
    device.memory.take(4000)
    meter = metered(device)
    device.memory.take(700)
    assert step(device, meter) == 750
    device.memory.take(-700)
    assert [step(device, meter) for _ in range(2)] == [700, 50]  # it was there at the step's begin


def test_activations_count_when_a_teacher_goes() -> None:
    device = Counted()
    device.memory.take(4000)
    meter = metered(device)
    step(device, meter)
    device.memory.take(-4000)
    assert step(device, meter) == 50


def test_what_a_teacher_computes_between_two_steps_counts_where_there_is_no_room() -> None:
    for slack, seen in ((1000, 50), (0, 1000)):
        device = Counted()
        meter = metered(device, slack=slack)
        step(device, meter)
        device.memory.passes(1000)
        assert step(device, meter) == seen


def test_a_cache_that_a_model_without_an_optimizer_leaves_is_its_own() -> None:
    device = Counted()
    device.memory.take(4000)
    meter = metered(device, slack=10_000, trains=False)
    for n_tokens in range(1, 4):
        with meter.watching():
            device.memory.take(30)
        assert meter.seen_bytes() == 30 * n_tokens
        meter.restart()


def test_two_prepared_models_do_not_count_each_other() -> None:
    device = Counted()
    policy = metered(device, arena=500, slack=10_000)
    reference = metered(device, arena=300, slack=10_000, trains=False)
    for _ in range(3):
        with policy.watching():
            device.memory.take(70)
        policy._footprint.hold(1, 70)
        with reference.watching():
            device.memory.passes(40)
        assert reference.seen_bytes() == 40
        reference.restart()
        policy._footprint.drop(1)
        device.memory.take(-70)
        assert policy.seen_bytes() == 70
        policy.restart()


def test_a_peak_outlives_the_measurement_of_another_model() -> None:
    device = Counted()
    first, second = metered(device), metered(device)
    with first.watching():
        device.memory.take(20)
    device.memory.passes(90)  # its loss
    step(device, second)
    device.memory.take(-20)
    assert first.seen_bytes() == 110 + 100  # the other's frames came after `prepare`


def test_outputs_that_are_still_held_are_no_strangers() -> None:
    device = Counted()
    meter = metered(device, slack=10_000)
    held = torch.zeros(25)
    with meter.watching():
        device.memory.take(150)
        meter.made({"logits": held})
    device.memory.take(-50)
    meter.restart()
    assert step(device, meter) == 150


def test_an_output_counts_once_and_until_its_memory_goes() -> None:
    outputs, held = LiveOutputs(), torch.zeros(8)
    outputs.note([held, held[2:]])
    outputs.note(held)
    assert outputs.n_bytes == 32
    view = held[:2]
    del held
    assert outputs.n_bytes == 32
    del view
    assert outputs.n_bytes == 0


def test_parameters_on_the_device_are_part_of_its_free_memory() -> None:
    device = Counted()
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    here = sum(p.nbytes for p in model.parameters())
    device.torch_device = next(model.parameters()).device
    device.memory.take(here + 1_000_000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = Config.load(chunk_bytes=256)
    budget = decide(model, config, device, draw(model, optimizer, config))
    assert budget.hbm == int(CUDA_SHARE * 9_000_000)
    assert budget.slack_bytes == 0
    config = Config.load(chunk_bytes=256, hbm=2_000_000)
    budget = decide(model, config, device, draw(model, optimizer, config))
    assert budget.slack_bytes == int(CUDA_SHARE * 9_000_000) - 2_000_000
