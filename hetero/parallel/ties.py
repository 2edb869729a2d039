"""Weights that an embedding and a head share, in a pipeline (floor 3).

In one process every micro-batch adds the head's and the embedding's gradient before they add up
with those of others. Apart, ranks would have to send one another a gradient of that size for each
micro-batch to come to the same bits. torch's schedules have no place for that, so both uses are
on one rank, whose stages then share the weight, or the model is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hetero.crc import crc32
from hetero.errors import ConfigError
from hetero.members import Members
from hetero.parallel.stages import Cut
from hetero.train.model.units import inside

UNTIE = (
    "give the head a weight of its own (tie_word_embeddings=False, or tied_head=False, and copy the"
    " embedding's into it), or use a schedule whose first rank has the last stage too"
    " (ZBVZeroBubble, DualPipeV)"
)
LOOKED_AT_BYTES = 4096
"""Of a weight: equal ones by chance do not begin with that many equal bytes."""


def check_ties(model: nn.Module, cut: Cut) -> None:
    """Raise ConfigError if stages of several ranks have one weight."""
    for shared in shared_weights(model, cut):
        places = [(stage.rank, name) for name in shared for stage in holders(cut, name)]
        if len({rank for rank, _ in places}) > 1:
            (one, name), (other, again) = places[0], places[-1]
            raise ConfigError(
                f"{name!r} and {again!r} are one weight, and their stages are on ranks {one} and"
                f" {other} of the pipeline",
                advice=UNTIE,
            )


def shared_weights(model: nn.Module, cut: Cut) -> Iterator[list[str]]:
    """Yield the names of each weight that several stages have."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    for shared in names.values():
        if len({stage.index for name in shared for stage in holders(cut, name)}) > 1:
            yield shared


def holders(cut: Cut, name: str) -> Iterator[Any]:
    return (stage for stage in cut.stages if any(inside(name, module) for module in stage.names))


# -- stages that were not cut by us --------------------------------------------------------------


def told(model: nn.Module) -> bytes:
    """Return what a rank tells of its embeddings and of weights that may be theirs."""
    rows = [
        [name, isinstance(module, nn.Embedding), list(module.weight.shape), begin_of(module.weight)]
        for name, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.Linear)) and has_numbers(module.weight)
    ]
    return json.dumps(rows).encode()


def has_numbers(weight: torch.Tensor) -> bool:
    return type(weight) is nn.Parameter and not weight.is_meta and weight.numel() > 1


def begin_of(weight: torch.Tensor) -> str:
    """Return the CRC of a weight's first bytes; "" if they say nothing, all numbers being one."""
    n = max(1, LOOKED_AT_BYTES // weight.element_size())
    some = weight.detach()[: -(-n // weight.shape[1])].flatten()[:n].cpu()
    if bool((some == some[0]).all()):
        return ""
    return f"{crc32(memoryview(some.view(torch.uint8).numpy())):08x}"


def check_told(rows: Sequence[bytes], n_stage: int, members: Members) -> None:
    """Raise ConfigError if an embedding of one stage is another stage's weight, too.

    Args:
        n_stage: ranks with the same stages, which follow each other.
    """
    seen: dict[str, tuple[int, str, bool]] = {}
    for rank, row in enumerate(rows[::n_stage]):
        for name, is_embedding, shape, begin in json.loads(row):
            if not begin:
                continue
            known, again, embeds = seen.setdefault(f"{shape} {begin}", (rank, name, is_embedding))
            if known != rank and (embeds or is_embedding):
                one, other = members.name(known * n_stage), members.name(rank * n_stage)
                raise ConfigError(
                    f"{again!r} of {one} and {name!r} of {other} have the same numbers: a tied"
                    " weight, whose gradients nothing adds up",
                    advice=f"{UNTIE}; if these are to be two weights, let their first numbers"
                    " differ",
                )
