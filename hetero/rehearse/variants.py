"""What a plan adds to a model: low-rank adapters, and an optimizer by name (floor 4)."""

from __future__ import annotations

import difflib

import torch
from torch import nn

from hetero.errors import ConfigError
from hetero.integrations.adapters import with_adapters
from hetero.recipes.optimizers import OPTIMIZERS
from hetero.rehearse.models import META
from hetero.rehearse.twin import twin_of


def adapted(
    model: nn.Module, rank: int, optimizer: torch.optim.Optimizer | str | None
) -> nn.Module:
    """Return a twin of the model, frozen, with low-rank adapters at all linear modules.

    ConfigError for an optimizer that is made already: it is over other parameters.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            "the optimizer is not over the adapters that lora_rank= plans",
            advice="name one, as optimizer='adamw', or pass a model that has adapters",
        )
    twin = twin_of(model).model  # PEFT changes what it is given
    with META:
        return with_adapters(twin, rank)


def named(optimizer: str, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that `hetero train` makes of a name, over what is trained."""
    if optimizer not in OPTIMIZERS:
        near = difflib.get_close_matches(optimizer, OPTIMIZERS, n=1)
        hint = f", did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"optimizer={optimizer!r} is none that hetero makes by name{hint}",
            advice=f"name one of {', '.join(OPTIMIZERS)}, or pass an optimizer",
        )
    kind, more = OPTIMIZERS[optimizer]
    made: torch.optim.Optimizer = kind([p for p in model.parameters() if p.requires_grad], **more)
    return made
