"""The mode of the user's code is left while code of ours runs (floor 0).

[Note: the user's mode]  What torch makes in `torch.inference_mode` may not be written outside of
it, nor saved for backward. Memory, views and numbers that hetero makes during a user's evaluation
serve later steps, and other threads of ours write to them at once. So every call by which the
user's code comes in leaves the mode, and returns to it where it calls the user's code. A backward
pass in the mode is refused: autograd would make its gradients there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ParamSpec, TypeVar

import torch

from hetero.errors import StateError

P = ParamSpec("P")
R = TypeVar("R")

_SAME = nullcontext()


def own_mode() -> AbstractContextManager[None]:
    """Leave inference mode inside a block; no gradients are recorded there, as in that mode."""
    return _left() if torch.is_inference_mode_enabled() else _SAME


@contextmanager
def _left() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():  # the former turns gradients on
        yield


def refuse_backward() -> None:
    """Raise StateError for a backward pass in inference mode: what autograd makes there is its."""
    if torch.is_inference_mode_enabled():
        raise StateError(
            "a backward pass of a prepared model runs in torch.inference_mode, which makes"
            " gradients that no step takes",
            advice="call backward outside of the block, or use torch.no_grad() for what is around",
        )


def in_own_mode(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function in `own_mode`."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_inference_mode_enabled():  # 0.1 us, on the hot path
            return function(*args, **kwargs)
        with _left():
            return function(*args, **kwargs)

    return call
