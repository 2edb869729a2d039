"""Time on a dry device: operations, copies, updates and drives take what a profile says."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hetero.config import Config
from hetero.device import SimDevice
from hetero.dry import DryDevice
from hetero.jobs import Portable
from hetero.memory.codec import NF4
from hetero.plan.figures import Figure
from hetero.plan.hardware import find
from hetero.plan.rates import attention_flops
from hetero.rehearse.clock import OpClock, touched_bytes
from hetero.rehearse.disk import DryDisk
from hetero.rehearse.kernels import AsOn
from hetero.rehearse.stand_in import touched_by_update
from hetero.rehearse.worker import DryWorker
from hetero.train.engine.blueprint import draw
from hetero.types import Lane

PROFILE = find("rtx4090")
GPU = PROFILE.gpu
assert GPU is not None


def device(rate: float = 1e9) -> DryDevice:
    return DryDevice(is_cuda=True, ram_bytes=2**30, copy_seconds=lambda lane, n, both: n / rate)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def took(clock: DryDevice, call: object, *args: torch.Tensor) -> float:
    before = clock.clock()
    with OpClock(clock, PROFILE):
        call(*args)
    return clock.clock() - before


# -- operations ----------------------------------------------------------------------------------


def test_a_large_product_takes_what_its_multiplications_take() -> None:
    seconds = took(device(), torch.mm, empty(4096, 2048), empty(2048, 1024))
    products = PROFILE.matmul_seconds(4096, 1024, 2048, "fp32")

    assert seconds == pytest.approx(products + GPU.launch_seconds())


def test_a_product_of_a_batch_is_as_many_products() -> None:
    one = took(device(), torch.mm, empty(512, 512), empty(512, 512))
    many = took(device(), torch.bmm, empty(8, 512, 512), empty(8, 512, 512))

    assert many - GPU.launch_seconds() == pytest.approx(8 * (one - GPU.launch_seconds()))


def test_an_elementwise_operation_takes_what_its_bytes_take() -> None:
    seconds = took(device(), torch.add, empty(2**24), empty(2**24))

    assert seconds == pytest.approx(PROFILE.memory_seconds(3 * 2**26) + GPU.launch_seconds())


def test_what_is_decoded_takes_what_its_bytes_take() -> None:
    clock = DryDevice(
        ram_bytes=2**30, copy_seconds=lambda *_: 0.0, touch_seconds=PROFILE.memory_seconds
    )
    clock.touched(NF4.touched_bytes(2**24, torch.bfloat16))

    assert NF4.touched_bytes(2**24, torch.bfloat16) == int(14.53125 * 2**24)
    assert clock.clock() == pytest.approx(PROFILE.memory_seconds(int(14.53125 * 2**24)))


def test_views_take_no_time() -> None:
    for view in (lambda x: x.t(), lambda x: x.view(-1), lambda x: x[0], lambda x: x.detach()):
        assert took(device(), view, empty(64, 64)) == 0


def test_what_is_expanded_is_read_once() -> None:
    assert touched_bytes(empty(1, 64).expand(1000, 64)) == 256
    assert touched_bytes(empty(1000, 64)) == 256_000


def test_operations_on_the_host_take_no_time_of_the_device() -> None:
    assert took(device(), torch.add, torch.ones(8), torch.ones(8)) == 0


def test_a_causal_attention_computes_half_the_scores() -> None:
    sizes = 2, 4, 64, 64, 2 * 32
    whole = attention_flops(*sizes, causal=False, backward=False)

    assert whole == 4 * 2 * 4 * 64 * 64 * 32
    assert attention_flops(*sizes, causal=True, backward=False) == whole / 2
    assert attention_flops(*sizes, causal=False, backward=True) == 2.5 * whole


def test_attention_and_convolution_are_counted() -> None:
    heads = empty(2, 16, 1024, 64, dtype=torch.bfloat16)
    with AsOn(is_cuda=True):
        attention = took(device(), partial(F.scaled_dot_product_attention, heads, heads, heads))
    convolution = took(device(), F.conv2d, empty(8, 64, 56, 56), empty(64, 64, 3, 3))

    assert attention > 2 * GPU.launch_seconds()
    assert convolution > 2 * GPU.launch_seconds()


def test_a_number_that_code_asks_for_is_one_or_true() -> None:
    with OpClock(device(), PROFILE):
        assert empty(1).sum().item() == 1
        assert bool((empty(4) == 0).all())


def test_what_an_operation_makes_is_asked_once_for_each_geometry() -> None:
    asked: Counter[object] = Counter()

    class Below(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            asked[func] += 1
            return func(*args, **(kwargs or {}))

    with Below(), OpClock(device(), PROFILE):
        made = [empty(4, 8) * empty(4, 8) for _ in range(3)] + [empty(2, 8) * empty(2, 8)]
        made.append(empty(4, 8, dtype=torch.bfloat16) * empty(4, 8))

    assert asked[torch.ops.aten.mul.Tensor] == 3
    assert [tuple(tensor.shape) for tensor in made] == [(4, 8)] * 3 + [(2, 8), (4, 8)]
    assert len({tensor.untyped_storage()._cdata for tensor in made}) == len(made)


def test_who_counts_operations_takes_time_for_views_too() -> None:
    costs = replace(PROFILE.host, counted=Figure(1e-3, "run"))
    clock, profile = device(), replace(PROFILE, host=costs)
    x = empty(4, 8)
    with OpClock(clock, profile, counted=True) as counting:
        x.t()
        x.t()

    assert clock.clock() == pytest.approx(2e-3)
    assert counting.operations == 2


def test_an_activation_function_takes_its_arithmetic_where_that_is_longer() -> None:
    host = replace(find("laptop-8c-avx2-ddr5").host, functions_per_second=Figure(1e6, "run"))
    profile = replace(find("laptop-8c-avx2-ddr5"), host=host)
    clock = DryDevice(ram_bytes=2**30, copy_seconds=lambda *_: 0.0)
    with OpClock(clock, profile):
        F.gelu(empty(10**6))

    assert clock.clock() == pytest.approx(1.0, rel=1e-3)


def test_what_an_operation_was_given_is_not_held() -> None:
    with OpClock(device(), PROFILE) as clock:
        given = empty(4, 8)
        dead = weakref.ref(given.untyped_storage())
        torch.empty(0, device="meta").set_(given.untyped_storage())
        given = given + 1

    assert clock.operations and dead() is None  # while the clock is still there


def test_compute_is_slower_beside_a_copy() -> None:
    clock = device(rate=1.0)
    alone = took(clock, torch.add, empty(2**20), empty(2**20))
    clock.copy(Lane.H2D, empty(100, dtype=torch.uint8), empty(100, dtype=torch.uint8))
    slower = took(clock, torch.add, empty(2**20), empty(2**20))
    figure = PROFILE.overlap.gemm_under_h2d
    assert figure is not None

    assert slower == pytest.approx(alone * figure.value)


# -- copies --------------------------------------------------------------------------------------


def piece(n_bytes: int) -> torch.Tensor:
    return empty(n_bytes, dtype=torch.uint8)


def test_copies_of_a_lane_follow_each_other_and_those_of_two_do_not() -> None:
    clock = device(rate=100.0)
    first = clock.copy(Lane.H2D, piece(100), piece(100))
    second = clock.copy(Lane.H2D, piece(100), piece(100))
    down = clock.copy(Lane.D2H, piece(100), piece(100))

    assert (first.end, second.end, down.end) == (1.0, 2.0, 1.0)
    assert not clock.query(first)


def test_a_copy_waits_for_what_it_comes_behind() -> None:
    clock = device(rate=100.0)
    up = clock.copy(Lane.H2D, piece(300), piece(300))
    down = clock.copy(Lane.D2H, piece(100), piece(100), after=(up,))

    assert down.end == 4.0


def test_waiting_takes_until_the_copy_has_landed_and_is_a_stall() -> None:
    clock = device(rate=100.0)
    ticket = clock.copy(Lane.H2D, piece(100), piece(100))
    clock.compute(0.25)

    assert clock.wait(ticket) == (0.25, 1.0)
    assert clock.clock() == 1.0
    assert clock.wait(ticket) is None


def test_stamps_tell_no_time_where_cpu_sim_tells_none() -> None:
    dry = DryDevice(ram_bytes=2**30, copy_seconds=lambda lane, n, both: 0.0, copies_here=True)
    assert seconds_of_compute(SimDevice(), lambda: None) == 0.0
    assert seconds_of_compute(dry, lambda: dry.compute(0.5)) == 0.0
    assert seconds_of_compute(clock := device(), lambda: clock.compute(0.5)) == 0.5


def seconds_of_compute(on: Any, work: Callable[[], None]) -> float:
    began = on.stamp()
    work()
    seconds: float = on.seconds_between(began, on.stamp())
    return seconds


# -- updates -------------------------------------------------------------------------------------


def test_updates_follow_each_other_while_compute_goes_on() -> None:
    clock, done = device(), []
    worker = DryWorker(clock, lambda numel: float(numel))
    first = worker.submit(worker.job([lambda: done.append(1)], 2))
    second = worker.submit(worker.job([lambda: done.append(2)], 3))
    clock.compute(1.0)
    assert not first.done
    clock.compute(1.0)
    assert first.done and not second.done

    second.wait()

    assert done == [1, 2]
    assert clock.clock() == 5.0
    assert (first.began, first.ended, second.began, second.ended) == (0.0, 2.0, 2.0, 5.0)


def test_waiting_for_a_later_update_carries_out_those_before_it() -> None:
    clock, done = device(), []
    worker = DryWorker(clock, lambda numel: float(numel))
    worker.submit(worker.job([lambda: done.append(1)], 2))
    last = worker.submit(worker.job([lambda: done.append(2)], 3))

    last.wait()

    assert done == [1, 2]
    assert clock.clock() == 5.0


def test_an_update_that_nobody_submitted_is_done_by_who_waits() -> None:
    clock, done = device(), []
    worker = DryWorker(clock, lambda numel: float(numel))
    job = worker.job([lambda: done.append(1)], 2)
    clock.compute(10.0)

    job.wait()

    assert done == [1]
    assert clock.clock() == 12.0


def shared_update(clock: DryDevice, **settings: Any) -> tuple[Any, list[str]]:
    """Return an update of 8 parameters, of which 4 may be carried, one by one."""
    done: list[str] = []

    def carried() -> None:
        done.append("carried")
        clock.sync(clock.copy(Lane.H2D, torch.empty(3), torch.empty(3)))

    worker = DryWorker(clock, lambda numel: float(numel), n_carriers=1, **settings)
    slices = [Portable(lambda: done.append("here"), carried, 1)] * 4
    return worker.submit(worker.job([partial(done.append, "whole")], 8, portable=slices)), done


def test_host_and_a_carrier_take_slices_in_turn() -> None:
    clock = device(rate=2.0)
    job, done = shared_update(clock)
    clock.compute(2.0)
    assert done == ["carried", "carried"] and clock.clock() == 2.0

    job.wait()

    assert sorted(done) == ["carried"] * 3 + ["here", "whole"]
    assert (job.began, job.ended, clock.clock()) == (0.0, 5.0, 5.0)


def test_ram_moves_no_more_for_two_than_for_one() -> None:
    clock = device(rate=3.0)
    job, _ = shared_update(clock, ram_seconds=lambda numel: float(numel))
    job.wait()
    assert job.ended == 8.0


def test_an_update_that_nothing_submitted_is_carried_by_nothing() -> None:
    clock = device()
    worker = DryWorker(clock, lambda numel: float(numel), n_carriers=1)
    done: list[str] = []
    slices = [Portable(lambda: done.append("here"), lambda: done.append("carried"), 1)] * 2
    job = worker.job([], 5, portable=slices)
    job.wait()
    assert done == ["here", "here"] and clock.clock() == 5.0


# -- drives --------------------------------------------------------------------------------------


def disk(clock: DryDevice) -> DryDisk:
    return DryDisk(clock, lambda lane, n_bytes, both: n_bytes * (2.0 if both else 1.0))


def test_transfers_of_a_lane_follow_each_other_and_slow_the_other_lane_down() -> None:
    clock, done = device(), []
    drive = disk(clock)
    for lane, name in ((Lane.READ, "a"), (Lane.READ, "b"), (Lane.WRITE, "c")):
        drive.submit(lane, 1, partial(done.append, (name, lane)), lambda: False)

    while drive.wait():
        pass

    assert [name for name, _ in done] == ["a", "b", "c"] or [n for n, _ in done] == ["a", "c", "b"]
    assert clock.clock() >= 2.0


def test_what_is_urgent_is_read_first() -> None:
    clock, done = device(), []
    drive = disk(clock)
    drive.submit(Lane.READ, 1, partial(done.append, "running"), lambda: False)
    drive.submit(Lane.READ, 1, partial(done.append, "ahead"), lambda: False)
    drive.submit(Lane.READ, 1, partial(done.append, "urgent"), lambda: True)

    while drive.wait():
        pass

    assert done == ["running", "urgent", "ahead"]
    assert clock.clock() == 3.0


def test_who_takes_the_lock_finds_done_what_is_done_by_then() -> None:
    clock, done = device(), []
    drive = disk(clock)
    drive.submit(Lane.READ, 1, partial(done.append, "a"), lambda: False)
    clock.compute(0.5)
    with drive:
        assert not done
    clock.compute(0.5)
    with drive:
        assert done == ["a"]


def test_a_job_that_waits_for_a_drive_takes_longer_and_the_device_goes_on() -> None:
    clock, done = device(), []
    drive = disk(clock)
    worker = DryWorker(clock, lambda numel: float(numel), drive)

    def work() -> None:
        drive.submit(Lane.READ, 7, partial(done.append, "read"), lambda: True)
        drive.wait()

    job = worker.submit(worker.job([work], 2))

    assert clock.clock() == 0.0
    assert done == ["read"]
    assert job.ended == 7.0
    assert not job.done


@pytest.mark.parametrize(("precision", "n_bytes"), [("fp32", 28.0), ("bf16", 26.0)])
def test_an_update_of_adamw_touches_what_the_equations_say(precision: str, n_bytes: float) -> None:
    model = torch.nn.Linear(64, 64)
    config = Config.load(precision=precision)
    blueprint = draw(model, torch.optim.AdamW(model.parameters()), config)

    assert touched_by_update(blueprint) == n_bytes
