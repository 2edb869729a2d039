"""States that appear where their homes are, on HBM or in RAM, as optimizers and steps change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hetero
from hetero.api import prepare_tuned
from hetero.config import Config
from hetero.device import SimDevice
from hetero.train.engine.tuning import Tuning
from hetero.types import Tier
from tests.equivalence.blocks import DTYPES, SOME, UNIT, WIDTH, Blocks, Run, pair, sim_run


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_states_of_homes_that_go_up_are_never_in_ram(precision: str) -> None:
    run = pair(SOME, lambda run: run.step(0, clip=1.0), precision=precision)
    without = sim_run(SOME, homes_on_hbm=False, precision=precision)
    without.step(0)
    peak, usual = (r.engine.setup.ledger.peak(Tier.HOST) for r in (run, without))

    assert run.on_hbm and peak <= usual - len(run.on_hbm) * 2 * 4 * UNIT


def test_states_that_were_not_sized_are_made_in_ram_first() -> None:
    """Settings that changed since `prepare` ask for more of them: there may be no room."""

    def train(run: Run) -> None:
        run.optimizer.param_groups[0].update(amsgrad=True)
        for number in range(4):
            run.step(number)

    run = pair(SOME, train, precision="bf16")
    assert run.most


def test_a_schedule_that_begins_at_nothing_lets_homes_go_up() -> None:
    run = sim_run(SOME, precision="bf16")
    without = sim_run(SOME, homes_on_hbm=False, precision="bf16")
    for each in (run, without):
        each.optimizer.param_groups[0]["lr"] = 0.0
        each.step(0)
    peak, usual = (r.engine.setup.ledger.peak(Tier.HOST) for r in (run, without))

    assert run.on_hbm and peak < usual and run.bits() == without.bits()


class WithMomentum:
    """Blocks that SGD trains with momentum, in fp16 or another precision."""

    def __init__(self, homes_on_hbm: bool, share: float, precision: str, momentum: float) -> None:
        torch.manual_seed(5)
        blocks = Blocks()
        sgd = torch.optim.SGD(blocks.parameters(), lr=0.01, momentum=momentum)
        device = SimDevice(seed=1, checked=True)
        settings = {"precision": precision, "activations": "keep", "chunk_bytes": 4096}
        config = Config.load(device=device, hbm=int(share * SOME), **settings)
        self.model, self.optimizer = prepare_tuned(
            blocks, sgd, config, Tuning(homes_on_hbm=homes_on_hbm)
        )
        self.dtype = DTYPES[precision]

    def step(self, number: int, rows: int = 2, *, scale: float = 1.0) -> None:
        x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(number))
        hetero.backward(scale * self.model(x.to(self.dtype)).float().square().sum())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def has_weights_of(self, other: WithMomentum) -> bool:
        found, expected = self.model.state_dict(), other.model.state_dict()
        return all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("share", [0.9, 1.0, 1.1])
def test_states_that_begin_after_a_skipped_step_find_room_next_to_sums(share: float) -> None:
    """Homes that make room for sums have left when the second step makes states."""
    there, home = (WithMomentum(up, share, "fp16", 0.9) for up in (True, False))
    for run in (there, home):
        for number in range(4):
            run.step(number, 2 if number else 30)  # the first one overflows
    assert there.has_weights_of(home)


@pytest.mark.campaign(seconds=1)
@pytest.mark.parametrize("share", [0.8, 1.0, 1.2])
@pytest.mark.parametrize("precision", DTYPES)
def test_states_that_begin_once_homes_are_on_hbm_find_room(precision: str, share: float) -> None:
    """A schedule of momentum begins at none: HBM was divided without it. Where gradients are
    scaled, the first step that asks for it overflows."""
    there, home = (WithMomentum(up, share, precision, 0.0) for up in (True, False))
    for run in (there, home):
        for number in range(10):
            run.optimizer.param_groups[0]["momentum"] = 0.1 * max(0, number - 3)
            run.step(number, scale=float("inf") if precision == "fp16" and number == 4 else 1.0)
        assert run.optimizer.state_dict()["state"]
    assert there.has_weights_of(home)


@pytest.mark.parametrize("where", ["HBM", "disk"])
def test_a_state_and_views_of_it_are_written_in_turn(where: str, tmp_path: Path) -> None:
    """Where no tensor shows it: what one of them wrote is what the other reads and writes."""

    def train(run: Run) -> None:
        for number in range(3):
            run.step(number)
        for param in list(run.model.parameters())[::3]:
            state = run.optimizer.state[param]["exp_avg"]
            view, rows = state.view(-1), state[1:]
            view.mul_(2.0)
            state.mul_(3.0)
            rows.add_(1.0)
            assert torch.equal(state.clone(), view.view_as(state))
            run.optimizer.state[param]["exp_avg"].sub_(0.5)
            assert torch.equal(state[1:], rows) and torch.equal(rows, view.view_as(state)[1:])
            view[:5] = 0.25
            assert float(state.flatten()[:5].sum()) == 1.25
        run.step(3)

    disk: Any = {"nvme": tmp_path, "host": 450_000} if where == "disk" else {}
    ours = sim_run(SOME, units=24, **disk)
    plain = sim_run(SOME, homes_on_hbm=False, units=24)
    for run in (ours, plain):
        train(run)
    assert ours.bits() == plain.bits()
    assert ours.on_hbm and bool(ours.engine.setup.store.places.on_disk) == (where == "disk")
