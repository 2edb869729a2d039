"""Copies of a prepared model, as for averages: plain modules with the values of the moment."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

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


def a_copy_there_is_no_room_for(side: Side) -> None:
    net = Net(6)
    model, _ = side.prepare(net, adamw(net))
    copy.deepcopy(model)


CASES = [
    *(Case(averages_of_a_prepared_model, where) for where in (PAGED, PLENTY, ROOMY)),
    *(Case(a_copy_is_plain_and_trains_by_itself, where) for where in (PAGED, PLENTY)),
    *(Case(copies_of_parts, where) for where in (PAGED, PLENTY)),
    Case(a_copy_there_is_no_room_for, DISK, refusal=(BudgetError, "a copy of the model")),
]
