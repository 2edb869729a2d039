"""Steps of several forwards: buckets stand inside them, and frames keep their number."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining import _backward as halves

import hetero
from hetero.api import engine_of
from hetero.device import SimDevice
from hetero.plan.schedule import Shape, verify
from hetero.status import status
from tests.equivalence.blocks import OneMatrix
from tests.equivalence.harness import adamw, same, values

D, UNITS, FORWARDS = 32, 6, 4
UNIT_BYTES = 4 * D * D


def stack() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(OneMatrix(D) for _ in range(UNITS)))


Loop = Callable[[nn.Module, list[torch.Tensor]], None]


def waiting(most: int) -> Loop:
    """Return a loop in which so many forwards wait for their backwards, the first one first."""

    def passes(model: nn.Module, batches: list[torch.Tensor]) -> None:
        losses: list[torch.Tensor] = []
        for batch in batches:
            losses.append(model(batch).square().mean())
            if len(losses) > most:
                losses.pop(0).backward()
        while losses:
            losses.pop(0).backward()

    return passes


LOOPS = {
    "each backward at once": waiting(0),
    "one forward, one backward": waiting(2),
    "forwards first": waiting(FORWARDS),
}


def step(model: nn.Module, optimizer: Any, loop: Loop, number: int, *, rows: int = 16) -> None:
    torch.manual_seed(number)
    loop(model, [torch.randn(rows, D) for _ in range(FORWARDS)])
    optimizer.step()
    optimizer.zero_grad()


def prepared(model: nn.Module, device: str, hbm: int, **settings: Any) -> tuple[Any, Any]:
    where = SimDevice(seed=3, checked=True) if device == "cpu:sim" else device
    settings = {"chunk_bytes": 1024, "activations": "keep", **settings}
    return hetero.prepare(model, adamw(model), device=where, hbm=hbm, **settings)


def activations(loop: Loop, device: str) -> int:
    """Return what a step's activations take, with a ring for a unit's gradients."""
    model, _ = prepared(stack(), device, 2**30)
    torch.manual_seed(0)
    loop(model, [torch.randn(16, D) for _ in range(FORWARDS)])
    return engine_of(model).residence.hbm.activations_seen()


def planned(model: nn.Module) -> int:
    """Return the fetches of the plan, its misses included."""
    residence = engine_of(model).residence
    buckets = residence.setup.blueprint.layout.buckets
    verdict = verify(residence.schedule(), {b.id: Shape(b.granules, b.trainable) for b in buckets})
    return verdict.fetches + verdict.demand_misses


@pytest.mark.parametrize("device", ["cpu:sim", "cpu"])
@pytest.mark.parametrize("name", LOOPS)
def test_a_step_of_several_forwards_fetches_what_its_plan_says(name: str, device: str) -> None:
    loop, plain = LOOPS[name], stack()
    hbm = activations(loop, device) + UNITS // 2 * UNIT_BYTES
    model, optimizer = prepared(copy.deepcopy(plain), device, hbm)
    theirs = adamw(plain)
    for number in range(5):
        step(plain, theirs, loop, number)
        step(model, optimizer, loop, number)
        now = status(model)
        if number:
            assert (now.fetches, now.misses) == (planned(model), 0)
        assert now.evictions > UNITS
        assert now.division["frames"] == UNITS // 2 * UNIT_BYTES
    same(values(plain), values(model), "weights")


@pytest.mark.parametrize("name", ["one forward, one backward", "forwards first"])
def test_policies_are_chosen_for_all_forwards_that_wait(name: str) -> None:
    """What one forward saves would fit; what all of them save does not."""
    loop, plain = LOOPS[name], stack()
    hbm = activations(loop, "cpu:sim") // 2 + UNITS // 2 * UNIT_BYTES
    model, optimizer = prepared(copy.deepcopy(plain), "cpu:sim", hbm, activations="auto")
    theirs = adamw(plain)
    for number in range(7):
        step(plain, theirs, loop, number)
        step(model, optimizer, loop, number)
    now = status(model)

    same(values(plain), values(model), "weights")
    assert (now.fetches, now.misses) == (planned(model), 0)


def test_the_question_for_a_graph_node_fetches_nothing() -> None:
    plain = stack()
    model, _ = prepared(copy.deepcopy(plain), "cpu:sim", 2 * UNIT_BYTES + 2**16)
    counts = engine_of(model).residence.manager.counts
    before = copy.copy(counts)

    for param in model.parameters():
        assert get_gradient_edge(param).node.variable is param
    assert counts == before

    first = next(model.parameters())
    assert torch.equal(first.view_as(first), next(plain.parameters()))
    assert counts != before


def zero_bubble(model: nn.Module, batches: list[torch.Tensor]) -> None:
    """Make the backward of each forward in two halves, as torch's zero-bubble schedules do: of the
    inputs at once, of the weights after all."""
    waiting = []
    for batch in batches:
        x = batch.requires_grad_()
        loss = model(x).square().mean()
        waiting.append(halves.stage_backward_input([loss], None, [x], model.parameters())[1])
    for groups in waiting:
        halves.stage_backward_weight(model.parameters(), groups)


def test_halves_of_backwards_have_the_bits_of_plain_torch() -> None:
    plain = stack()
    hbm = activations(zero_bubble, "cpu:sim") + UNITS // 2 * UNIT_BYTES
    model, optimizer = prepared(copy.deepcopy(plain), "cpu:sim", hbm)
    theirs = adamw(plain)
    for number in range(4):
        step(plain, theirs, zero_bubble, number)
        step(model, optimizer, zero_bubble, number)
    now = status(model)

    same(values(plain), values(model), "weights")
    assert now.evictions > UNITS
    assert now.hits + now.misses == 3 * FORWARDS * UNITS
