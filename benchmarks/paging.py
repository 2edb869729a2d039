"""What benchmarks look at in a prepared model."""

from __future__ import annotations

from torch import nn

from hetero.api import engine_of
from hetero.errors import StateError
from hetero.train.engine.paged import Paged


def paged_of(model: nn.Module) -> Paged:
    """Return the residence of a model whose parameters page; raises StateError for any other."""
    residence = engine_of(model).residence
    if not isinstance(residence, Paged):
        raise StateError("the model is resident", advice="give it a smaller hbm=")
    return residence
