"""Ranks of which one does something else than the others while they train (for tests).

Either all come to the bits that one process gives with their micro-batches, or all are told.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import torch
from torch import nn

import hetero
from hetero.api import prepare_tuned
from hetero.config import Config
from hetero.cores import torch_threads
from hetero.errors import DivergenceError
from hetero.testing.ranks import N_THREADS, Died, outcomes
from hetero.train.engine.tuning import Tuning

STEPS = 4
SETTINGS: dict[str, Any] = {"device": "cpu:sim", "hbm": 60_000, "chunk_bytes": 1024}
N_BLOCKS = 3
Optimizer = Any


@dataclass(frozen=True)
class Divergence:
    """What one rank does at one step."""

    n_ranks: int
    rank: int
    step: int
    act: str
    one_sided: bool
    clips: bool


class Blocks(nn.Module):
    """Blocks that are called in an order given for each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 67), nn.GELU(), nn.Linear(67, 32)) for _ in range(N_BLOCKS)
        )
        self.last = nn.Linear(32, 5)
        self.order: tuple[int, ...] = tuple(range(N_BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for number in self.order:
            x = x + self.blocks[number](x)
        out: torch.Tensor = self.last(x)
        return out


def built() -> tuple[Blocks, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Blocks()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


# -- what a rank may do --------------------------------------------------------------------------

ORDERS: Mapping[str, tuple[int, ...]] = {
    "skips a block": (0, 2),
    "skips all blocks": (),
    "calls another order": (2, 0, 1),
    "calls a block twice": (0, 1, 1, 2),
}
HELD: list[Any] = []


def prints(model: Blocks, optimizer: Optimizer) -> None:
    str(model.blocks[1])
    str(model.last.weight)


def reads_a_gradient(model: Blocks, optimizer: Optimizer) -> None:
    grad = model.first.weight.grad
    if grad is not None:
        grad.abs().max().item()


def reads_a_state(model: Blocks, optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            value.sum().item()


def holds_a_view(model: Blocks, optimizer: Optimizer) -> None:
    HELD.append(model.first.weight.detach().view(-1)[3:])


def evaluates(model: Blocks, optimizer: Optimizer) -> None:
    with torch.no_grad():
        model(torch.zeros(2, 8, device="cpu"))


def writes(model: Blocks, optimizer: Optimizer) -> None:
    with torch.no_grad():
        model.last.weight.mul_(0.5)


def changes_a_gradient(model: Blocks, optimizer: Optimizer) -> None:
    grad = model.last.weight.grad
    if grad is not None:
        grad.mul_(0.5)


def changes_the_rate(model: Blocks, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.5


def takes_a_gradient_away(model: Blocks, optimizer: Optimizer) -> None:
    model.last.weight.grad = None


def saves_memory(model: Blocks, optimizer: Optimizer) -> None:
    model.state_dict()


def clips(model: Blocks, optimizer: Optimizer) -> None:
    optimizer.clip_grad_norm_(0.1)


def steps(model: Blocks, optimizer: Optimizer) -> None:
    optimizer.step()


def goes_backward(model: Blocks, optimizer: Optimizer) -> None:
    model(torch.ones(2, 8, device="cpu")).sum().backward()


def sleeps(model: Blocks, optimizer: Optimizer) -> None:
    time.sleep(0.2)


HARMLESS: Mapping[str, Callable[[Blocks, Optimizer], None]] = {
    "prints a weight": prints,
    "reads a gradient": reads_a_gradient,
    "reads states": reads_a_state,
    "reads a state dict": saves_memory,
    "holds a view": holds_a_view,
    "evaluates": evaluates,
    "sleeps": sleeps,
}
HARMFUL: Mapping[str, Callable[[Blocks, Optimizer], None]] = {
    "writes a weight": writes,
    "changes a gradient": changes_a_gradient,
    "takes a gradient away": takes_a_gradient_away,
    "changes the rate": changes_the_rate,
    "clips once more": clips,
    "steps once more": steps,
    "goes backward once more": goes_backward,
}
FROM_THE_BEGINNING: Mapping[str, Mapping[str, Any]] = {
    "has less HBM": {"hbm": 50_000},
    "has more HBM": {"hbm": 400_000},
    "has other chunks": {"chunk_bytes": 2048},
    "recomputes": {"activations": "recompute"},
    "clips by itself": {"max_grad_norm": 0.1},
}
BATCHES = ("has a larger batch", "updates slowly")
ACTS = (*ORDERS, *HARMLESS, *HARMFUL, *FROM_THE_BEGINNING, *BATCHES)


KINDS = tuple(itertools.product((2, 3), (True, False), ACTS))
N_KINDS = len(KINDS)


def drawn(number: int) -> Divergence:
    """Return a divergence: those of all numbers below `N_KINDS` differ in kind."""
    dice = Random(number)
    n_ranks, one_sided, act = KINDS[number % N_KINDS]
    rank, step, clips = dice.randrange(n_ranks), dice.randrange(STEPS), dice.random() < 0.5
    return Divergence(n_ranks, rank, step, act, one_sided, clips)


# -- a run ---------------------------------------------------------------------------------------


def loss_of(model: Blocks, plan: Divergence, step: int, rank: int) -> torch.Tensor:
    acts = (rank, step) == (plan.rank, plan.step)
    model.order = ORDERS[plan.act] if acts and plan.act in ORDERS else tuple(range(N_BLOCKS))
    rows = 40 if acts and plan.act == "has a larger batch" else 4
    dice = torch.Generator().manual_seed(100 * step + rank)
    out: torch.Tensor = model(torch.randn(rows, 8, generator=dice, device="cpu"))
    return out.pow(2).mean()


def by_torch(plan: Divergence) -> list[torch.Tensor]:
    """Train by plain torch with all ranks' micro-batches; return the weights."""
    model, optimizer = built()
    params = list(model.parameters())
    for step in range(STEPS):
        for rank in range(plan.n_ranks):
            loss = loss_of(model, plan, step, rank)
            for param, grad in zip(
                params, torch.autograd.grad(loss, params, allow_unused=True), strict=True
            ):
                if grad is not None:
                    grad = grad * (1 / plan.n_ranks)
                    param.grad = grad if param.grad is None else param.grad.add_(grad)
        if plan.clips:
            nn.utils.clip_grad_norm_(params, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in params]


def by_rank(rank: int, plan: Divergence) -> list[torch.Tensor]:
    """Train as one of several ranks; return the weights."""
    model, plain = built()
    own = FROM_THE_BEGINNING.get(plan.act, {}) if rank == plan.rank else {}
    config = Config.load(mesh="world", timeout_seconds=20.0, **{**SETTINGS, **own})
    slow = plan.act == "updates slowly" and rank == plan.rank
    tuning = Tuning(one_sided=plan.one_sided, pause=partial(time.sleep, 0.01) if slow else None)
    _, optimizer = prepare_tuned(model, plain, config, tuning)
    act = {**HARMLESS, **HARMFUL}.get(plan.act)
    for step in range(STEPS):
        loss_of(model, plan, step, rank).backward()
        if act is not None and (rank, step) == (plan.rank, plan.step):
            act(model, optimizer)
        if plan.clips:
            optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    HELD.clear()
    hetero.release(model, optimizer)
    return [param.detach().clone() for param in model.parameters()]


@dataclass(frozen=True)
class Found:
    """What came of a divergence."""

    told: bool
    """Whether all ranks raised DivergenceError; else they have the right bits."""
    wrong: str
    """What should not be so; empty if all is well."""


def found(plan: Divergence) -> Found:
    """Let a rank diverge, and look whether all were told, or all have the right bits."""
    ends = outcomes(plan.n_ranks, by_rank, plan)
    told = [isinstance(end, Died) for end in ends]
    if all(told):
        texts = [end.text for end in ends if not isinstance(end.error, DivergenceError)]
        if plan.act in (*ORDERS, *BATCHES, *HARMLESS) and plan.one_sided:
            texts.append(f"it harms none, and they were told: {ends[0].text}")
        return Found(True, "; ".join(texts))
    if any(told):
        text = next(end.text for end in ends if isinstance(end, Died))
        return Found(False, f"ranks went on after one was told: {text}")
    with torch_threads(N_THREADS):
        right = by_torch(plan)
    same = [all(map(torch.equal, right, weights)) for weights in ends]
    return Found(False, "" if all(same) else f"ranks with the right bits: {same}")
