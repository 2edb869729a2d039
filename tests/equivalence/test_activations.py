"""Keeping, computing again and slicing change no number."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import hetero
from hetero.api import engine_of
from hetero.errors import BudgetError, StateError
from hetero.types import Lane
from tests.equivalence.harness import (
    adamw,
    compare,
    grads,
    keep_measuring,
    measure,
    same,
    smallest,
    values,
)
from tests.equivalence.zoo import CASES, Case

D = 16
HBM = 180 * 1024  # less than eight blocks save, more than their inputs take


LEFT = [
    pytest.param(case, policy, id=f"{case.name}-{policy}")
    for case in CASES
    for policy in ("recompute", "offload", "auto")
]


@pytest.mark.campaign(seconds=4)
@pytest.mark.parametrize(("case", "policy"), LEFT)
def test_a_model_trains_bitwise_whatever_is_left_for_backward(case: Case, policy: str) -> None:
    budget = measure(case, adamw, 512)

    seen = smallest(
        case,
        budget,
        lambda hbm: compare(case, adamw, hbm=hbm, chunk_bytes=512, activations=policy),
    )

    assert seen.mode == "paged"


class Block(nn.Module):
    """Saves much for few parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.up = nn.Linear(D, 4 * D)
        self.down = nn.Linear(4 * D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(F.gelu(self.up(self.norm(x))), 0.1)
        return x + self.down(y)


def deep() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(8)))


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> torch.Tensor:
    torch.manual_seed(number)
    loss = model(torch.randn(64, D)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize("device", ["cpu", "cpu:sim"])
def test_what_does_not_fit_is_computed_again_and_no_number_changes(device: str) -> None:
    plain = deep()
    reference = adamw(plain)
    twin = copy.deepcopy(plain)
    model, optimizer = hetero.prepare(twin, adamw(twin), device=device, hbm=HBM, chunk_bytes=1024)

    for number in range(5):
        theirs = step_of(plain, reference, number)
        assert torch.equal(step_of(model, optimizer, number), theirs)
    same(values(plain), values(model), "weights")
    assert engine_of(model).residence.name == "paged"


def test_keep_is_kept_and_says_what_would_be_enough() -> None:
    model = deep()
    model, optimizer = hetero.prepare(
        model, adamw(model), device="cpu", hbm=HBM, chunk_bytes=1024, activations="keep"
    )

    with pytest.raises(BudgetError, match="activations take") as refused:
        step_of(model, optimizer, 0)

    assert refused.value.needed_bytes > HBM


class Counting(nn.Module):
    """A unit whose buffers a second forward would change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(D)
        self.linear = nn.Linear(D, D)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return self.linear(self.norm(x)).tanh()


@pytest.mark.parametrize("hbm", ["512KiB", None])
def test_what_is_computed_again_changes_no_buffer(hbm: str | None) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(Counting() for _ in range(4)))
    reference = adamw(plain)
    twin = copy.deepcopy(plain)
    model, optimizer = hetero.prepare(
        twin, adamw(twin), device="cpu", hbm=hbm, activations="recompute"
    )

    for number in range(3):
        theirs = step_of(plain, reference, number)
        assert torch.equal(step_of(model, optimizer, number), theirs)

    same(values(plain), values(model), "weights and buffers")


def test_a_unit_that_is_computed_again_saves_its_inputs_only() -> None:
    held = {}
    for policy in ("keep", "recompute"):
        model = deep()
        model, _ = hetero.prepare(
            model, adamw(model), device="cpu", hbm="8MiB", chunk_bytes=1024, activations=policy
        )
        loss = model(torch.randn(64, D)).sum()
        held[policy] = engine_of(model).residence.runtime.saved.footprint.live_bytes
        del loss

    assert held["recompute"] < held["keep"] / 4


def test_a_checkpoint_of_the_models_own_is_left_alone() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(4))
            self.runs = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(self.run, block, x, use_reentrant=False)
            return x

        def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
            self.runs += 1
            return block(x)

    model = Own()
    model, optimizer = hetero.prepare(
        model, adamw(model), device="cpu", hbm="8MiB", chunk_bytes=1024, activations="recompute"
    )

    step_of(model, optimizer, 0)

    assert model.runs == 8


class Random(Block):
    """Draws from every generator there is."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(x.shape, generator=self.own) + float(np.random.rand())
        if random.random() < 0.5:
            noise = noise * 2
        return super().forward(x) * noise


def test_what_units_draw_from_any_generator_is_drawn_again() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(Random() for _ in range(6)))
    model = nn.Sequential(*(Random() for _ in range(6)))
    model.load_state_dict(plain.state_dict())
    reference = adamw(plain)
    model, optimizer = hetero.prepare(
        model, adamw(model), device="cpu", hbm=HBM, chunk_bytes=1024, activations="recompute"
    )

    for number in range(4):
        losses = []
        for side, opt in ((plain, reference), (model, optimizer)):
            random.seed(number)
            np.random.seed(number)
            losses.append(step_of(side, opt, number))
            losses.append(torch.tensor([random.random(), np.random.rand()]))
        assert torch.equal(losses[0], losses[2]) and torch.equal(losses[1], losses[3])
    same(values(plain), values(model), "weights")


class Checkpointed(nn.Module):
    """A model that computes its blocks again by itself."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()  # a reentrant checkpoint differentiates only then
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", ["keep", "recompute", "offload"])
@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("hbm", ["256KiB", None])
def test_policies_and_checkpoints_of_the_models_own_change_no_bit(
    hbm: str | None, reentrant: bool | None, policy: str, dtype: torch.dtype
) -> None:
    plain = (deep() if reentrant is None else Checkpointed(reentrant=reentrant)).to(dtype)
    reference = adamw(plain)
    twin = copy.deepcopy(plain)
    hbm = "1MiB" if hbm and policy == "keep" and reentrant is None else hbm
    model, optimizer = hetero.prepare(
        twin, adamw(twin), device="cpu:sim", hbm=hbm, chunk_bytes=512, activations=policy
    )

    for number in range(5):
        losses = []
        for side in (plain, model):
            torch.manual_seed(number)
            loss = side(torch.randn(64, D, dtype=dtype)).square().mean()
            loss.backward()
            losses.append(loss.detach())
        same([p.grad for p in plain.parameters()], grads(model), "gradients")
        for opt in (reference, optimizer):
            opt.step()
            opt.zero_grad()
        assert torch.equal(*losses)

    same(values(plain), values(model), "weights")
    down = engine_of(model).setup.offload.store.link.n_bytes[Lane.D2H]
    assert bool(down) == (policy == "offload")


class Writing(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        return super().forward(x)


def test_a_unit_that_writes_to_its_input_is_refused_before_backward() -> None:
    model = nn.Sequential(Block(), Block(), Writing(), Writing(), Block())
    model, _ = hetero.prepare(
        model, adamw(model), device="cpu", hbm="8MiB", chunk_bytes=1024, activations="recompute"
    )

    with pytest.raises(StateError, match=r"a Writing, .* writes to its inputs"):
        model(torch.randn(4, D))


def test_what_gave_way_still_does_when_the_rest_of_the_model_fits() -> None:
    """Without what is kept there is room for all states; keeping it again would pass the budget."""
    model = deep()
    model, optimizer = hetero.prepare(
        model, adamw(model), device="cpu", hbm=HBM, chunk_bytes=1024, activations="keep"
    )
    with pytest.raises(BudgetError) as refused:
        step_of(model, optimizer, 0)
    plain = deep()
    reference = adamw(plain)
    twin = copy.deepcopy(plain)
    model, optimizer = hetero.prepare(
        twin, adamw(twin), device="cpu", hbm=refused.value.needed_bytes - 1, chunk_bytes=1024
    )

    for number in range(6):  # one is measured, one proves what may be computed again
        theirs = step_of(plain, reference, number)
        assert torch.equal(step_of(model, optimizer, number), theirs)

    assert engine_of(model).residence.name == "resident"
    assert engine_of(model).residence.activations.shapes


class Repeated(nn.Module):
    """Two blocks, taken in turns twelve times."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(24):
            x = self.blocks[number % 2](x)
        return x


def test_of_a_unit_that_comes_last_only_the_last_call_is_kept() -> None:
    """A block's 23 calls leave their inputs alone, 4 KiB each; the last is needed at once."""
    model = Repeated()
    model, optimizer = hetero.prepare(
        model, adamw(model), device="cpu", hbm="8MiB", chunk_bytes=1024, activations="recompute"
    )
    engine = engine_of(model)
    keep_measuring(engine)
    step_of(model, optimizer, 0)

    loss = model(torch.randn(64, D)).square().mean()

    held = engine.residence.runtime.saved.footprint.live_bytes
    loss.backward()
    assert held < 23 * 64 * D * 4 + 100 * 1024


def test_of_forwards_that_wait_for_their_backwards_no_unit_is_kept() -> None:
    """Three micro-batches of a pipeline: each would hold all that its last unit saves."""
    plain = deep()
    reference, twin = adamw(plain), copy.deepcopy(plain)
    model, optimizer = hetero.prepare(
        twin, adamw(twin), device="cpu", hbm="8MiB", chunk_bytes=1024, activations="recompute"
    )
    keep_measuring(engine_of(model))
    footprint = engine_of(model).residence.runtime.saved.footprint
    batches = torch.randn(3, 64, D).unbind()
    for number in range(3):
        held = []
        for trained, stepped in ((plain, reference), (model, optimizer)):
            torch.manual_seed(number)
            losses = [trained(batch).square().mean() for batch in batches]
            held.append(footprint.live_bytes)
            for loss in losses:
                loss.backward()
            stepped.step()
            stepped.zero_grad()

    inputs = 3 * len(plain) * 64 * D * 4
    assert inputs <= held[1] < inputs + 3 * 64 * D * 4
    same(values(plain), values(model), "weights")


def test_after_forwards_that_waited_one_alone_keeps_its_last_unit_again() -> None:
    model = deep()
    model, optimizer = hetero.prepare(
        model, adamw(model), device="cpu", hbm="8MiB", chunk_bytes=1024, activations="recompute"
    )
    keep_measuring(engine_of(model))
    footprint = engine_of(model).residence.runtime.saved.footprint
    batches = torch.randn(2, 64, D).unbind()
    held = []
    for together in (1, 1, 2, 2, 1, 1, 1):
        losses = [model(batch).square().mean() for batch in batches[:together]]
        held.append(footprint.live_bytes / together)
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    assert held[1] == held[-1] > held[3] + 64 * D * 4  # backward needs that unit at once
