"""Modes, compilers and tracers around a prepared model: right, or a typed error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import hetero
from hetero.errors import ConfigError, StateError
from tests.campaigns.harness import Block, Case, Net, Side, adamw, loss_of_tokens, tokens_of

PAGED = {"hbm": 250_000, "activations": "keep"}
PLENTY = {"hbm": 2_000_000}
SMALL: dict[str, Any] = {}


def net_of(side: Side) -> tuple[Any, Any]:
    net = Net(3)
    return side.prepare(net, adamw(net))


# -- compilers ---------------------------------------------------------------------------------


def eager(what: Any) -> Any:
    return torch.compile(what, backend="eager")


def blocks_that_are_compiled_in_place(side: Side) -> None:
    model, optimizer = net_of(side)
    for block in model.blocks:
        block.compile(backend="eager")
    side.train(model, optimizer)
    side.record("compiled", *(b._compiled_call_impl is not None for b in model.blocks))


def parts_of_blocks_that_are_compiled_in_place(side: Side) -> None:
    model, optimizer = net_of(side)
    for block in model.blocks:
        block.up.compile(backend="eager")
    side.train(model, optimizer)


def a_whole_model_that_is_compiled_in_place(side: Side) -> None:
    model, optimizer = net_of(side)
    model.compile(backend="eager")
    side.train(model, optimizer)


def a_whole_model_that_is_compiled(side: Side) -> None:
    model, optimizer = net_of(side)
    compiled = eager(model)
    side.train(model, optimizer, lambda _, number: loss_of_tokens(compiled, number))


def a_loss_that_is_compiled(side: Side) -> None:
    model, optimizer = net_of(side)
    side.train(model, optimizer, eager(loss_of_tokens))


def a_compiled_function_of_parameters(side: Side) -> None:
    model, optimizer = net_of(side)
    penalty = eager(lambda weight: weight.pow(2).sum())

    def loss_of(model: nn.Module, number: int) -> Tensor:
        return loss_of_tokens(model, number) + sum(penalty(b.up.weight) for b in model.blocks)

    side.train(model, optimizer, loss_of)


COMPILED = [
    blocks_that_are_compiled_in_place,
    parts_of_blocks_that_are_compiled_in_place,
    a_whole_model_that_is_compiled_in_place,
    a_whole_model_that_is_compiled,
    a_loss_that_is_compiled,
    a_compiled_function_of_parameters,
]


# -- tracers -----------------------------------------------------------------------------------


@torch.jit.script
def scripted(weight: Tensor) -> Tensor:
    return (weight * weight).sum()


def a_script_function_of_a_parameter(side: Side) -> None:
    model, optimizer = net_of(side)

    def loss_of(model: nn.Module, number: int) -> Tensor:
        return loss_of_tokens(model, number) + scripted(model.blocks[number % 3].up.weight)

    side.train(model, optimizer, loss_of)


def a_symbolic_trace(side: Side) -> None:
    model, optimizer = net_of(side)
    traced = torch.fx.symbolic_trace(model)
    side.train(model, optimizer, lambda _, number: loss_of_tokens(traced, number))


def an_exported_program(side: Side) -> None:
    model, optimizer = net_of(side)
    side.train(model, optimizer, steps=2)
    exported = torch.export.export(model, (tokens_of(0),), strict=False).module()
    side.record("exported", exported(tokens_of(1)))
    side.train(model, optimizer, steps=2)


def a_program_exported_for_any_batch(side: Side) -> None:
    """Larger than what the budget holds: what is exported has shapes and no bytes."""
    model, optimizer = net_of(side)
    side.train(model, optimizer, steps=2)
    batch = torch.export.Dim("batch", min=2, max=10**6)
    tokens = torch.zeros(100_000, 7, dtype=torch.long)
    fixed, any_ = (
        torch.export.export(model, (tokens,), dynamic_shapes=shapes, strict=False).module()
        for shapes in (None, {"tokens": {0: batch}})
    )
    side.record("exported", any_(tokens_of(1)))
    assert fixed is not None
    side.train(model, optimizer, steps=2)


def tracing(trace: Callable[[nn.Module], Any], name: str) -> Callable[[Side], None]:
    def program(side: Side) -> None:
        model, _ = net_of(side)
        trace(model)

    program.__name__ = name
    return program


REFUSED = [
    tracing(lambda m: torch.jit.trace(m, (tokens_of(0),)), "a_traced_model"),
    tracing(lambda m: torch.jit.trace(m.blocks[0], (torch.ones(2, 32),)), "a_traced_block"),
    tracing(
        lambda m: torch.jit.trace(lambda x: x @ m.head.weight, (torch.ones(2, 23),)),
        "a_traced_function",
    ),
    tracing(torch.jit.script, "a_scripted_model"),
    tracing(lambda m: make_fx(lambda t: m(t))(tokens_of(0)), "a_model_traced_by_make_fx"),
    tracing(lambda m: make_fx(m.blocks[0])(torch.ones(2, 32)), "a_block_traced_by_make_fx"),
    tracing(
        lambda m: make_fx(lambda x: x @ m.head.weight)(torch.ones(2, 23)),
        "a_function_traced_by_make_fx",
    ),
]


# -- modes -------------------------------------------------------------------------------------


def prepared_and_released_in_inference_mode(side: Side) -> None:
    net = Net(3)
    with torch.inference_mode():
        model, optimizer = side.prepare(net, adamw(net))
        side.record("before", model(tokens_of(0)))
    side.train(model, optimizer, steps=2)
    with torch.inference_mode():
        if not side.is_plain:
            model, optimizer = hetero.release(model, optimizer)
        side.record("after", model(tokens_of(0)))
    side.train(model, optimizer, steps=2)


def made_in_inference_mode(side: Side) -> None:
    with torch.inference_mode():
        net_of(side)


def denormals_that_are_flushed_from_the_third_step_on(side: Side) -> None:
    model, optimizer = net_of(side)
    for group in optimizer.param_groups:
        group["lr"] = 1e-3

    def loss_of(model: nn.Module, number: int) -> Tensor:
        return loss_of_tokens(model, number) * 1e-18  # squares of gradients are denormal

    try:
        side.train(model, optimizer, loss_of, steps=2)
        torch.set_flush_denormal(True)
        side.train(model, optimizer, loss_of, steps=2)
        side.record("last", *model.parameters())
    finally:
        torch.set_flush_denormal(False)
    side.train(model, optimizer, loss_of, steps=1)


def what_parameters_look_like(side: Side) -> None:
    model, optimizer = net_of(side)
    for shown in (str, repr, "{}".format):
        for param in (model.norm.weight, model.head.bias.requires_grad_(False)):
            side.record(shown(param).replace("\n", " "))
    side.train(model, optimizer, steps=2)
    side.record(repr(model.norm.weight))


# -- buffers -----------------------------------------------------------------------------------


class Graph(Block):
    """A block that mixes positions by a sparse adjacency."""

    def __init__(self, layout: torch.layout = torch.sparse_coo) -> None:
        super().__init__()
        dense = torch.eye(14) + torch.roll(torch.eye(14), 1, 0) * 0.5
        self.register_buffer("adjacency", dense.to_sparse(layout=layout))

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.sparse.mm(self.adjacency, x.flatten(0, 1)).view_as(x)
        return super().forward(mixed)


def graphs(layout: torch.layout, name: str) -> Callable[[Side], None]:
    def program(side: Side) -> None:
        net = Net(3, block=lambda: Graph(layout))
        model, optimizer = side.prepare(net, adamw(net))
        for number in range(3):
            loss_of_tokens(model, number).backward()
            side.record("gradients", *(p.grad for p in model.parameters()))
            optimizer.step()
            optimizer.zero_grad()
        if not side.is_plain:
            model, optimizer = hetero.release(model, optimizer)
        side.record("parameters", *model.parameters())
        side.record("layout", model.blocks[0].adjacency.layout is layout)

    program.__name__ = name
    return program


class Bilinear(nn.Module):
    """Autocast casts what its one operation is made of, and not the operation."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Bilinear(32, 32, 32)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x + self.both(x, torch.tanh(x))


def bilinear_layers_under_autocast(side: Side) -> None:
    net = Net(2, block=Bilinear)
    side.train(*side.prepare(net, adamw(net)))


CASES = [
    *(
        Case(bilinear_layers_under_autocast, {"device": "cpu:sim", **more})
        for more in ({}, {"hbm": 10_000_000, "activations": "recompute"})
    ),
    *(Case(program, where) for program in COMPILED for where in (PAGED, PLENTY)),
    *(Case(program, PAGED, refusal=(StateError, "torch.jit")) for program in REFUSED),
    *(Case(p, PAGED) for p in (a_script_function_of_a_parameter, a_symbolic_trace)),
    *(
        Case(program, {**PAGED, **more})
        for program in (an_exported_program, a_program_exported_for_any_batch)
        for more in ({}, {"activations": "recompute"}, {"activations": "auto", "device": "cpu:sim"})
    ),
    *(Case(prepared_and_released_in_inference_mode, where) for where in (PAGED, PLENTY)),
    Case(made_in_inference_mode, PAGED, refusal=(ConfigError, "inference tensor")),
    *(Case(denormals_that_are_flushed_from_the_third_step_on, w) for w in (PAGED, PLENTY)),
    *(Case(what_parameters_look_like, where) for where in (PAGED, PLENTY)),
    Case(graphs(torch.sparse_coo, "a_sparse_adjacency"), SMALL),
    Case(graphs(torch.sparse_csr, "a_sparse_adjacency_by_rows"), PAGED),
]
