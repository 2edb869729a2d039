"""What shares a parameter's memory before `prepare`: refused by name, or told."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hetero.errors import ConfigError
from tests.campaigns.harness import Case, Net, Side, adamw

SMALL: dict[str, Any] = {}


def sharing(share: Callable[[nn.Module], Any], name: str) -> Callable[[Side], None]:
    """Return a program that trains a model after something was made of its parameters."""

    def program(side: Side) -> None:
        net = Net(3)
        kept = share(net)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model, optimizer = side.prepare(net, adamw(net))
        side.train(model, optimizer, steps=2)
        del kept

    program.__name__ = name
    return program


def codebook(net: nn.Module) -> None:
    net.register_buffer("codebook", net.embed.weight.data)


def transposed(net: nn.Module) -> None:
    net.head.transposed = [net.head.weight.detach().t()]


def flat(net: nn.Module) -> None:
    """Make parameters pieces of a buffer, and keep the buffer."""
    params = list(net.parameters())
    net.flat, at = torch.empty(sum(p.numel() for p in params)), 0
    for param in params:
        piece = net.flat[at : at + param.numel()].view_as(param)
        param.data, at = piece.copy_(param.data), at + param.numel()


def shared_by_torch(net: nn.Module) -> Any:
    """What has nothing of a parameter's bytes."""
    net.blocks[0].register_buffer("codebook", net.embed.weight.detach().clone())
    net.blocks[0].tied = [net.embed.weight]
    net.blocks[2].up.weight = net.blocks[1].up.weight
    loaded = {k: v.clone() for k, v in net.state_dict().items()}
    net.load_state_dict(loaded)
    return loaded, copy.deepcopy(net)


REFUSED = [(codebook, "codebook"), (transposed, "head.transposed"), (flat, "flat")]
TOLD: list[tuple[Callable[[nn.Module], Any], str]] = [
    (lambda net: net.state_dict(), "a_state_dict_that_is_kept"),
    (lambda net: net.head.weight.data, "data_that_is_kept"),
    (lambda net: net.embed.weight.detach().t(), "a_view_that_is_kept"),
]
CASES = [
    *(
        Case(sharing(share, name.rpartition(".")[2]), SMALL, refusal=(ConfigError, f"'{name}' sha"))
        for share, name in REFUSED
    ),
    *(
        Case(sharing(share, name), SMALL, refusal=(UserWarning, "held outside the model"))
        for share, name in TOLD
    ),
    Case(sharing(shared_by_torch, "what_shares_no_bytes"), SMALL),
]
