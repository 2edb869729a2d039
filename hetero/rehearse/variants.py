"""What a plan adds to a model: low-rank adapters, and an optimizer by name (floor 4)."""

from __future__ import annotations

import difflib

import torch
from torch import nn

from hetero.errors import ConfigError
from hetero.recipes.options import installed
from hetero.recipes.setup import OPTIMIZERS
from hetero.rehearse.models import META
from hetero.rehearse.twin import twin_of


def adapted(model: nn.Module, rank: int) -> nn.Module:
    """Return a twin of the model, frozen, with low-rank adapters of PEFT at all linear modules."""
    with installed("lora_rank= needs PEFT"):
        from peft import LoraConfig, get_peft_model
    twin = twin_of(model).model  # PEFT changes what it is given
    kind = "CAUSAL_LM" if hasattr(model, "prepare_inputs_for_generation") else None
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=linear_of(model))
    config.task_type = kind
    try:
        with META:
            found: nn.Module = get_peft_model(twin, config)  # type: ignore[arg-type]  # any module
    except ValueError as error:
        raise ConfigError(
            f"lora_rank: {error}", advice="plan a model with linear modules, or without adapters"
        ) from error
    return found


def linear_of(model: nn.Module) -> str | list[str]:
    """Return what PEFT finds all linear modules by: its own word, for models of transformers."""
    if hasattr(model, "get_output_embeddings"):
        return "all-linear"
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


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
