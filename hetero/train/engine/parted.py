"""What a model whose parameters are parts of larger tensors cannot have yet (floor 2)."""

from __future__ import annotations

import torch
from torch import nn

from hetero.errors import ConfigError
from hetero.train.engine.check import pages
from hetero.train.model.parts import Parts
from hetero.train.update.rules import Rule


def check_parted(model: nn.Module, optimizer: torch.optim.Optimizer | None, parts: Parts) -> None:
    """Raise ConfigError for a rule that would need whole tensors."""
    parted = [name for name, param in pages(model) if parts.inside(param) is not None]
    if not parted:
        return
    rule = None if optimizer is None else Rule(optimizer)
    if rule is not None and not rule.steps_parts:
        raise ConfigError(
            f"{type(optimizer).__name__} may need whole tensors, and parameters, as {parted[0]!r},"
            " are parts of tensors that ranks divide: torch's operations in it refuse these",
            advice="use a rule that treats each element by itself (AdamW, SGD, Lion, Adagrad), or"
            " Muon, LAMB or LARS",
        )
    if rule is not None and not rule.elementwise and parts.device_type != "cpu":
        raise ConfigError(
            f"{type(optimizer).__name__} exchanges parts of tensors, as of {parted[0]!r}, on"
            f" {parts.device_type} devices, and its step would be in RAM",
            advice="use a rule that treats each element by itself: AdamW, SGD, Lion, Adagrad",
        )
