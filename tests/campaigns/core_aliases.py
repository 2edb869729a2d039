"""Tensors that share a parameter's, or a state's, memory in torch: writes through them count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.campaigns.harness import Case, Net, Side, adamw, loss_of_tokens

STEPS = 4
UP = "blocks.{}.up.weight"
SMALL: dict[str, Any] = {}
THIRD = {"hbm": 250_000, "activations": "keep"}  # replicas stay over steps
DISK = {"hbm": 200_000, "host": 500_000, "nvme": True, "activations": "keep"}


def write(alias: Tensor) -> None:
    """Write as users do to one tensor of a state dict."""
    alias[0] = 0.5
    alias.view(-1)[:3].fill_(0.25)
    alias.t().mul_(1.5)
    alias[1:3].copy_(torch.full_like(alias[1:3], 0.125))
    alias.mul_(0.5)


def train_and(side: Side, between: Callable[[nn.Module, Any, int], None]) -> None:
    """Train with something between the steps, then look at everything."""
    net = Net()
    model, optimizer = side.prepare(net, adamw(net))

    def loss_of(model: nn.Module, number: int) -> Tensor:
        if number:
            between(model, optimizer, number)
        return loss_of_tokens(model, number)

    side.train(model, optimizer, loss_of, STEPS)


def views_of_a_state_dict_are_written(side: Side) -> None:
    train_and(side, lambda model, _, number: write(model.state_dict()[UP.format(number)]))


def views_of_optimizer_states_are_written(side: Side) -> None:
    def between(model: nn.Module, optimizer: Any, number: int) -> None:
        param = model.blocks[number].up.weight
        write(optimizer.state[param]["exp_avg"])
        write(optimizer.state_dict()["state"][4]["exp_avg"])

    train_and(side, between)


def a_view_is_kept_and_follows_the_steps(side: Side) -> None:
    kept: list[Tensor] = []

    def between(model: nn.Module, optimizer: Any, number: int) -> None:
        if not kept:
            kept.append(model.state_dict()[UP.format(0)][1:])
            kept.append(optimizer.state[model.blocks[0].up.weight]["exp_avg"][1:])
        side.record("kept", *kept)
        kept[number % 2][0] = 0.01 * number

    train_and(side, between)


def numpy_writes_through_a_state_dict(side: Side) -> None:
    kept: list[Any] = []

    def between(model: nn.Module, _: Any, number: int) -> None:
        model.state_dict()[UP.format(number)].numpy()[:2] = 0.25  # the dict is gone at once
        if not kept:
            kept.append(model.state_dict()[UP.format(0)].numpy())
        kept[0][1] = 0.1 * number  # and this array stays

    train_and(side, between)


def data_of_a_state_dict_is_written(side: Side) -> None:
    def between(model: nn.Module, optimizer: Any, number: int) -> None:
        model.state_dict()[UP.format(number)].data.add_(0.01)
        optimizer.state_dict()["state"][4]["exp_avg"].data.add_(0.01)

    train_and(side, between)


PROGRAMS = [
    views_of_a_state_dict_are_written,
    views_of_optimizer_states_are_written,
    a_view_is_kept_and_follows_the_steps,
    numpy_writes_through_a_state_dict,
    data_of_a_state_dict_is_written,
]
CASES = [Case(program, where) for program in PROGRAMS for where in (SMALL, THIRD, DISK)]
