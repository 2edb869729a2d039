"""A causal language model's head that leaves its logits to the loss (floor 1).

`LateLogits` replaces the head's output: a tensor of the right shape that is computed when its
numbers are read. The loss shared by Hugging Face's causal models does not read them: it is computed
from the hidden states with `linear_cross_entropy`. A model that uses its logits otherwise gets
them, and its own loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import nn

from hetero.errors import ConfigError
from hetero.functional.loss import linear_cross_entropy
from hetero.functional.words import words_of
from hetero.internals import make_wrapper, tree_map, without_torch_function

LOSS = "ForCausalLMLoss"  # of transformers, shared by its causal models
_METADATA = {
    *(getattr(torch.Tensor, name) for name in ("size", "dim", "numel", "__len__")),
    *(
        getattr(torch.Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "nbytes")
    ),
    torch.Tensor.is_floating_point,
}


class LateLogits(torch.Tensor):
    """Logits [..., V], computed when first read."""

    hidden: torch.Tensor
    _compute: Callable[[torch.Tensor], torch.Tensor]
    _found: torch.Tensor | None

    @staticmethod
    def of(
        hidden: torch.Tensor, size: int, compute: Callable[[torch.Tensor], torch.Tensor]
    ) -> LateLogits:
        """Return ``compute(hidden)``, with ``size`` columns, for later."""
        made: LateLogits = make_wrapper(
            LateLogits, (*hidden.shape[:-1], size), dtype=hidden.dtype, device=hidden.device
        )
        made.hidden, made._compute, made._found = hidden, compute, None
        return made

    @property
    def computed(self) -> bool:
        """Whether the logits were read."""
        return self._found is not None

    def logits(self) -> torch.Tensor:
        if self._found is None:
            self._found = self._compute(self.hidden)
        return self._found

    # torch's ColwiseParallel asks these of what a head returns, to bring it to other ranks

    @property
    def placements(self) -> None:
        """None are known before the logits are computed."""

    def redistribute(self, *args: Any, **kwargs: Any) -> LateLogits:
        return self._then(lambda logits: logits.redistribute(*args, **kwargs))

    def to_local(self, **kwargs: Any) -> LateLogits:
        return self._then(lambda logits: logits.to_local(**kwargs))

    def _then(self, move: Callable[[Any], torch.Tensor]) -> LateLogits:
        compute = self._compute
        return LateLogits.of(self.hidden, self.shape[-1], lambda hidden: move(compute(hidden)))

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = tuple(args), kwargs or {}
        if func in _METADATA:
            with without_torch_function():
                return func(*given[0], **given[1])
        args, kwargs = tree_map(_looked_at, given)
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # mypy: torch's own takes no class
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map(_looked_at, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)


def _looked_at(value: Any) -> Any:
    return value.logits() if isinstance(value, LateLogits) else value


def has_memory(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a value is a tensor with memory and a graph: late logits get both when first read."""
    late = isinstance(value, LateLogits) and not value.computed
    return isinstance(value, torch.Tensor) and not late


def causal_model_of(model: nn.Module) -> nn.Module:
    """Return the module whose forward computes the loss.

    A wrapper as PEFT's shows names of the model inside it, and what is put on the wrapper the model
    does not see.
    """
    return next((m for m in model.modules() if hasattr(type(m), "loss_function")), model)


def head_of(model: nn.Module) -> nn.Linear:
    """Return a causal model's head; ConfigError for any other model."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    loss = getattr(model, "loss_function", None)
    if isinstance(head, nn.Linear) and getattr(loss, "__name__", "") == LOSS:
        words_of(head.weight)  # which refuses one that ranks divide otherwise
        return head
    lacks = f"its loss is not {LOSS}" if isinstance(head, nn.Linear) else "it has no head of words"
    raise ConfigError(
        f"fused_loss: {type(model).__name__} is no causal model of transformers: {lacks}",
        advice="leave fused_loss out, and call hetero.linear_cross_entropy where the loss is"
        " computed",
    )


def late(head: nn.Linear, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a head's forward that leaves its logits for later while gradients are recorded."""

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled() or not hidden.is_floating_point():
            found: torch.Tensor = call(hidden)
            return found
        return LateLogits.of(hidden, head.out_features, call)

    return forward


def causal_loss(head: nn.Linear, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a causal model's loss, computed from hidden states while its logits are late."""
    return partial(_causal_loss, head, call)


def _causal_loss(
    head: nn.Linear,
    call: Callable[..., Any],
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    if not isinstance(logits, LateLogits) or logits.computed:
        given = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index}
        found: torch.Tensor = call(
            logits, labels, vocab_size, shift_labels=shift_labels, **given, **kwargs
        )
        return found
    if shift_labels is None:  # a token's label is the next token
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    hidden = logits.hidden
    loss = linear_cross_entropy(
        hidden,
        head.weight,
        shift_labels.to(hidden.device).reshape(hidden.shape[:-1]),
        head.bias,
        ignore_index=ignore_index,
        reduction="mean" if num_items_in_batch is None else "sum",
    )
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss if num_items_in_batch is None else loss / num_items_in_batch
