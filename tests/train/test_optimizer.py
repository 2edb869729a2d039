"""The optimizer that users hold: what it costs to read, and what it admits."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from hetero.api import engine_of
from tests.campaigns.harness import Case, Net, Side, check, loss_of_tokens
from tests.campaigns.optimizers import AdamP, MeetsLate, Slow
from tests.equivalence.harness import same, stay_paged, values


def test_a_rule_whose_parameters_meet_after_many_steps_is_refused_before_they_do() -> None:
    plain = linears(4)
    model, optimizer = copy.deepcopy(plain), MeetsLate(plain.parameters())
    model, ours = hetero.prepare(model, MeetsLate(model.parameters()), device="cpu", hbm=20_000)
    stay_paged(engine_of(model))
    steps = 0
    with pytest.raises(hetero.ConfigError, match="other numbers among others than alone"):
        for _ in range(30):
            for m in (model, plain):
                m(torch.ones(1, 4)).square().sum().backward()
            ours.step()
            optimizer.step()
            for o in (ours, optimizer):
                o.zero_grad()
            steps += 1
    assert 10 <= steps < 20
    same(values(model), values(plain), "what was stepped before")


ON_DISK: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-2),
    "AdamW_fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "AdamP": AdamP,
    "Slow": Slow,
}


@pytest.mark.parametrize("name", ON_DISK)
def test_gradients_on_disk_show_what_a_clip_and_a_step_made_of_them(name: str, disk: Path) -> None:
    def program(side: Side) -> None:
        net = Net(4, d=64)
        model, optimizer = side.prepare(net, ON_DISK[name](net.parameters()))
        for number in range(5):
            loss_of_tokens(model, number).backward()
            side.record("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
            side.record_all(f"step {number}", model, optimizer)
            optimizer.zero_grad()

    host = 1_000_000 if name == "AdamW" else 1_400_000
    sizes = {"hbm": 400_000, "host": host, "chunk_bytes": 4096}
    side = check(Case(program, {**sizes, "activations": "keep", "nvme": str(disk)}))
    assert hetero.status(side.models[0]).written_bytes > 0


def linears(n: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(n)))


def prepared(n_params: int) -> tuple[Any, Any]:
    """Return a paged model of so many parameters, a few in each unit, after one step."""
    model = linears(n_params // 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = hetero.prepare(
        model, optimizer, device="cpu", hbm=100_000, chunk_bytes=64, activations="keep"
    )
    stay_paged(engine_of(model))
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def calls_of(act: Callable[[], object]) -> int:
    """Return how many functions of Python are called."""
    count = 0

    def note(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(before)
    return count


def read_states(model: Any, optimizer: Any) -> None:
    for param in model.parameters():
        assert optimizer.state[param]["exp_avg"].shape == param.shape


def load_states(model: Any, optimizer: Any) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("act", [read_states, load_states])
def test_what_a_parameters_state_costs_does_not_grow_with_the_model(
    act: Callable[[Any, Any], None],
) -> None:
    each = []
    for n_params in (20, 200):
        pair = prepared(n_params)
        each.append(calls_of(lambda pair=pair: act(*pair)) / n_params)
    assert each[1] < 1.2 * each[0]  # the walk over all of them is made once


def test_states_that_were_read_are_waited_for_again_after_the_next_step() -> None:
    model, optimizer = prepared(20)
    for number in range(2, 5):
        read_states(model, optimizer)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        assert {float(state["step"]) for state in optimizer.state.values()} == {number}
        assert not engine_of(model).steps.stepper._jobs
