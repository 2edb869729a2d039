"""Updates of homes on HOST that pass through an emulated device: the CPU's bits, and in order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import hetero
from hetero.api import engine_of, prepare_tuned
from hetero.config import Config
from hetero.device import CudaDevice
from hetero.jobs import Worker
from hetero.train.engine.paged import Paged
from hetero.train.engine.tuning import Tuning
from hetero.train.update.device_kernel import DeviceLibrary
from hetero.types import Lane, Tier
from tests.emulator import fake
from tests.emulator.stalls import ALWAYS, CARRIED, CLIPPING, unexpected
from tests.emulator.test_hbm_homes import (
    a_larger_batch,
    reads_between_steps,
    run_on,
    six_steps,
    sums,
    without_digests,
)
from tests.emulator.test_kernels import kernels
from tests.equivalence.blocks import (
    SOME,
    UNIT,
    UNITS,
    WIDTH,
    Blocks,
    Run,
    check_save_under_way,
)
from tests.nvrtc import host

__all__ = ["kernels", "without_digests"]  # fixtures
SLICE = 14 * UNIT  # bytes that a unit's update reads: weights, low halves, gradients, two states


def passed_bytes(run: Run, lane: Lane) -> int:
    """Return the bytes of the last step's updates on a lane."""
    return engine_of(run.model).setup.stats.n_bytes[lane]


@pytest.mark.campaign(seconds=4)
@pytest.mark.parametrize(
    "train", [six_steps, sums, a_larger_batch, reads_between_steps], ids=lambda f: f.__name__
)
def test_updates_through_hbm_have_the_bits_of_updates_at_home(
    train: Callable[[Run], None], kernels: DeviceLibrary, watched: None
) -> None:
    through = run_on(None, passing=1.0, worker=Worker(0))
    down = run_on(False)
    for run in (through, down):
        train(run)

    assert through.bits() == down.bits()
    assert any(call.startswith("cuLaunchKernel adam_") for call in host.calls())


def test_the_first_step_of_a_real_device_is_no_measure_of_its_updates(watched: None) -> None:
    """Pages of states are touched for the first time; a model whose time is modelled has none."""
    run, paces = run_on(False), []
    for number in range(3):
        run.step(number)
        residence = run.engine.residence
        assert isinstance(residence, Paged) and residence.trained.stepper is not None
        residence.trained.stepper.finish()
        paces.append(residence.trained.stepper.pace.seconds_per_numel)
    assert paces[0] is None and all(paces[1:])


def hesitate() -> None:
    """Let carriers come first, on threads of any machine."""
    if not threading.current_thread().name.startswith("hetero-carry"):
        time.sleep(0.005)


def test_carriers_and_the_threads_of_host_share_an_update(
    kernels: DeviceLibrary, watched: None
) -> None:
    shared, down = run_on(False, passing=0.5, pause=hesitate), run_on(False)
    for run in (shared, down):
        six_steps(run)
    assert shared.bits() == down.bits()
    assert passed_bytes(shared, Lane.H2D) > passed_bytes(down, Lane.H2D)


def test_all_of_an_update_crosses_the_link_once_each_way(watched: None) -> None:
    through, down = run_on(False, passing=1.0, worker=Worker(0)), run_on(False)
    for run in (through, down):
        six_steps(run)
    more = {lane: passed_bytes(through, lane) - passed_bytes(down, lane) for lane in Lane}
    assert more[Lane.H2D] == UNITS * SLICE
    assert more[Lane.D2H] == UNITS * (SLICE - 2 * UNIT)  # gradients stay as they are


def test_only_carriers_wait_for_what_they_carry(watched: None) -> None:
    run = run_on(False, passing=0.5)
    for number in range(12):
        fake.forget_stalls()
        run.step(number, clip=1.0)
    found = unexpected(fake.stalls(), ALWAYS | CLIPPING | {CARRIED})
    assert {stall.where for stall in found} <= {"outside of hetero"}  # the program's own batch


def test_states_that_may_not_be_page_locked_are_updated_at_home(watched: None) -> None:
    few = run_on(False, passing=1.0, pinned="64KiB")
    down = run_on(False)
    for run in (few, down):
        six_steps(run)
    device = engine_of(few.model).setup.device
    assert isinstance(device, CudaDevice) and device.locked_bytes() <= 2**16
    assert few.bits() == down.bits()


def test_a_save_reads_states_while_updates_pass(tmp_path: Path, watched: None) -> None:
    run = run_on(False, passing=0.5)
    six_steps(run)
    check_save_under_way(run, run_on(False), tmp_path)


def test_release_gives_back_slots_and_pages(watched: None) -> None:
    run = run_on(False, passing=1.0)
    six_steps(run)
    setup = engine_of(run.model).setup
    assert setup.device.locked_bytes() and setup.ledger.used(Tier.HBM)
    hetero.release(run.model, run.optimizer)
    assert setup.device.locked_bytes() == 0


def rises(run: Run) -> None:
    """Homes come down for a large batch, while updates pass, and go up again."""
    for number in range(9):
        run.step(number, rows=90 if number in (2, 3) else 2, parts=2 if number > 6 else 1)


def test_homes_of_which_a_part_may_pass_are_copied_whole(watched: None) -> None:
    """CUDA refuses to copy memory of which a part is page-locked, and anyone may ask for a copy."""
    shared, down = run_on(None, passing=0.5), run_on(False)
    for run in (shared, down):
        rises(run)
        run.backward(90)
        run.backward(91)
        for param in run.model.parameters():
            assert param.grad is not None
            for each in (param.grad, *run.optimizer.state[param].values()):
                assert torch.equal(each.to(fake.PLACE).cpu(), each.cpu())
        run.optimizer.step()
    assert shared.most
    assert shared.bits() == down.bits()


def weights_and_states(passing: float | None) -> list[torch.Tensor]:
    """Train a model that came from the device, and return what `release` brings back there."""
    torch.manual_seed(5)
    model = fake.on_device(Blocks())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = Config.load(device=fake.device(), hbm=SOME, chunk_bytes=4096, precision="bf16")
    tuning = Tuning(homes_on_hbm=False, passing=passing)
    model, optimizer = prepare_tuned(model, optimizer, config, tuning)
    for number in range(4):
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(number))
        hetero.backward(model(x.to(torch.bfloat16).to(fake.PLACE)).float().square().sum())
        optimizer.step()
        optimizer.zero_grad()
    plain, steps = hetero.release(model, optimizer)
    kept = [v for state in steps.state.values() for v in state.values() if v.dim()]
    assert all(str(each.device) == fake.PLACE for each in kept)
    return [each.cpu() for each in (*plain.parameters(), *kept)]


def test_a_model_that_came_from_the_device_goes_back_after_updates_passed(watched: None) -> None:
    for passed, same in zip(weights_and_states(0.5), weights_and_states(None), strict=True):
        assert torch.equal(passed, same)
