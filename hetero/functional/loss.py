"""Cross entropy of a linear head without its logits (floor 1).

The logits of T tokens over a vocabulary of V are 4 T V bytes, and an eager head holds them three
times in backward. Here a few tokens at a time are multiplied, reduced to their losses and, if a
gradient is wanted, turned into their part of it: only tensors as large as the inputs stay.

With ``l`` the logits of a token, ``y`` its label, ``s`` the label smoothing and ``z`` the weight of
the z-loss, the loss is that of `torch.nn.functional.cross_entropy` plus the z-loss (PaLM,
arXiv:2204.02311, section 5):

    lse  = log sum exp l
    loss = (1 - s) (lse - l[y]) + s (lse - mean l) + z lse^2
    dl   = softmax(l) (1 + 2 z lse) - s / V;  dl[y] -= 1 - s
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from hetero.errors import ConfigError
from hetero.functional.words import Read, Words, here, whole, words_of
from hetero.internals import apply_function

REDUCTIONS = ("mean", "sum", "none")
Weigh = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes the mean of a rank's losses, and the number of labels that count in it."""
_weighs: list[Weigh] = []
# Logits of one chunk, in the dtype of the softmax. The order of sums depends on the chunk, so it is
# a matter of the head alone, and neither of budgets nor of devices. Each chunk reads the weight and
# reads and writes its gradient, which are there anyway: logits half as large as that gradient, of
# half as many tokens as the head is wide, make most of a chunk's time that of its products.
LOGITS_BYTES = 64 * 2**20  # at least
GRADIENT_SHARE = 2


class Terms(NamedTuple):
    """The options of the loss."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    reduction: str
    chunk_tokens: int
    words: Words


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    chunk_tokens: int | None = None,
) -> torch.Tensor:
    """Return ``cross_entropy(hidden @ weight.T + bias, labels)`` and never hold all logits.

    The softmax and the loss are of fp32 (fp64 for fp64 inputs), and the weight's gradient is summed
    over chunks in that dtype, in the order of the tokens. Under "mean" and "sum" gradients are
    computed with the loss, at three products in all, as many as an eager head; under "none"
    backward multiplies once more.

    Args:
        hidden: [..., H], of the weight's dtype.
        weight: [V, H]; bias: [V] or None. Ranks may divide both by words (DTensors, as under
            ``ColwiseParallel``): each has logits of its own words, and all get the same loss.
        labels: [...] int64, each in [0, V) or ``ignore_index``.
        label_smoothing: in [0, 1], as in `torch.nn.functional.cross_entropy`.
        z_loss: weight of the squared log of the partition function.
        reduction: "mean" over the labels that count (NaN where none does, as torch has it), "sum",
            or "none" for a loss of the labels' shape.
        chunk_tokens: tokens at once; None: as many as make 64 MiB of logits, or half the bytes of
            the weight's gradient if that is more.

    Raises ConfigError for shapes, dtypes or options that do not fit together, and on a CPU for a
    label that is out of range.

    Example:
        >>> import torch, hetero
        >>> hidden, weight = torch.randn(16, 8), torch.randn(100, 8)
        >>> labels = torch.randint(0, 100, (16,))
        >>> loss = hetero.linear_cross_entropy(hidden, weight, labels)
        >>> plain = torch.nn.functional.cross_entropy(hidden @ weight.T, labels)
        >>> torch.allclose(loss, plain)
        True
    """
    hidden, labels = whole(hidden), whole(labels)
    check(hidden, weight, labels, bias)
    if reduction not in REDUCTIONS:
        raise ConfigError(f"reduction={reduction!r}", advice=f"one of {', '.join(REDUCTIONS)}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ConfigError(f"label_smoothing={label_smoothing}", advice="it lies in [0, 1]")
    words = words_of(weight)
    tokens = chunk_tokens or tokens_at_once(weight, words.n_parts)
    terms = Terms(ignore_index, label_smoothing, z_loss, reduction, tokens, words)
    weight, bias = here(weight), None if bias is None else here(bias)
    place = hidden.device.type
    casts = torch.amp.is_autocast_available(place)  # tensors without bytes cast nothing
    if casts and torch.is_autocast_enabled(place):
        dtype = torch.get_autocast_dtype(place)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    with torch.autocast(place, enabled=False) if casts else nullcontext():
        losses = apply_function(
            _Head, hidden.reshape(-1, hidden.shape[-1]), weight, bias, labels.reshape(-1), terms
        )
    if reduction == "mean" and _weighs:
        return _weighs[-1](losses, (labels != ignore_index).sum())
    return losses.view(labels.shape) if reduction == "none" else losses


@contextmanager
def weighing(weigh: Weigh) -> Iterator[None]:
    """Let ``weigh`` have each mean inside a block, where ranks have parts of the labels."""
    _weighs.append(weigh)
    try:
        yield
    finally:
        _weighs.remove(weigh)


def check(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Raise ConfigError where shapes or dtypes do not fit."""
    fits = weight.dim() == 2 and hidden.dim() and hidden.shape[-1] == weight.shape[1]
    if not fits or hidden.shape[:-1] != labels.shape:
        raise ConfigError(
            f"hidden {list(hidden.shape)}, weight {list(weight.shape)} and labels"
            f" {list(labels.shape)} do not fit",
            advice="hidden is [..., H], weight [V, H], labels [...]",
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ConfigError(f"bias {list(bias.shape)} for a weight of {list(weight.shape)}")
    if labels.dtype != torch.int64 or not hidden.is_floating_point():
        raise ConfigError(
            f"labels are {labels.dtype}, hidden is {hidden.dtype}",
            advice="labels are indices of dtype int64",
        )


def tokens_at_once(weight: torch.Tensor, n_parts: int = 1) -> int:
    """Return the tokens of a chunk for a head's weight, [V, H], in equal parts of its words: by its
    shape and dtype alone."""
    vocabulary, width = -(-weight.shape[0] // n_parts), weight.shape[1]
    item = softmax_dtype(weight.dtype).itemsize
    logits_bytes = max(LOGITS_BYTES, item * vocabulary * width // GRADIENT_SHARE)
    return max(1, logits_bytes // max(1, item * vocabulary))


def softmax_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a softmax over logits of ``dtype`` is computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Chunk(NamedTuple):
    """Logits of a few tokens, [t, V], on their way to becoming their gradient."""

    rows: slice
    logits: torch.Tensor
    counts: torch.Tensor
    """[t] bool: False where the label is ignored."""
    labels: torch.Tensor
    """[t], with 0 for those ignored."""
    read: Read

    @property
    def lse(self) -> torch.Tensor:
        return self.read.lse


def chunks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    terms: Terms,
) -> Iterator[_Chunk]:
    """Yield the logits of a few tokens at a time, in the softmax's dtype."""
    for start in range(0, len(labels), terms.chunk_tokens):
        rows = slice(start, start + terms.chunk_tokens)
        yield _chunk(rows, hidden[rows], weight, bias, labels[rows], terms)


def _chunk(
    rows: slice,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    terms: Terms,
) -> _Chunk:
    logits = torch.nn.functional.linear(hidden, weight, bias).to(softmax_dtype(hidden.dtype))
    counts = labels != terms.ignore_index
    labels = labels.where(counts, 0)
    read = terms.words.read(logits, labels, smooth=bool(terms.label_smoothing))
    return _Chunk(rows, logits, counts, labels, read)


def losses_of(chunk: _Chunk, terms: Terms) -> torch.Tensor:
    """Return the losses of a chunk's tokens, [t]; 0 where the label is ignored."""
    s, lse = terms.label_smoothing, chunk.lse
    loss = (lse - chunk.read.chosen) * (1 - s)
    if chunk.read.mean is not None:
        loss += (lse - chunk.read.mean) * s
    if terms.z_loss:
        loss += lse.square() * terms.z_loss
    return loss.where(chunk.counts, 0)


def into_gradient(chunk: _Chunk, factors: torch.Tensor, terms: Terms) -> torch.Tensor:
    """Turn a chunk's logits into the gradient of its losses by them, times ``factors`` [t]."""
    s, logits = terms.label_smoothing, chunk.logits
    d = logits.sub_(chunk.lse[:, None]).exp_()
    if terms.z_loss:
        d.mul_(1 + 2 * terms.z_loss * chunk.lse[:, None])
    if s:
        d.sub_(s / terms.words.n)
    terms.words.add(d, chunk.labels, s - 1)
    # not a product: ignored rows may be infinite
    return d.mul_(factors[:, None]).masked_fill_(~chunk.counts[:, None], 0)


class _Sums:
    """Gradients of a head's inputs, filled chunk by chunk; None if not wanted."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        wanted: tuple[bool, bool, bool],
    ) -> None:
        dtype = softmax_dtype(hidden.dtype)
        self._inputs = hidden, weight
        self.hidden = torch.empty_like(hidden) if wanted[0] else None
        shape = tuple(weight.shape)
        self.weight = torch.zeros(shape, dtype=dtype, device=hidden.device) if wanted[1] else None
        self.bias = (
            torch.zeros(shape[:1], dtype=dtype, device=hidden.device)
            if wanted[2] and bias is not None
            else None
        )

    def narrow(self, d: torch.Tensor) -> torch.Tensor:
        """Return a gradient of logits as `add` takes it, once the bias has its part of it."""
        if self.bias is not None:
            self.bias += d.sum(0)
        return d.to(self._inputs[0].dtype)

    def add(self, rows: slice, narrow: torch.Tensor) -> None:
        hidden, weight = self._inputs
        if self.hidden is not None:
            torch.mm(narrow, weight, out=self.hidden[rows])
        if self.weight is None:
            return
        if self.weight.dtype == narrow.dtype:
            self.weight.addmm_(narrow.T, hidden[rows])
        else:
            self.weight += narrow.T @ hidden[rows]

    def over_ranks(self, words: Words) -> None:
        """Add up what comes to the hidden states through the words of all ranks."""
        if self.hidden is not None:
            self.hidden = words.summed(self.hidden)


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        terms: Terms,
    ) -> torch.Tensor:
        dtype = softmax_dtype(hidden.dtype)
        losses = torch.empty(len(labels), dtype=dtype, device=hidden.device)
        wanted = ctx.needs_input_grad[:3]
        at_once = terms.reduction != "none" and any(wanted)
        sums = _Sums(hidden, weight, bias, wanted) if at_once else None
        count = torch.ones((), dtype=dtype, device=hidden.device)
        if terms.reduction == "mean":
            count = (labels != terms.ignore_index).sum().to(dtype)
        for chunk in chunks(hidden, weight, bias, labels, terms):
            losses[chunk.rows] = losses_of(chunk, terms)
            if sums is not None:
                factors = count.reciprocal().expand_as(chunk.lse)
                rows, narrow = chunk.rows, sums.narrow(into_gradient(chunk, factors, terms))
                del chunk  # its logits go before the products need room
                sums.add(rows, narrow)
                del narrow
            else:
                del chunk
        ctx.terms, ctx.wanted = terms, wanted
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        if sums is not None:
            sums.over_ranks(terms.words)
            ctx.save_for_backward(sums.hidden, sums.weight, sums.bias)
        elif any(wanted):
            ctx.save_for_backward(hidden, weight, bias, labels)
        if terms.reduction == "none":
            return losses
        return losses.sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        found: list[torch.Tensor | None]
        if ctx.terms.reduction == "none":
            hidden, weight, bias, labels = ctx.saved_tensors
            sums = _Sums(hidden, weight, bias, ctx.wanted)
            for chunk in chunks(hidden, weight, bias, labels, ctx.terms):
                factors = grad[chunk.rows].to(chunk.lse.dtype)
                rows, narrow = chunk.rows, sums.narrow(into_gradient(chunk, factors, ctx.terms))
                del chunk
                sums.add(rows, narrow)
                del narrow
            sums.over_ranks(ctx.terms.words)
            found = [sums.hidden, sums.weight, sums.bias]
        else:
            found = [None if g is None else g * grad.to(g.dtype) for g in ctx.saved_tensors]
        given = [
            None if g is None else g.to(dtype) for g, dtype in zip(found, ctx.dtypes, strict=True)
        ]
        return *given, None, None
