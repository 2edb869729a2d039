"""Updates of homes on HOST that pass through HBM: the same numbers, whoever carries them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hetero
from hetero.device import SimDevice
from hetero.errors import BudgetError, HeteroError
from hetero.jobs import Worker
from hetero.train.engine.paged import Paged
from hetero.train.update.passage import Passage
from hetero.types import Kind, Lane, Tier
from tests.equivalence.blocks import SOME, UNIT, UNITS, WIDTH, Run, check_save_under_way

SLICES = 14 * UNIT  # bytes that a unit's update reads: weights, low halves, gradients, two states


def sim_run(passing: float | None, *, homes_on_hbm: bool = False, **settings: Any) -> Run:
    settings = {"precision": "bf16", **settings}
    device = SimDevice(seed=1, checked=True)
    return Run(device, SOME, homes_on_hbm=homes_on_hbm, passing=passing, **settings)


def alone(passing: float, **settings: Any) -> Run:
    """Return a run whose only thread carries whatever may pass."""
    return sim_run(passing, worker=Worker(0), **settings)


def passage_of(run: Run) -> Passage:
    residence = run.engine.residence
    assert isinstance(residence, Paged)
    return residence.trained.passage


def six_steps(run: Run) -> None:
    for number in range(6):
        run.step(number, clip=1.0)


def sums(run: Run) -> None:
    for number in range(5):
        run.step(number, parts=1 if number == 2 else 3, clip=0.5)


def reads_between_steps(run: Run) -> None:
    params = list(run.model.parameters())
    for number in range(6):
        run.step(number)
        run.optimizer.state[params[0]]["exp_avg"].mul_(0.5)
        with hetero.gathered(run.model, write=True), torch.no_grad():
            params[3].add_(0.01)


def states_that_are_held(run: Run) -> None:
    run.step(0)
    states = [run.optimizer.state[p]["exp_avg"] for p in run.model.parameters()]
    for number in range(1, 5):
        before = [state.clone() for state in states]
        run.step(number)
        assert not any(map(torch.equal, before, states))


def settings_that_change(run: Run) -> None:
    for number in range(6):
        for group in run.optimizer.param_groups:
            group["lr"] = 0.01 / (1 + number)
        run.step(number)


def a_step_that_scaling_skips(run: Run) -> None:
    for number in range(6):
        run.backward(number, 2)
        if number == 3:
            for param in run.model.parameters():
                param.grad = torch.full_like(param.grad, float("inf"))
        run.optimizer.step()
        run.optimizer.zero_grad()


PROGRAMS = [six_steps, sums, reads_between_steps, states_that_are_held, settings_that_change]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("passing", [0.4, 1.0])
@pytest.mark.campaign(seconds=3)
def test_bits_do_not_depend_on_what_passes(
    program: Callable[[Run], None], precision: str, passing: float
) -> None:
    homes = passing < 1 and precision == "bf16"
    through = alone(passing, precision=precision, homes_on_hbm=homes)
    down = sim_run(None, precision=precision)
    for run in (through, down):
        program(run)
    assert through.bits() == down.bits()
    assert passage_of(through).passed_numel and not passage_of(down).passed_numel


def test_a_step_that_scaling_skips_updates_nothing() -> None:
    through, down = alone(1.0, precision="fp16"), sim_run(None, precision="fp16")
    for run in (through, down):
        a_step_that_scaling_skips(run)
    assert through.bits() == down.bits()


def test_whoever_is_free_takes_a_slice() -> None:
    shared, down = sim_run(1.0, worker=Worker(1, n_carriers=2)), sim_run(None)
    for run in (shared, down):
        six_steps(run)
    assert shared.bits() == down.bits()


def test_what_passes_crosses_the_link_once_each_way() -> None:
    through, down = alone(1.0), sim_run(None)
    for run in (through, down):
        six_steps(run)
    moved = [run.engine.setup.stats.n_bytes for run in (through, down)]
    assert moved[0][Lane.H2D] - moved[1][Lane.H2D] == UNITS * SLICES
    assert moved[0][Lane.D2H] - moved[1][Lane.D2H] == UNITS * (SLICES - 2 * UNIT)


def test_slots_are_charged_to_hbm_as_buffers() -> None:
    run = alone(0.5)
    six_steps(run)
    ledger, passage = run.engine.setup.ledger, passage_of(run)
    assert 0 < passage.n_bytes == ledger.used(Tier.HBM, Kind.BUFFER)
    assert ledger.peak(Tier.HBM) <= SOME


def test_a_status_says_how_much_passed() -> None:
    through, down = alone(1.0), sim_run(None)
    for run in (through, down):
        six_steps(run)
    assert hetero.status(through.model).update_place == "home, 100% through HBM"
    assert hetero.status(down.model).update_place == "home"


def test_slots_give_way_to_a_larger_batch_and_come_back() -> None:
    rows, sizes = SOME // (UNITS * WIDTH * 4), []
    through, down = alone(1.0), sim_run(None)
    for run in (through, down):
        for number in range(24):
            run.step(number, rows if number == 4 else 2)
            sizes.append(passage_of(run).n_bytes)
    assert through.bits() == down.bits()
    assert sizes[3] and not sizes[4] and sizes[23]


def test_a_device_that_refuses_slots_updates_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    through, down = alone(1.0), sim_run(None)
    device = through.engine.setup.device
    real = device.arena

    def arena(n_bytes: int) -> Any:
        if 0 < n_bytes < SOME // 8:
            raise BudgetError("fragmented", advice="none")
        return real(n_bytes)

    monkeypatch.setattr(device, "arena", arena)
    for run in (through, down):
        six_steps(run)
    assert through.bits() == down.bits() and not passage_of(through).n_bytes
    assert through.engine.setup.ledger.used(Tier.HBM, Kind.BUFFER) == 0


def test_an_error_on_the_way_surfaces_as_that_of_an_update_at_home(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = sim_run(1.0, worker=Worker(0, n_carriers=1))
    six_steps(run)
    device = run.engine.setup.device

    def on_side_stream(*given: Any) -> Any:
        raise RuntimeError("the kernel failed")

    monkeypatch.setattr(device, "on_side_stream", on_side_stream)
    monkeypatch.setattr(run.engine.setup.worker, "submit", lambda job: job.help(carries=True))
    with pytest.raises((RuntimeError, HeteroError), match="the kernel failed"):
        run.step(6)
        run.step(7)


def test_a_checkpoint_is_the_same_whatever_passes(tmp_path: Any) -> None:
    run = alone(1.0)
    six_steps(run)
    check_save_under_way(run, sim_run(None), tmp_path)


def test_release_gives_back_weights_states_and_slots() -> None:
    run, plain = alone(1.0), sim_run(None)
    for each in (run, plain):
        six_steps(each)
    for each in (run, plain):
        hetero.release(each.model, each.optimizer)
    for a, b in zip(run.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(a, b)
        left, right = run.optimizer.inner.state[a], plain.optimizer.inner.state[b]
        assert all(torch.equal(left[k], right[k]) for k in right)
