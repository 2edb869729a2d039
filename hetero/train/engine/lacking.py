"""What an optimizer and settings ask of a model that it does not have (floor 2).

The stages of a pipeline have parts of one model: what one of them lacks, another may have. So this
is looked for before anything is laid out, and refused if all lack it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from hetero.config import Config
from hetero.errors import ConfigError
from hetero.memory.codec import CODECS
from hetero.train.engine.blueprint import codecs_of
from hetero.train.update.masters import working_dtypes

Lacking = Mapping[str, ConfigError]
"""Errors, by what is lacking."""


def lacking(model: nn.Module, optimizer: object, config: Config) -> Lacking:
    """Return what a model does not have, and is asked for."""
    found = dict(unnamed(model, config))
    if isinstance(optimizer, torch.optim.Optimizer) and not any(
        param.requires_grad for group in optimizer.param_groups for param in group["params"]
    ):
        found["trained"] = ConfigError(
            "the optimizer has no trainable parameter", advice="prepare without an optimizer"
        )
    if not CODECS[config.frozen].exact and not codecs_of(
        model, config, working_dtypes(model, config.precision, config.keep_fp32)
    ):
        found["frozen"] = ConfigError(
            f"frozen={config.frozen!r}, and no matrix of the model is frozen",
            advice="freeze the base model first (peft.get_peft_model does; model.requires_grad_"
            "(False) for inference), or drop frozen=",
        )
    return found


def unnamed(model: nn.Module, config: Config) -> Iterator[tuple[str, ConfigError]]:
    """Yield the patterns of settings that match no module."""
    first = [name for name, _ in model.named_modules()]  # of a module with several, as a unit's
    every = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for setting, patterns, names in (
        ("units", config.units or (), first),
        ("keep_fp32", config.keep_fp32, every),
        ("keep_exact", config.keep_exact, every),
    ):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                what = f"{setting}: {pattern!r}"
                yield (
                    what,
                    ConfigError(
                        f"{what} matches no module",
                        advice=f"names look like {', '.join(names[1:5])}",
                    ),
                )


def refuse_lacking(rows: Sequence[Lacking]) -> None:
    """Raise ConfigError for the first thing that every row is lacking."""
    first, *others = rows
    for what, error in first.items():
        if all(what in other for other in others):
            raise error
