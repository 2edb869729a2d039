"""What programs do to an optimizer between prepare and step: its lists, its states, its class."""

from __future__ import annotations

import copy
import warnings
from functools import partial

import torch
from torch import Tensor, nn
from transformers.optimization import Adafactor

from hetero.errors import ConfigError
from tests.campaigns import optimizers
from tests.campaigns.harness import Case, Net, Program, Side, adamw, loss_of_tokens
from tests.campaigns.optimizers import Make

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


def stepped_by(make: Make, name: str) -> Program:
    """Return a program that does to an optimizer what training programs do."""

    def program(side: Side) -> None:
        net = Net(3, d=8)
        matrices = [p for p in net.parameters() if p.dim() > 1]
        others = [p for p in net.parameters() if p.dim() < 2]
        optimizer = make([{"params": matrices, "lr": 2e-2}, {"params": others}])
        model, optimizer = side.prepare(net, optimizer)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: n / 4)  # begins with 0
        for number in range(6):
            for part in range(2):
                loss = loss_of_tokens(model, 10 * number + part)
                loss.backward()
            side.record("loss", loss)
            if number == 2:
                net.norm.weight.grad = None
            optimizer.step()
            schedule.step()
            side.record_all(f"step {number}", model, optimizer)  # gradients as the step left them
            for group in optimizer.param_groups:
                side.record("settings", *(v for v in group.values() if isinstance(v, (int, float))))
            optimizer.zero_grad(set_to_none=number % 2 == 0)
            if number == 3:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    program.__name__ = name
    return program


def refused_by(make: Make, name: str) -> Program:
    def program(side: Side) -> None:
        net, other = Net(2, d=8), {"lr": 5e-2} if make is not torch.optim.LBFGS else {}
        params = list(net.parameters())
        groups = [{"params": params[:3]}, {"params": params[3:], **other}] if other else params
        side.prepare(net, make(groups))

    program.__name__ = name
    return program


FOREIGN: dict[str, Make] = {
    "Lamb": partial(optimizers.Lamb, max_grad_norm=None),
    "AdamP": optimizers.AdamP,
    "Lion": optimizers.Lion,
    "Slow": optimizers.Slow,
    "Remembering": optimizers.Remembering,
    "Renamed": optimizers.Renamed,
    "Clipping": optimizers.Clipping,
    "Clipping_foreach": partial(optimizers.Clipping, foreach=True),
    "Adafactor_of_transformers": partial(Adafactor, lr=1e-2, relative_step=False),
    "Adafactor_with_a_mean": partial(Adafactor, lr=1e-2, relative_step=False, beta1=0.9),
}
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
    *(Case(stepped_by(make, name), SMALL) for name, make in FOREIGN.items()),
    *(
        Case(refused_by(make, make.__name__), {}, (ConfigError, f"is not supported: .*{words}"))
        for make, words in optimizers.REFUSED
    ),
]
