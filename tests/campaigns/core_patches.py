"""Forwards that a user replaces after `prepare`: they stay, until and after release."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import Tensor, nn

import hetero
from tests.campaigns.harness import Block, Case, Net, Side, adamw

PLENTY = {"hbm": 2_000_000}  # everything fits: resident from the second step on
SMALL = {"hbm": 250_000, "activations": "keep"}


def doubled(module: nn.Module) -> None:
    """Patch a forward as accelerate does."""
    old = module.forward

    @functools.wraps(old)
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        return old(*args, **kwargs) * 2.0

    module.forward = forward


def replaced(block: nn.Module) -> None:
    """Patch a forward as kernels libraries do: the old one is not called."""

    def forward(self: Block, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))

    block.forward = types.MethodType(forward, block)


def release(side: Side, model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    return (model, optimizer) if side.is_plain else hetero.release(model, optimizer)


def patched(side: Side, patch: Any, of: Any, undo: Any = None) -> None:
    """Train, patch, train, perhaps take the patch off, train, release, train."""
    net = Net(3)
    model, optimizer = side.prepare(net, adamw(net))
    before = of(model).__dict__.get("forward")
    patch(of(model))
    side.train(model, optimizer, steps=3)
    if undo is not None:
        undo(of(model), before)
        side.train(model, optimizer, steps=2)
    model, optimizer = release(side, model, optimizer)
    side.record("patch", "forward" in of(model).__dict__)
    side.train(model, optimizer, steps=2)


def whole(model: nn.Module) -> nn.Module:
    return model


def block(model: nn.Module) -> nn.Module:
    return model.blocks[1]


def deleted(module: nn.Module, _: Any) -> None:
    del module.forward


def put_back(module: nn.Module, before: Any) -> None:
    """Undo a patch as accelerate does: by what was there, which was none in torch."""
    if before is None:
        del module.forward
    else:
        module.forward = before


def a_patch_of_the_model(side: Side) -> None:
    patched(side, doubled, whole)


def a_patch_of_a_block(side: Side) -> None:
    patched(side, doubled, block)


def a_forward_of_a_block_that_is_replaced(side: Side) -> None:
    patched(side, replaced, block)


def a_patch_that_is_deleted(side: Side) -> None:
    patched(side, doubled, block, deleted)


def a_patch_of_the_model_that_is_deleted(side: Side) -> None:
    patched(side, doubled, whole, deleted)


def a_patch_that_is_put_back(side: Side) -> None:
    patched(side, doubled, block, put_back)


def a_patch_of_a_class(side: Side) -> None:
    class Own(Block):
        pass

    def forward(self: Block, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))

    net = Net(3, block=Own)
    model, optimizer = side.prepare(net, adamw(net))
    side.train(model, optimizer, steps=1)
    Own.forward = forward
    side.train(model, optimizer, steps=2)
    model, optimizer = release(side, model, optimizer)
    side.train(model, optimizer, steps=2)


def a_state_dict_method_that_is_patched(side: Side) -> None:
    net = Net(3)
    model, optimizer = side.prepare(net, adamw(net))
    inner = model.blocks[0].up
    old = inner._save_to_state_dict

    def save(destination: Any, prefix: str, keep_vars: bool) -> None:
        old(destination, prefix, keep_vars)
        destination[prefix + "more"] = torch.ones(2)

    inner._save_to_state_dict = save
    side.train(model, optimizer, steps=3)
    model, optimizer = release(side, model, optimizer)
    side.train(model, optimizer, steps=2)


PROGRAMS = [
    a_patch_of_the_model,
    a_patch_of_a_block,
    a_forward_of_a_block_that_is_replaced,
    a_patch_that_is_deleted,
    a_patch_of_the_model_that_is_deleted,
    a_patch_that_is_put_back,
    a_patch_of_a_class,
    a_state_dict_method_that_is_patched,
]
CASES = [Case(program, where) for program in PROGRAMS for where in (PLENTY, SMALL)]
