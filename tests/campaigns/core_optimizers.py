"""What programs do to an optimizer between prepare and step: its lists, its states, its class."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from hetero.errors import ConfigError
from tests.campaigns.harness import Case, Net, Side, adamw

SMALL = {"hbm": 30_000, "activations": "keep"}  # pages; every case below fits


def started(side: Side) -> tuple[Net, torch.optim.Optimizer]:
    """Return a small model after two steps, so that it pages and has states."""
    net = Net(2, d=8)
    model, optimizer = side.prepare(net, adamw(net))
    side.train(model, optimizer, steps=2)
    return model, optimizer


def extra_appended(side: Side) -> None:
    model, optimizer = started(side)
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(3)))
    side.train(model, optimizer)


def entry_replaced(side: Side) -> None:
    model, optimizer = started(side)
    params = optimizer.param_groups[0]["params"]
    params[1] = nn.Parameter(torch.ones_like(params[1]))
    side.train(model, optimizer)


def group_appended(side: Side) -> None:
    model, optimizer = started(side)
    group = {**optimizer.param_groups[0], "params": [nn.Parameter(torch.ones(3))]}
    optimizer.param_groups.append(group)
    side.train(model, optimizer)


def entries_removed(side: Side) -> None:
    model, optimizer = started(side)
    params = optimizer.param_groups[0]["params"]
    gone = [params[1], params[5]]
    del params[5], params[1]
    for param in gone:  # torch cannot name a state of a parameter that is in no group
        del optimizer.state[param]
    side.train(model, optimizer)


def entry_moved_to_another_group(side: Side) -> None:
    model, optimizer = started(side)
    first = optimizer.param_groups[0]
    optimizer.param_groups.append({**first, "params": [first["params"].pop()], "lr": 0.5})
    side.train(model, optimizer)


def entry_twice(side: Side) -> None:
    model, optimizer = started(side)
    params = optimizer.param_groups[0]["params"]
    params.append(params[3])
    side.train(model, optimizer)


def entry_twice_before_prepare(side: Side) -> None:
    net = Net(2, d=8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = torch.optim.AdamW([*net.parameters(), net.norm.weight], lr=1e-2)
    model, optimizer = side.prepare(net, optimizer)
    side.train(model, optimizer)


class Empty(nn.Module):
    """Nothing but parameters without elements."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0, d))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.a.sum() + self.b.sum()


class HalfEmpty(nn.Module):
    """Parameters without elements beside one that is never used."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.a, self.unused = nn.Parameter(torch.empty(0)), nn.Linear(d, d)
        self.b = nn.Parameter(torch.empty(0, d))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.a.sum() + self.b.sum()


def empty_parameters(side: Side) -> None:
    for kind in (Empty, HalfEmpty):
        for rule in (torch.optim.AdamW, torch.optim.Adadelta, torch.optim.Rprop):
            net = Net(2, d=8, block=kind)
            model, optimizer = side.prepare(net, rule(net.parameters()))
            side.train(model, optimizer, steps=3)


NOT_OURS = (ConfigError, r"shape \[.*\] is not of the prepared model")
TWICE = (ConfigError, "is in the optimizer's groups twice")
CASES = [
    Case(extra_appended, SMALL, NOT_OURS),
    Case(entry_replaced, SMALL, NOT_OURS),
    Case(group_appended, SMALL, NOT_OURS),
    Case(extra_appended, {"hbm": None}, NOT_OURS),
    Case(entries_removed, SMALL),
    Case(entries_removed, {"hbm": None}),
    Case(entry_moved_to_another_group, SMALL),
    Case(entry_twice, SMALL, TWICE),
    Case(entry_twice_before_prepare, SMALL, TWICE),
    Case(empty_parameters, {"hbm": 16_000, "activations": "keep"}),
]
