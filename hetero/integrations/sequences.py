"""Batches of which ranks have parts, or the same rows, under accelerate and Trainer (floor 4).

[Note: what parts are given]  A rank's part of a sequence has no mask, no neighbours and no first
position. Trainer cuts inputs, labels that are shifted before, and positions, and drops masks. Where
that would say something else than the whole sequences, the batch is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import nn

from hetero.errors import ConfigError
from hetero.parallel.context import IGNORED

WORDS, LABELS, SHIFTED = "input_ids", "labels", "shift_labels"
PLACES, MASK = "position_ids", "attention_mask"
KNOWN = (WORDS, LABELS, SHIFTED, PLACES, MASK)
KERNEL = "sdpa"
"""The attention of transformers' models that is `scaled_dot_product_attention`."""


@contextmanager
def each_batch_once(accelerator: Any, n_alike: int) -> Iterator[None]:
    """Let ``accelerator.gather`` drop the rows of ranks that have another one's batch.

    Args:
        n_alike: ranks that follow each other and have the same batch.
    """
    if n_alike == 1:
        yield
        return
    every, n_ranks = accelerator.gather, accelerator.num_processes

    def first(rows: torch.Tensor) -> torch.Tensor:
        by_rank: torch.Tensor = rows.unflatten(0, (n_ranks, -1))
        return by_rank[::n_alike].flatten(0, 1)

    accelerator.gather = lambda data: recursively_apply(first, every(data))
    try:
        yield
    finally:
        del accelerator.gather


def whole_loss(accelerator: Any, loss: torch.Tensor, sizes: tuple[int, int]) -> torch.Tensor:
    """Return the mean of the losses of all ranks that have this one's sequences. Collective.

    Args:
        sizes: the ranks of a sequence, and those of a tensor, which follow each other.
    """
    of_all = accelerator.gather(loss).unflatten(0, (-1, *sizes))
    mine = accelerator.process_index // (sizes[0] * sizes[1])
    found: torch.Tensor = of_all[mine, :, 0].mean()
    return found


# -- what is refused -------------------------------------------------------------------------------


def check_losses(smoothing: float, own: Any) -> None:
    """Refuse losses of Trainer that shift labels themselves, in each part."""
    given = {"label_smoothing_factor": smoothing, "compute_loss_func": own}
    for name, value in given.items():
        if value:
            raise ConfigError(
                f"{name}={value!r} with parts of sequences: it would shift the labels of each part",
                advice=f"drop {name}, or write a loop: docs/context-parallel.md",
            )


def check_attention(model: nn.Module) -> None:
    """Refuse attention that would see a rank's own part alone."""
    kernel = getattr(getattr(model, "config", None), "_attn_implementation", KERNEL)
    if kernel != KERNEL:
        raise ConfigError(
            f"attn_implementation={kernel!r} sees a rank's own part of a sequence alone",
            advice=f"load the model with attn_implementation={KERNEL!r}",
        )


def refuse_logits() -> None:
    """Refuse logits of an evaluation."""
    raise ConfigError(
        "logits of an evaluation, which ranks have of parts of sequences, each in an order of its"
        " own",
        advice="evaluate the loss alone: prediction_loss_only=True, and no compute_metrics",
    )


# -- a batch ---------------------------------------------------------------------------------------


def whole_inputs(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a batch with what parts cannot know, in tensors that may be cut.

    See [Note: what parts are given]. Raises ConfigError for what cannot be told to parts.
    """
    words: Any = inputs.get(WORDS)
    odd = [name for name, value in inputs.items() if name not in KNOWN and is_tensor(value)]
    if odd or not is_tensor(words):
        raise ConfigError(
            f"a batch with {odd[0] if odd else 'no ' + WORDS!s}, which is not cut into parts of"
            " sequences",
            advice=f"leave {', '.join(KNOWN)} in it alone, by the data collator",
        )
    found = {name: value for name, value in inputs.items() if name != MASK}
    check_mask(inputs.get(MASK), inputs.get(SHIFTED, inputs.get(LABELS)))
    if LABELS in inputs and SHIFTED not in inputs and shifts_labels(model):
        after = nn.functional.pad(inputs[LABELS], (0, 1), value=IGNORED)
        found[SHIFTED] = after[:, 1:]
    places = torch.arange(words.shape[1], device=words.device).expand(words.shape)
    if not torch.equal(found.setdefault(PLACES, places), places):
        raise ConfigError(
            f"{PLACES} that do not count from 0: several texts in a sequence, of which attention"
            " over parts would see each other",
            advice="give sequences of one text, padded at their ends",
        )
    return {k: v.clone() if is_tensor(v) else v for k, v in found.items()}


def is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def shifts_labels(model: nn.Module) -> bool:
    """Whether a model's loss is of the next word of each; it takes labels that are shifted."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    return LOSS_MAPPING.get(getattr(model, "loss_type", "")) is ForCausalLMLoss


def check_mask(mask: Any, labels: Any) -> None:
    """Refuse a mask that says more than which words at the ends do not count."""
    if mask is None:
        return
    if mask.dim() == 2:
        counts = mask.bool()
        at_ends = bool((counts[:, 1:] <= counts[:, :-1]).all())
        if at_ends and (labels is None or bool((labels[~counts] == IGNORED).all())):
            return
    raise ConfigError(
        f"an {MASK} of {list(mask.shape)} that does more than leave out ends of sequences, where"
        f" labels are {IGNORED}: parts attend without masks",
        advice=f"pad on the right, with labels of {IGNORED}",
    )
