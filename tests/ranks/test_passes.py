"""Backward passes that do not give every gradient, or that fail, and the sums over ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hetero
from hetero import StateError
from hetero.api import prepare_tuned
from hetero.config import Config
from hetero.testing.ranks import outcomes, run_ranks
from hetero.train.engine.tuning import Tuning
from hetero.train.gradients.exchange import Exchange
from tests.ranks import models
from tests.ranks.models import Found, Run, assert_same, found

STEPS = 3


class Nine(nn.Module):
    """Weights of one bucket, of which a pass may leave out every second one."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(0.2 * torch.randn(5, 7)) for _ in range(9))
        self.uses_all = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, weight in enumerate(self.weights):
            if number % 2 == 0 or self.uses_all:
                x = x + x @ weight.T @ weight
        return x.pow(2).mean()


def built() -> tuple[Nine, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Nine()
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def loss_of(model: Nine, step: int, number: int, rank: int) -> torch.Tensor:
    model.uses_all = number == 0
    seed = torch.Generator().manual_seed(100 * step + 10 * number + rank)
    out: torch.Tensor = model(torch.randn(4, 7, generator=seed))
    return out


def by_hand(n_ranks: int) -> Found:
    model, optimizer = built()
    params = list(model.parameters())
    for step in range(STEPS):
        for number in range(2):
            for rank in range(n_ranks):
                loss = loss_of(model, step, number, rank)
                grads = torch.autograd.grad(loss, params, allow_unused=True)
                for param, grad in zip(params, grads, strict=True):
                    if grad is not None:
                        grad = grad * (1 / n_ranks)
                        param.grad = grad if param.grad is None else param.grad.add_(grad)
        optimizer.step()
        optimizer.zero_grad()
    return found(model, optimizer, [])


def by_ranks(rank: int, settings: dict[str, Any]) -> Found:
    model, plain = built()
    model, optimizer = hetero.prepare(model, plain, mesh="world", **settings)
    for step in range(STEPS):
        for number in range(2):
            loss_of(model, step, number, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = found(model, optimizer, [])
    hetero.release(model, optimizer)
    return state


@pytest.mark.parametrize("n_ranks", [2, pytest.param(3, marks=pytest.mark.campaign(seconds=1))])
def test_a_gradient_that_a_later_pass_leaves_out_keeps_its_sum(n_ranks: int) -> None:
    expected = by_hand(n_ranks)
    for each in run_ranks(n_ranks, by_ranks, {"device": "cpu:sim", "hbm": 100_000}):
        assert_same(each, expected)


# -- passes that fail ----------------------------------------------------------------------------

RUN = Run(settings={"device": "cpu:sim", "hbm": 60_000, "chunk_bytes": 1024})


class Fails:
    """A hook that raises when a tensor's gradient comes, while it is armed."""

    armed = False

    def __call__(self, grad: torch.Tensor) -> None:
        if self.armed:
            raise ValueError("planted")


def fail_at(block: nn.Module, fails: Fails) -> None:
    def watch(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(fails)

    block.register_forward_hook(watch)


def fails_and_goes_on(rank: int, run: Run, at: int, retains: bool) -> Found:
    """Each pass fails once when backward comes to block ``at``; it is made again."""
    model, plain = models.built(run)
    fails = Fails()
    fail_at(model.blocks[at], fails)
    config = Config.load(mesh="world", **run.settings)
    model, optimizer = prepare_tuned(model, plain, config, Tuning(one_sided=run.one_sided))
    norms = []
    for step in range(run.steps):
        loss = models.loss_of(model, run, step, rank)
        fails.armed = True
        with pytest.raises(ValueError, match="planted"):
            loss.backward(retain_graph=retains)
        fails.armed = False
        optimizer.zero_grad()
        if not retains:
            loss = models.loss_of(model, run, step, rank)
        loss.backward()
        norms.append(float(optimizer.clip_grad_norm_(run.clip)))
        optimizer.step()
        optimizer.zero_grad()
    state = found(model, optimizer, norms)
    hetero.release(model, optimizer)
    return state


@pytest.mark.campaign(seconds=3)
@pytest.mark.parametrize("retains", [True, False], ids=["same-graph", "new-forward"])
@pytest.mark.parametrize("one_sided", [True, False], ids=["read", "gathered"])
@pytest.mark.parametrize("at", [0, 3])
def test_a_pass_that_failed_leaves_nothing_to_the_next(
    at: int, one_sided: bool, retains: bool
) -> None:
    run = replace(RUN, one_sided=one_sided)
    expected = models.by_torch(run, 2)
    for each in run_ranks(2, fails_and_goes_on, run, at, retains):
        assert_same(each, expected)


def uses_what_failed(rank: int, use: str) -> None:
    model, plain = models.built(RUN)
    fails = Fails()
    model, optimizer = hetero.prepare(model, plain, mesh="world", **RUN.settings)
    model.blocks[1].register_forward_hook(lambda m, i, out: out.register_hook(fails) and None)
    fails.armed = True
    with pytest.raises(ValueError, match="planted"):
        models.loss_of(model, RUN, 0, rank).backward()
    fails.armed = False
    if use == "a pass":
        models.loss_of(model, RUN, 0, rank).backward()
    else:
        optimizer.step()


@pytest.mark.parametrize("use", ["a pass", "a step"])
def test_gradients_of_a_pass_that_failed_must_be_taken_away(use: str) -> None:
    for each in outcomes(2, uses_what_failed, use):
        assert isinstance(each.error, StateError) and "zero_grad" in str(each.error), each.text


# -- passes inside of a pass ---------------------------------------------------------------------


class Reentrant(models.Net):
    """A block of it is computed again, and another one used twice, in passes of their own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for number in (0, 1, 2, 1, 3):
            block = self.blocks[number]
            x = x + (checkpoint(block, x, use_reentrant=True) if number % 2 else block(x))
        out: torch.Tensor = self.last(self.norm(x))
        return out


NESTED = {"device": "cpu:sim", "hbm": 60_000, "chunk_bytes": 1024}


def made(kind: type[models.Net]) -> tuple[models.Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = kind()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def mean_of(model: nn.Module, step: int, rank: int, rows: int) -> torch.Tensor:
    seed = torch.Generator().manual_seed(10 * step + rank)
    out: torch.Tensor = model(torch.randn(rows, 10, generator=seed))
    return out.pow(2).mean()


def noted_exchanges() -> list[Exchange]:
    """Return a list to which this process adds each exchange of a pass from now on."""
    found: list[Exchange] = []
    finish = Exchange.finish_pass

    def noted(exchange: Exchange) -> None:
        found.append(exchange)
        finish(exchange)

    Exchange.finish_pass = noted
    return found


def counting(
    rank: int,
    kind: type[models.Net],
    rows: tuple[int, ...],
    slices: int | None,
    one_sided: bool,
    at: int | None = None,
) -> Any:
    """Train on several ranks; return also how often a step exchanged gradients.

    Each step makes a pass more, which fails when backward comes to block ``at``, inside of a pass.
    """
    exchanges = noted_exchanges()
    model, plain = made(kind)
    settings = NESTED if slices is None else {**NESTED, "micro_batch": slices}
    config = Config.load(mesh="world", **settings)
    model, optimizer = prepare_tuned(model, plain, config, Tuning(one_sided=one_sided))
    fails = Fails()
    if at is not None:
        fail_at(model.blocks[at], fails)
    for step in range(STEPS):
        if at is not None:
            fails.armed = True
            with pytest.raises(ValueError, match="planted"):
                mean_of(model, step, rank, rows[rank]).backward()
            fails.armed = False
            optimizer.zero_grad()
        mean_of(model, step, rank, rows[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    evictions = hetero.status(model).evictions
    state = found(model, optimizer, [])
    hetero.release(model, optimizer)
    return state, len(exchanges) / STEPS, evictions


def slices_by_hand(kind: type[models.Net], rows: tuple[int, ...], slices: int) -> Found:
    """Train on one rank, whose slices are proved against torch, and sum by hand."""
    model, plain = made(kind)
    model, optimizer = hetero.prepare(model, plain, micro_batch=slices, **NESTED)
    for step in range(STEPS):
        sums: dict[str, torch.Tensor] = {}
        for rank in range(len(rows)):
            mean_of(model, step, rank, rows[rank]).backward()
            for name, param in model.named_parameters():
                assert param.grad is not None
                grad = param.grad.clone() * (1 / len(rows))
                sums[name] = sums[name] + grad if name in sums else grad
            optimizer.zero_grad()
        for name, param in model.named_parameters():
            param.grad = sums[name]
        optimizer.step()
        optimizer.zero_grad()
    state = found(model, optimizer, [])
    hetero.release(model, optimizer)
    return state


@pytest.mark.parametrize(
    ("rows", "one_sided"),
    [((4, 7), True), ((2, 3, 6), True), ((6, 6), False)],  # those that gather make the same calls
    ids=["two read", "three read", "two gather"],
)
def test_slices_of_a_batch_exchange_gradients_once(rows: tuple[int, ...], one_sided: bool) -> None:
    expected = slices_by_hand(models.Net, rows, 2)
    ranks = run_ranks(len(rows), counting, models.Net, rows, 2, one_sided)
    for state, times, evictions in ranks:
        assert_same(state, expected)
        assert times == 1 and evictions > 0


def reentrant_by_torch(rows: tuple[int, ...]) -> Found:
    """Train in one process of plain torch; what comes in one pass is summed rank by rank."""
    model, optimizer = made(Reentrant)
    for step in range(STEPS):
        came: list[dict[nn.Parameter, list[torch.Tensor]]] = []
        for rank, n_rows in enumerate(rows):
            own = {param: list[torch.Tensor]() for param in model.parameters()}

            def take(param: nn.Parameter, own: Any = own) -> None:
                own[param].append(param.grad)
                param.grad = None

            hooks = [param.register_post_accumulate_grad_hook(take) for param in own]
            mean_of(model, step, rank, n_rows).backward()
            came.append(own)
            for hook in hooks:
                hook.remove()
        for param in model.parameters():
            addends = [
                came[rank][param][time] * (1 / len(rows))
                for time in range(len(came[0][param]))
                for rank in range(len(rows))
            ]
            param.grad = addends[0]
            for addend in addends[1:]:
                param.grad = param.grad + addend
        optimizer.step()
        optimizer.zero_grad()
    return found(model, optimizer, [])


@pytest.mark.parametrize("one_sided", [True, False], ids=["read", "gathered"])
def test_passes_of_reentrant_checkpoints_exchange_what_came_in_them(one_sided: bool) -> None:
    expected = reentrant_by_torch((5, 5))
    for state, times, evictions in run_ranks(2, counting, Reentrant, (5, 5), None, one_sided):
        assert_same(state, expected)
        assert times == 4 and evictions > 0  # three blocks, and the pass around them


@pytest.mark.parametrize("at", [1, 3])
def test_a_pass_that_failed_inside_of_another_leaves_nothing_to_the_next(at: int) -> None:
    expected = reentrant_by_torch((5, 5))
    for state, _, _ in run_ranks(2, counting, Reentrant, (5, 5), None, True, at):
        assert_same(state, expected)


# -- passes that return gradients ----------------------------------------------------------------


def looks(rank: int, who: tuple[int, ...], one_sided: bool) -> Any:
    """Train, and on some ranks look at the gradient of the inputs before each backward pass."""
    exchanges = noted_exchanges()
    model, plain = models.built(RUN)
    config = Config.load(mesh="world", **RUN.settings)
    model, optimizer = prepare_tuned(model, plain, config, Tuning(one_sided=one_sided))
    norms, seen = [], []
    for step in range(RUN.steps):
        if rank in who:
            x = torch.ones(3, 10, requires_grad=True)
            seen += torch.autograd.grad(model(x).sum(), x)
        models.loss_of(model, RUN, step, rank).backward()
        norms.append(float(optimizer.clip_grad_norm_(RUN.clip or 0.0)))
        optimizer.step()
        optimizer.zero_grad()
    state = found(model, optimizer, norms)
    hetero.release(model, optimizer)
    return state, len(exchanges), seen


@pytest.mark.parametrize(
    ("who", "one_sided"), [((1,), True), ((0, 1), False)], ids=["one reads", "all gather"]
)
def test_a_pass_that_returns_gradients_exchanges_none(
    who: tuple[int, ...], one_sided: bool
) -> None:
    expected = models.by_torch(RUN, 2)
    for rank, (state, passes, seen) in enumerate(run_ranks(2, looks, who, one_sided)):
        assert_same(state, expected)
        assert passes == RUN.steps and len(seen) == (RUN.steps if rank in who else 0)
