"""Copies of a prepared model, as for averages: plain modules with the values of the moment; and
views of all its weights at once, which averages, norms and vectors are made of."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from hetero.errors import BudgetError
from tests.campaigns.core_patches import doubled
from tests.campaigns.harness import Block, Case, Net, Side, adamw, loss_of_tokens, tokens_of

PAGED = {"hbm": 250_000, "activations": "keep"}
PLENTY = {"hbm": 2_000_000}
DISK = {"hbm": 200_000, "host": 500_000, "nvme": True, "activations": "keep"}
ROOMY = {**PAGED, "host": 800_000}


def prepared(side: Side) -> tuple[Any, Any]:
    net = Net(3)
    net.head.weight = net.embed.weight
    net.register_buffer("steps", torch.zeros(2))
    return side.prepare(net, adamw(net))


def averages_of_a_prepared_model(side: Side) -> None:
    model, optimizer = prepared(side)
    average = AveragedModel(model, avg_fn=get_ema_avg_fn(0.9))
    for number in range(4):
        loss_of_tokens(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        with torch.no_grad():
            side.record("average", average(tokens_of(number)))
    side.record_all("average", average)


def a_copy_is_plain_and_trains_by_itself(side: Side) -> None:
    model, optimizer = prepared(side)
    side.train(model, optimizer, steps=2)
    doubled(model.blocks[1])
    twin = copy.deepcopy(model)
    side.record("tied", twin.head.weight is twin.embed.weight)
    side.record("plain", all(type(p) is nn.Parameter for p in twin.parameters()))
    names = {name for module in twin.modules() for name in vars(module)} - {"forward"}
    side.record("attributes of ours", *(name.startswith("_hetero") for name in sorted(names)))
    twin.blocks[1].__dict__.pop("forward")  # a closure over the model's own block, as in torch
    other = adamw(twin)
    side.train(twin, other, steps=2)
    side.train(model, optimizer, steps=2)
    twin.half()


def copies_of_parts(side: Side) -> None:
    model, optimizer = prepared(side)
    side.train(model, optimizer, steps=1)
    side.record("block", *copy.deepcopy(model.blocks[0]).state_dict().values())
    side.record("weight", copy.deepcopy(model.blocks[0].up.weight))
    twin: Block = copy.deepcopy(model.blocks[2]).double()
    side.record("double", twin(torch.ones(2, 32, dtype=torch.float64)))
    side.train(model, optimizer, steps=1)


class Parametrized(nn.Module):
    """A block whose layers have a deep copy of their own, which takes all attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))
        self.two = nn.utils.parametrizations.spectral_norm(nn.Linear(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(torch.tanh(self.one(x)))


def copies_of_parametrized_layers(side: Side) -> None:
    net = Net(3, block=Parametrized)
    model, optimizer = side.prepare(net, adamw(net))
    side.train(model, optimizer, steps=2)
    twin = copy.deepcopy(model)
    names = {name for module in twin.modules() for name in vars(module)}
    side.record("attributes of ours", any("hetero" in name for name in names))
    side.train(twin, adamw(twin), steps=2)
    side.train(model, optimizer, steps=2)


def a_copy_there_is_no_room_for(side: Side) -> None:
    net = Net(6)
    model, _ = side.prepare(net, adamw(net))
    copy.deepcopy(model)


# -- views of all weights at once, between steps whose activations have most of the budget --------

LEAST = {"cpu": 297_760, "cpu:sim": 239_808}  # `many_tokens` trains with so much, and no less
LEAST_SETTINGS = [{"device": d, "hbm": n, "activations": "keep"} for d, n in LEAST.items()]
BELOW = [{**settings, "hbm": settings["hbm"] - 64} for settings in LEAST_SETTINGS]
ABOVE = [{**settings, "hbm": settings["hbm"] + 80_000} for settings in LEAST_SETTINGS]


def small(side: Side) -> tuple[Any, Any]:
    net = Net(3)
    return side.prepare(net, adamw(net))


def loss_of_many(model: nn.Module, number: int) -> Tensor:
    tokens = tokens_of(number, 8)
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def views_of(model: nn.Module) -> list[Tensor]:
    return [p.detach() for p in model.parameters()]


def many_tokens(side: Side) -> None:
    side.train(*small(side), loss_of_many, steps=3)


def a_vector_of_all_weights_between_steps(side: Side) -> None:
    model, optimizer = small(side)
    for number in range(4):
        side.record("vector", parameters_to_vector(model.parameters()))
        loss_of_many(model, number).backward()
        side.record("vector", parameters_to_vector(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    side.record_all("end", model, optimizer)


def gradients_clipped_by_the_norms_of_all_weights(side: Side) -> None:
    model, optimizer = small(side)
    for number in range(4):
        loss_of_many(model, number).backward()
        weights = views_of(model)
        norms = torch._foreach_norm(weights)
        for p, norm in zip(model.parameters(), norms, strict=True):
            p.grad.mul_((0.01 * norm / p.grad.norm().clamp(min=1e-6)).clamp(max=1))
        side.record("norms", *norms)
        optimizer.step()
        optimizer.zero_grad()
        side.record("what views show of the step", *weights)
        del weights
    side.record_all("end", model, optimizer)


def averages_of_all_weights_at_once(side: Side) -> None:
    model, optimizer = small(side)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for number in range(4):
        loss_of_many(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    side.record_all("average", average)
    side.record_all("end", model, optimizer)


def weights_written_through_views_of_all(side: Side) -> None:
    model, optimizer = small(side)
    for number in range(4):
        loss_of_many(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
        views = views_of(model)
        torch._foreach_mul_(views, 0.99)
        del views[::2]
        torch._foreach_add_(views, 1e-3)
        del views
    side.record_all("end", model, optimizer)


def views_of_all_that_a_forward_begins_with(side: Side) -> None:
    model, optimizer = small(side)
    side.train(model, optimizer, loss_of_many, steps=2)
    views = views_of(model)
    side.train(model, optimizer, loss_of_many, steps=1)
    side.record("views", *views)


def one_view_that_stays(side: Side) -> None:
    model, optimizer = small(side)
    side.train(model, optimizer, loss_of_many, steps=2)
    view = views_of(model)[18]  # of the last block
    side.train(model, optimizer, loss_of_many, steps=2)
    side.record("view", view)
    del view
    side.train(model, optimizer, loss_of_many, steps=2)


def a_refused_forward_once_its_views_are_gone(side: Side) -> None:
    model, optimizer = small(side)
    side.train(model, optimizer, loss_of_many, steps=2)
    views = views_of(model)
    if not side.is_plain:
        with pytest.raises(BudgetError, match="views of parameters that are still alive"):
            loss_of_many(model, 0)
    side.record("views", *views)
    del views
    side.train(model, optimizer, loss_of_many, steps=2)


MANY_VIEWS = [
    a_vector_of_all_weights_between_steps,
    gradients_clipped_by_the_norms_of_all_weights,
    averages_of_all_weights_at_once,
    weights_written_through_views_of_all,
    a_refused_forward_once_its_views_are_gone,
]

CASES = [
    *(Case(program, where) for program in MANY_VIEWS for where in LEAST_SETTINGS),
    *(Case(many_tokens, where, refusal=(BudgetError, "activations")) for where in BELOW),
    *(Case(one_view_that_stays, where) for where in ABOVE),
    *(
        Case(
            views_of_all_that_a_forward_begins_with,
            where,
            refusal=(BudgetError, "still alive hold"),
        )
        for where in LEAST_SETTINGS
    ),
    *(Case(averages_of_a_prepared_model, where) for where in (PAGED, PLENTY, ROOMY)),
    *(Case(a_copy_is_plain_and_trains_by_itself, where) for where in (PAGED, PLENTY)),
    *(Case(copies_of_parts, where) for where in (PAGED, PLENTY)),
    *(Case(copies_of_parametrized_layers, where) for where in ({"hbm": 45_000}, PLENTY)),
    Case(a_copy_there_is_no_room_for, DISK, refusal=(BudgetError, "a copy of the model")),
]
