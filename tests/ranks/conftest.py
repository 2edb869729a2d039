"""What tests of several ranks share."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from torch import nn

from hetero.parallel import splitting
from hetero.parallel.anatomy import Anatomy, Call, Products, examine
from hetero.train.gradients import crossing


@pytest.fixture
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let buckets of a few kilobytes cross in many parts, as large ones do."""
    monkeypatch.setattr(crossing, "LEAST_PART", 256)


@pytest.fixture
def one_anatomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks that split the GPT of `test_split` have the anatomy that this process finds once:
    it is the same on all of them, and takes most of a split."""
    known, anatomy = anatomy_of_gpt()

    def examined(model: nn.Module, call: Call, clock: Any, loss: Any = None) -> Anatomy:
        if loss is None and type(clock) is Products and asked(model, call) == known:
            return anatomy
        return examine(model, call, clock, loss)

    monkeypatch.setattr(splitting, "examine", examined)


@cache
def anatomy_of_gpt() -> tuple[Any, Anatomy]:
    from tests.ranks.test_split import made, words

    model, call = made("gpt"), Call((words(0)[:1],))
    return asked(model, call), examine(model, call, Products())


def asked(model: nn.Module, call: Call) -> Any:
    """Return all that an anatomy depends on: code is that of the classes."""
    params = [(name, p.shape, p.dtype) for name, p in model.named_parameters()]
    tensors = [(arg.shape, arg.dtype) for arg in call.args]
    return type(model), repr(model), getattr(model, "config", None), params, tensors, call.kwargs
