"""Attention over a sequence of which each rank has a part (floor 3)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from hetero.errors import ConfigError
from hetero.internals import RingTemplates, apply_function, ring_options, ring_templates

HEADS, POSITIONS = 1, 2
"""Dimensions of queries, keys and values."""
GROUPS = 4
"""Of heads, for which a ring goes round one after the other."""
Apply = Callable[..., torch.Tensor]


class PartRanks(Protocol):
    """The ranks that have parts of the same sequences."""

    size: int

    @property
    def group(self) -> Any:
        """The group in which tensors go from rank to rank."""

    def meet(self, what: str) -> None:
        """Compare what all are about to do; DivergenceError on all where that differs."""

    def running(self, what: str) -> AbstractContextManager[None]:
        """Make a call of all ranks inside the block, after they have compared it."""

    def wait(self, work: Any) -> None:
        """Block until what was begun in such a block is over."""


class Call(NamedTuple):
    """One call of `torch.nn.functional.scaled_dot_product_attention`, of whole sequences."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.query, self.key, self.value

    def __str__(self) -> str:
        query, key, value = (" x ".join(map(str, each.shape)) for each in self.tensors)
        dtypes = dict.fromkeys(str(each.dtype).removeprefix("torch.") for each in self.tensors)
        facts = [f"attention of {query} on {key}", *([] if value == key else [f"values {value}"])]
        facts += [" and ".join(dtypes), *(["causal"] if self.is_causal else [])]
        facts += [] if self.scale is None else [f"scale {self.scale}"]
        return ", ".join(facts)

    def check(self) -> None:
        """Raise ConfigError for a call that no rank can answer from parts."""
        if self.attn_mask is not None:
            raise ConfigError(
                f"{self} with a mask: it is of positions that other ranks have",
                advice="leave attn_mask out and set is_causal; pad no sequences; models of"
                " transformers are told so by HeteroAccelerator",
            )
        if any(each.dim() != 4 for each in self.tensors):
            raise ConfigError(
                f"{self}: parts of sequences have four dimensions",
                advice="give queries, keys and values as [samples, heads, positions, width]",
            )

    def in_dtype_of_autocast(self) -> Call:
        """Return the call as autocast would make it."""
        place = self.query.device.type
        if not torch.is_autocast_enabled(place):
            return self
        dtype = torch.get_autocast_dtype(place)
        query, key, value = (each.to(dtype) for each in self.tensors)
        return self._replace(query=query, key=key, value=value)

    def with_a_key_for_each_head(self) -> Call:
        """Return the call with keys and values of groups of heads repeated."""
        times = self.query.shape[HEADS] // self.key.shape[HEADS]
        if not self.enable_gqa or times == 1:
            return self
        key, value = (each.repeat_interleave(times, HEADS) for each in (self.key, self.value))
        return self._replace(key=key, value=value, enable_gqa=False)


class Ring:
    """Keys and values go from rank to rank, by torch's templates, with the kernel of CPUs.

    Args:
        is_balanced: whether parts are cut in a zigzag: each has an early and a late half.
    """

    def __init__(self, ranks: PartRanks, *, is_balanced: bool) -> None:
        self.templates: RingTemplates = ring_templates()
        self.ranks, self.is_balanced = ranks, is_balanced

    def __call__(self, call: Call) -> torch.Tensor:
        call.check()
        if call.dropout_p:
            raise ConfigError(
                f"ring attention on a CPU with dropout_p={call.dropout_p}",
                advice='set it to 0.0, or use how="ulysses"',
            )
        if self.is_balanced and not call.is_causal:
            raise ConfigError(
                f"{call}, which is not causal, with parts cut in a zigzag",
                advice='use how="ring": without a mask no rank has more to do than others',
            )
        call = call.in_dtype_of_autocast().with_a_key_for_each_head()
        return apply_function(RingAttention, *call.tensors, call, self)

    def forward(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what attention gives for this rank's queries, and its logs of sums."""
        out, sums = positions_first_like(call.query), []
        with self.ranks.running(str(call)), ring_options(is_balanced=self.is_balanced):
            for heads in groups_of_heads(call.query.shape[HEADS]):
                out[:, heads], some, *_ = self.templates.forward(
                    *(self.ranks.group, POSITIONS, self.templates.kernel),
                    *(each[:, heads] for each in call.tensors),
                    is_causal=call.is_causal,
                    scale=call.scale,
                )
                sums.append(some)
        return out, torch.cat(sums, HEADS)

    def backward(
        self, call: Call, out: torch.Tensor, sums: torch.Tensor, grad: torch.Tensor
    ) -> Sequence[torch.Tensor]:
        """Return the gradients of this rank's queries, keys and values."""
        grads = [positions_first_like(each) for each in call.tensors]
        kernel, what = self.templates.kernel_backward, f"gradients of {call}"
        with self.ranks.running(what), ring_options(is_balanced=self.is_balanced):
            for heads in groups_of_heads(call.query.shape[HEADS]):
                found = self.templates.backward(
                    *(self.ranks.group, POSITIONS, kernel, grad[:, heads], "grad_out"),
                    *(each[:, heads] for each in (*call.tensors, out)),
                    logsumexp=sums[:, heads].contiguous(),  # the kernel takes it to be so
                    is_causal=call.is_causal,
                    dropout_p=0.0,
                    scale=call.scale,
                )
                for whole, some in zip(grads, found, strict=False):
                    whole[:, heads] = some
                del found
        return grads


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        call: Call,
        ring: Ring,
    ) -> torch.Tensor:
        given = call._replace(query=query, key=key, value=value)
        out, sums = ring.forward(given)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.options = call.is_causal, call.scale
        ctx.ring = ring
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        query, key, value, out, sums = ctx.saved_tensors
        is_causal, scale = ctx.options
        call = Call(query, key, value, is_causal=is_causal, scale=scale)
        return *ctx.ring.backward(call, out, sums, grad), None, None


class Ulysses:
    """Ranks change parts of all heads for whole sequences of some, and back.

    Args:
        plain: torch's own attention.
    """

    def __init__(self, ranks: PartRanks, plain: Apply) -> None:
        self._ranks, self._plain = ranks, plain

    def __call__(self, call: Call) -> torch.Tensor:
        call.check()
        for name, tensor in zip(("queries", "keys", "values"), call.tensors, strict=True):
            n_heads = tensor.shape[HEADS]
            if n_heads % self._ranks.size:
                raise ConfigError(
                    f"{call}: {n_heads} heads of {name}, which {self._ranks.size} ranks do not"
                    " divide",
                    advice=f'use how="ring" or "zigzag", or {" or ".join(fitting(n_heads))}'
                    ' ranks along "cp"',
                )
        query, key, value = (
            apply_function(
                HeadsForPositions, each, HEADS, POSITIONS, self._ranks, f"{call}: {name}"
            )
            for name, each in zip("qkv", call.tensors, strict=True)
        )
        found = self._plain(**call._replace(query=query, key=key, value=value)._asdict())
        return apply_function(
            HeadsForPositions, found, POSITIONS, HEADS, self._ranks, f"{call}: results"
        )


class HeadsForPositions(torch.autograd.Function):
    """Cuts one dimension over ranks, and joins their parts of another one.

    torch has ``all_to_all_single_autograd``, whose waits hear of no rank that is lost.
    """

    @staticmethod
    def forward(
        ctx: Any, given: torch.Tensor, cut: int, join: int, ranks: PartRanks, what: str
    ) -> torch.Tensor:
        ctx.back = join, cut, ranks, what
        return swapped(given, cut, join, ranks, what)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        cut, join, ranks, what = ctx.back
        return swapped(grad, cut, join, ranks, f"gradients of {what}"), None, None, None, None


def swapped(given: torch.Tensor, cut: int, join: int, ranks: PartRanks, what: str) -> torch.Tensor:
    """Return all ranks' parts of one dimension, for this rank's part of another."""
    sent = torch.stack(given.chunk(ranks.size, cut))
    came = torch.empty_like(sent)
    with ranks.running(what):
        ranks.wait(dist.all_to_all_single(came, sent, group=ranks.group, async_op=True))
    del sent
    shape = list(came.shape[1:])
    shape[join] *= ranks.size
    joined = positions_first(shape, given)
    for part, each in zip(joined.chunk(ranks.size, join), came, strict=True):
        part.copy_(each)
    return joined


def groups_of_heads(n_heads: int) -> Iterator[slice]:
    """Yield a few heads at a time: blocks of theirs that go round, and sums of their gradients,
    are several times as large as all keys and values."""
    size = -(-n_heads // GROUPS)
    yield from (slice(at, at + size) for at in range(0, n_heads, size))


def positions_first_like(tensor: torch.Tensor) -> torch.Tensor:
    return positions_first(tensor.shape, tensor)


def positions_first(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Return memory for [samples, heads, positions, width], in which all heads of a position lie
    together, as torch's kernels return it: layers that follow join them without a copy."""
    samples, heads, positions, width = shape
    return like.new_empty(samples, positions, heads, width).transpose(HEADS, POSITIONS)


def fitting(size: int) -> list[str]:
    """Return the numbers of ranks, above one, that divide a size, the smallest three."""
    return [str(n) for n in range(2, size + 1) if size % n == 0][:3] or ["1"]
