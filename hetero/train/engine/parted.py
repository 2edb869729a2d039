"""What a model whose parameters are parts of larger tensors cannot have yet (floor 2)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from hetero.config import Config
from hetero.errors import ConfigError
from hetero.train.engine.check import pages
from hetero.train.model.parts import Parts
from hetero.train.update.rules import Rule


def check_parted(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, config: Config, parts: Parts
) -> None:
    """Raise ConfigError for a setting, or a rule, that would need whole tensors, or that the ranks
    of a tensor would each decide for themselves."""
    parted = [name for name, param in pages(model) if parts.inside(param) is not None]
    if not parted:
        return
    for what, advice in refusals(config):
        raise ConfigError(
            f"{what}, and parameters, as {parted[0]!r}, are parts of tensors that ranks divide",
            advice=advice,
        )
    rule = None if optimizer is None else Rule(optimizer)
    if rule is not None and not rule.elementwise:
        raise ConfigError(
            f"{type(optimizer).__name__} may need whole tensors, and parameters, as {parted[0]!r},"
            " are parts of tensors that ranks divide",
            advice="use a rule that treats each element by itself: AdamW, SGD, Lion, Adagrad",
        )


def refusals(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each setting that is refused, with advice."""
    if config.updates == "backward":
        yield (
            "updates='backward' begins before gradients are summed over the ranks of a tensor",
            "leave updates= at its default",
        )
