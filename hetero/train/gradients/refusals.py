"""Gradients that are refused, by name (floor 2)."""

from __future__ import annotations

from typing import Any

import torch

from hetero.errors import ConfigError, StateError


def assert_dense(grad: Any, name: str) -> None:
    """Refuse gradients that are not plain strided tensors, by name."""
    if isinstance(grad, torch.Tensor) and grad.layout is not torch.strided:
        raise ConfigError(
            f"the gradient of {name!r} is {grad.layout}",
            advice="build the module with sparse=False; hetero trains dense gradients",
        )


def scaled_graph(name: str) -> StateError:
    """Return the error for a gradient with a graph, under loss scaling."""
    return StateError(
        f"the gradient of {name!r} has a graph (create_graph=True), which loss scaling would leave"
        " scaled",
        advice="use torch.autograd.grad for the inner gradient, or precision='bf16'",
    )


def shared_graph(name: str) -> StateError:
    """Return the error for a gradient with a graph that other ranks add to."""
    return StateError(
        f"the gradient of {name!r} has a graph (create_graph=True), and gradients are summed over"
        " ranks",
        advice="use torch.autograd.grad for the inner gradient",
    )
