"""Models that a Trainer of hetero's takes, and what it refuses of them (floor 4)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from hetero.errors import CheckpointMismatch, ConfigError
from hetero.integrations.prepared import is_prepared
from hetero.parallel.mesh import parts_of
from hetero.train.engine.check import check_model

STATES = "optimizer.pt"
"""Stock Trainer's file of the optimizer's states."""


def has_adapters(model: nn.Module) -> bool:
    """Whether a model is one of PEFT's, which saves only its adapters."""
    return hasattr(model, "peft_config")


def check_trainable(model: nn.Module) -> None:
    """Refuse a model that cannot be prepared, before anything is built.

    A prepared one is accepted: this Trainer releases it when it begins to train.
    """
    if is_prepared(model):
        return
    places = getattr(model, "hf_device_map", None) or {}
    if len(set(places.values())) > 1:
        raise ConfigError(
            f"the model lies on several devices: {sorted(map(str, set(places.values())))}",
            advice="load it without device_map: hetero brings parameters to the device",
        )
    method = getattr(model, "quantization_method", None)
    if method is not None:
        raise ConfigError(
            f"the model's weights are quantized ({getattr(method, 'value', method)})",
            advice="load it without quantization_config; with frozen='nf4' hetero codes frozen"
            " weights",
        )
    if (getattr(model, "tp_size", None) or 1) > 1:
        raise ConfigError(
            "transformers has divided the model (DistributedConfig, tp_plan): its save_pretrained"
            " waits for all ranks, and Trainer calls it on one",
            advice="divide it by hetero.parallel.tensor.parallelize(model, mesh), or train it with"
            " hetero.prepare in a loop",
        )
    check_model(model, parts=parts_of(model))


def check_adapters(model: nn.Module, args: Any) -> None:
    """Refuse to save states of adapters of which ranks have parts: Trainer's file is one rank's."""
    saves = getattr(args.save_strategy, "value", args.save_strategy) != "no"
    if has_adapters(model) and parts_of(model).kinds and saves and not args.save_only_model:
        raise ConfigError(
            "adapters on a tensor parallel model: Trainer saves the states of their optimizer from"
            " one rank, which has parts of them",
            advice="set TrainingArguments(save_only_model=True), or save_strategy='no'",
        )


def check_states(checkpoint: str | None, model: nn.Module) -> None:
    """Refuse stock Trainer's file of states if ranks have parts of them."""
    if checkpoint is None or not parts_of(model).kinds:
        return
    if (Path(checkpoint) / STATES).exists():
        raise CheckpointMismatch(
            f"{checkpoint} cannot be resumed from: its {STATES} has states of whole tensors, and"
            " ranks have parts of the model's",
            advice=f"resume from a checkpoint that hetero.trainer wrote; without {STATES} the"
            " weights are taken, and the optimizer begins afresh",
        )
