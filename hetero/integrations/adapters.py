"""Low-rank adapters of PEFT for any module, so that a plan may have them (floor 4)."""

from __future__ import annotations

from torch import nn

from hetero.errors import ConfigError
from hetero.recipes.options import installed


def with_adapters(model: nn.Module, rank: int) -> nn.Module:
    """Return the model frozen, with adapters of this rank at all its linear modules."""
    with installed("lora_rank= needs PEFT"):
        from peft import LoraConfig, get_peft_model
    kind = "CAUSAL_LM" if hasattr(model, "prepare_inputs_for_generation") else None
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=linear_of(model), task_type=kind
    )
    try:
        found: nn.Module = get_peft_model(model, config)
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
