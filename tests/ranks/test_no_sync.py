"""Passes that exchange nothing: addends of a rank add up first, then rank by rank."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import hetero
from hetero import StateError
from hetero.testing.ranks import outcomes, run_ranks
from tests.ranks.models import Found, Run, assert_same, built, by_torch, found, loss_of

RUN = Run(settings={"device": "cpu:sim", "hbm": 120_000, "chunk_bytes": 1024})
STEPS = 3
PATTERNS = {
    "last": (False, False, True),
    "mixed": (True, False, True),
    "skipping": (False, True),
}
"""Which passes of a step exchange."""


def skips(run: Run, pattern: str) -> Run:
    """In "skipping" a block gets its gradient in the pass that exchanges nothing alone."""
    skipped = {(2 * step + 1, rank): 1 for step in range(STEPS) for rank in range(2)}
    return Run(settings=run.settings, skips=skipped if pattern == "skipping" else {})


def by_hand(pattern: str) -> Found:
    run, syncs = skips(RUN, pattern), PATTERNS[pattern]
    model, optimizer = built(run)
    params, norms = list(model.parameters()), []
    for step in range(STEPS):
        local: list[dict[int, torch.Tensor]] = [{}, {}]
        for number, is_synced in enumerate(syncs):
            for rank in range(2):
                loss = loss_of(model, run, len(syncs) * step + number, rank)
                grads = torch.autograd.grad(loss, params, allow_unused=True)
                for i, grad in enumerate(grads):
                    if grad is not None:
                        known = local[rank].get(i)
                        local[rank][i] = grad if known is None else known.add_(grad)
            for i, param in enumerate(params):
                for mine in local if is_synced else ():
                    if i in mine:
                        grad = mine.pop(i) * (1 / 2)
                        param.grad = grad if param.grad is None else param.grad.add_(grad)
        norms.append(float(nn.utils.clip_grad_norm_(params, 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return found(model, optimizer, norms)


def by_ranks(rank: int, pattern: str) -> Found:
    run, syncs = skips(RUN, pattern), PATTERNS[pattern]
    model, plain = built(run)
    model, optimizer = hetero.prepare(model, plain, mesh="world", **run.settings)
    norms = []
    for step in range(STEPS):
        for number, is_synced in enumerate(syncs):
            with nullcontext() if is_synced else hetero.no_sync(model):
                loss_of(model, run, len(syncs) * step + number, rank).backward()
        norms.append(float(optimizer.clip_grad_norm_(0.5)))
        optimizer.step()
        optimizer.zero_grad()
    state = found(model, optimizer, norms)
    hetero.release(model, optimizer)
    return state


@pytest.mark.parametrize("pattern", list(PATTERNS))
def test_addends_of_a_rank_add_up_before_they_are_exchanged(pattern: str) -> None:
    expected = by_hand(pattern)
    for each in run_ranks(2, by_ranks, pattern):
        assert_same(each, expected)


BF16 = {**RUN.settings, "hbm": 80_000, "precision": "bf16"}
PASSES = 3


def averages(rank: int, keeps: bool) -> list[torch.Tensor]:
    """Make one step of bf16 weights with masters; returns AdamW's averages of gradients."""
    model, plain = built(RUN)
    model, optimizer = hetero.prepare(model, plain, mesh="world", **BF16)
    for number in range(PASSES):
        kept = keeps and number < PASSES - 1
        with hetero.no_sync(model) if kept else nullcontext():
            loss_of(model, RUN, number, rank).backward()
    optimizer.step()
    state = optimizer.state_dict()["state"]
    values = [torch.as_tensor(state[number]["exp_avg"]).clone() for number in sorted(state)]
    hetero.release(model, optimizer)
    return values


def averages_by_hand(keeps: bool) -> list[torch.Tensor]:
    model, optimizer = built(RUN)
    model.to(torch.bfloat16)
    params = list(model.parameters())
    sums: list[torch.Tensor | None] = [None] * len(params)
    local: list[list[torch.Tensor]] = [[], []]
    for number in range(PASSES):
        for rank in range(2):
            grads = list(torch.autograd.grad(loss_of(model, RUN, number, rank), params))
            known = local[rank]
            local[rank] = [a.add_(b) for a, b in zip(known, grads, strict=True)] if known else grads
        for mine in local if number == PASSES - 1 or not keeps else ():
            for i, grad in enumerate(mine):
                addend, so_far = grad.float() * (1 / 2), sums[i]
                sums[i] = addend if so_far is None else so_far.add_(addend)
            mine.clear()
    beta, _ = optimizer.defaults["betas"]
    return [torch.zeros_like(total).lerp_(total, 1 - beta) for total in sums if total is not None]


def test_masters_take_addends_in_fp32_and_what_adds_up_before_in_bf16() -> None:
    together, apart = averages_by_hand(True), averages_by_hand(False)
    assert any(not torch.equal(a, b) for a, b in zip(together, apart, strict=True))

    for keeps, expected in ((True, together), (False, apart)):
        for values in run_ranks(2, averages, keeps):
            assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True)), keeps


def never_synced(rank: int) -> Any:
    model, plain = built(RUN)
    model, optimizer = hetero.prepare(model, plain, mesh="world", **RUN.settings)
    with hetero.no_sync(model):
        loss_of(model, RUN, 0, rank).backward()
    dist.barrier()  # a rank that ends takes its shares with it
    optimizer.step()


def test_a_step_of_gradients_that_were_never_exchanged_is_an_error() -> None:
    for each in outcomes(2, never_synced):
        assert isinstance(each.error, StateError) and "no_sync" in str(each.error), each.text


def test_on_one_rank_it_changes_nothing() -> None:
    run = Run(settings={"device": "cpu:sim", "hbm": 60_000, "chunk_bytes": 1024})
    weights = []
    for context in (nullcontext, None):
        model, plain = built(run)
        model, optimizer = hetero.prepare(model, plain, **run.settings)
        for micro in range(3):
            with hetero.no_sync(model) if context is None else context():
                loss_of(model, run, micro, 0).backward()
        optimizer.step()
        hetero.release(model, optimizer)
        weights.append(found(model, plain, []))
    assert_same(*weights)


def taken_away(rank: int) -> Found:
    """A pass in no_sync adds to sums that are home, and all are taken away then."""
    model, plain = built(RUN)
    model, optimizer = hetero.prepare(model, plain, mesh="world", **RUN.settings)
    norms = []
    for step in range(STEPS):
        loss_of(model, RUN, 17, rank).backward()
        with hetero.no_sync(model):
            loss_of(model, RUN, 18, rank).backward()
        optimizer.zero_grad()
        loss_of(model, RUN, step, rank).backward()
        norms.append(float(optimizer.clip_grad_norm_(0.5)))
        optimizer.step()
        optimizer.zero_grad()
    state = found(model, optimizer, norms)
    hetero.release(model, optimizer)
    return state


def test_gradients_that_zero_grad_took_away_are_not_exchanged_later() -> None:
    expected = by_torch(Run(settings=RUN.settings, steps=STEPS), 2)
    for each in run_ranks(2, taken_away):
        assert_same(each, expected)


HALF = {**RUN.settings, "precision": "fp16"}


def halves(rank: int) -> list[torch.Tensor]:
    """Train in fp16 by SGD; a pass in no_sync precedes each other one."""
    model, _ = built(RUN)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = hetero.prepare(model, plain, mesh="world", **HALF)
    for step in range(STEPS):
        with hetero.no_sync(model):
            hetero.backward(loss_of(model, RUN, 2 * step, rank))
        hetero.backward(loss_of(model, RUN, 2 * step + 1, rank))
        assert not optimizer.step_was_skipped
        optimizer.step()
        optimizer.zero_grad()
    scale = optimizer.loss_scale
    hetero.release(model, optimizer)
    return [torch.tensor(scale), *(p.detach().clone() for p in model.parameters())]


def halves_by_hand(scale: float) -> list[torch.Tensor]:
    model, _ = built(RUN)
    exact = [p.detach().clone() for p in model.parameters()]
    params = list(model.half().parameters())
    for step in range(STEPS):
        totals: list[list[torch.Tensor]] = []
        for rank in range(2):
            for micro in (2 * step, 2 * step + 1):
                (scale * loss_of(model, RUN, micro, rank)).backward()
            sums = [param.grad for param in params if param.grad is not None]
            totals.append([total.float() * (1 / scale) * (1 / 2) for total in sums])
            model.zero_grad()
        for value, first, second, param in zip(exact, *totals, params, strict=True):
            value.sub_(0.1 * first.add_(second))  # rounded twice, as the written formula does
            param.data.copy_(value)
    return exact


def test_gradients_of_a_scaled_loss_are_kept_too() -> None:
    one, other = run_ranks(2, halves)
    expected = halves_by_hand(float(one[0]))
    for mine, theirs, value in zip(one[1:], other[1:], expected, strict=True):
        assert torch.equal(mine, theirs) and torch.equal(mine, value)
