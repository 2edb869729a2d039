"""Layers of published decoders in plain torch, as one rank of those that divide them has them
(floor 4).

Operations are those of transformers' layers, in their order, and so are the names of parameters.
Ranks divide a pair of layers as Megatron does: attention by heads, an MLP by its inner width,
experts by theirs, so that they sum once a pair, forward and backward.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hetero.internals import apply_function
from hetero.plan.shape import DecoderShape

Angles = tuple[torch.Tensor, torch.Tensor]
THETA = 10000.0


HAS_EXPERTS = hasattr(F, "grouped_mm")
"""Whether torch multiplies groups of rows in public (2.10)."""

# -- sums of ranks -------------------------------------------------------------------------------


_LIBRARY = torch.library.Library("hetero", "DEF")  # holds the operation for as long as it lives
_LIBRARY.define("summed(Tensor part) -> Tensor")
_LIBRARY.impl("summed", torch.empty_like, "Meta")
SUMMED: Any = torch.ops.hetero.summed.default
"""The sum over the ranks that divide tensors. It has a time (`OpClock`), and no numbers."""


def summed(part: torch.Tensor) -> torch.Tensor:
    """Return the sum of the ranks' parts."""
    found: torch.Tensor = SUMMED(part)
    return found


class Entered(torch.autograd.Function):
    """What every rank takes whole: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor) -> torch.Tensor:
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return summed(grads[0])


class RankSum(torch.autograd.Function):
    """The sum of what ranks made; each takes its gradient whole."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor) -> torch.Tensor:
        return summed(part)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


def entering(whole: torch.Tensor, n_ranks: int) -> torch.Tensor:
    """Return the input of layers that are divided in columns."""
    if n_ranks == 1:
        return whole
    return apply_function(Entered, whole)


def leaving(part: torch.Tensor, n_ranks: int) -> torch.Tensor:
    """Return the output of a layer that is divided in rows."""
    if n_ranks == 1:
        return part
    return apply_function(RankSum, part)


# -- layers of Llama and its kin -----------------------------------------------------------------


class RMSNorm(nn.Module):
    """Llama's: the weight is applied in the dtype of the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class GemmaNorm(RMSNorm):
    """Gemma's: the weight is one more than what is kept, and applied in fp32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * (1.0 + self.weight.float())).type_as(x)


class Rotary(nn.Module):
    """Angles of positions."""

    inv_freq: torch.Tensor

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        steps = torch.arange(0, shape.head_width, 2, dtype=torch.float) / shape.head_width
        self.register_buffer("inv_freq", 1.0 / THETA**steps, persistent=False)
        original = self.inv_freq.clone()
        self.register_buffer("original_inv_freq", original, persistent=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> Angles:
        angles = positions[..., None].float() * self.inv_freq.to(x.device, torch.float)
        both = torch.cat((angles, angles), dim=-1)
        cos, sin = both.cos() * 1.0, both.sin() * 1.0
        return cos.to(x.dtype), sin.to(x.dtype)


def turned(x: torch.Tensor) -> torch.Tensor:
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def rotated(
    query: torch.Tensor, key: torch.Tensor, angles: Angles, *, of_part: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys with their positions; ``of_part``: as models that may leave features
    out (Phi-3) do it."""
    cos, sin = (angle.unsqueeze(1) for angle in angles)
    if not of_part:
        made = [(x * cos) + (turned(x) * sin) for x in (query, key)]
        return made[0], made[1]
    width = cos.shape[-1]
    halves = [(x[..., :width], x[..., width:]) for x in (query, key)]
    made = [torch.cat([(x * cos) + (turned(x) * sin), rest], dim=-1) for x, rest in halves]
    return made[0], made[1]


class Attention(nn.Module):
    """Llama's attention, of a rank's heads; Phi-3's with one layer for queries, keys and values."""

    def __init__(self, shape: DecoderShape, n_ranks: int) -> None:
        super().__init__()
        self.head_dim, self.n_ranks = shape.head_width, n_ranks
        self.fused = shape.kind == "phi3"
        self.sizes = (
            shape.heads // n_ranks * shape.head_width,
            shape.kv_heads // n_ranks * shape.head_width,
        )
        queries, keys = self.sizes
        if self.fused:
            self.o_proj = nn.Linear(queries, shape.width, bias=False)
            self.qkv_proj = nn.Linear(shape.width, queries + 2 * keys, bias=False)
            return
        bias = shape.kind == "qwen2"
        self.q_proj = nn.Linear(shape.width, queries, bias=bias)
        self.k_proj = nn.Linear(shape.width, keys, bias=bias)
        self.v_proj = nn.Linear(shape.width, keys, bias=bias)
        self.o_proj = nn.Linear(queries, shape.width, bias=False)

    def forward(self, x: torch.Tensor, angles: Angles, mask: torch.Tensor | None) -> torch.Tensor:
        before = x.shape[:-1]
        x = entering(x, self.n_ranks)
        if self.fused:
            both = self.qkv_proj(x)
            queries, keys = self.sizes
            parts = both[..., :queries], both[..., queries : queries + keys]
            rows = iter((*parts, both[..., queries + keys :]))
        else:  # each is made when its heads are: backward goes the same way
            rows = (layer(x) for layer in (self.q_proj, self.k_proj, self.v_proj))
        query, key, value = (row.view(*before, -1, self.head_dim).transpose(1, 2) for row in rows)
        query, key = rotated(query, key, angles, of_part=self.fused)
        out = attended(query, key, value, mask)
        return leaving(self.o_proj(out.reshape(*before, -1).contiguous()), self.n_ranks)


def attended(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    *,
    causal: bool = True,
) -> torch.Tensor:
    """Return attention by torch's function, as transformers calls it, with heads last but one."""
    shared = key.shape[1] != query.shape[1]
    if shared and mask is not None:
        times = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(times, 1) for t in (key, value))
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        scale=query.shape[-1] ** -0.5,
        is_causal=causal and mask is None and query.shape[2] > 1,
        enable_gqa=shared and mask is None,
    )
    return out.transpose(1, 2).contiguous()


class GatedMLP(nn.Module):
    """Llama's; Phi-3's with one layer for gate and values."""

    def __init__(self, shape: DecoderShape, n_ranks: int) -> None:
        super().__init__()
        inner, width = shape.inner // n_ranks, shape.width
        self.n_ranks, self.kind = n_ranks, shape.kind
        if self.kind == "phi3":
            self.gate_up_proj = nn.Linear(width, 2 * inner, bias=False)
        else:
            self.gate_proj = nn.Linear(width, inner, bias=False)
            self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = entering(x, self.n_ranks)
        if self.kind == "phi3":
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
            made = up * F.silu(gate)
        elif self.kind == "gemma":
            made = F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x)
        else:
            made = F.silu(self.gate_proj(x)) * self.up_proj(x)
        return leaving(self.down_proj(made), self.n_ranks)


class Router(nn.Module):
    """Chooses experts for each token."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.experts, shape.width))
        self.chosen = shape.chosen

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = F.softmax(F.linear(x, self.weight).float(), dim=-1)
        top, experts = torch.topk(scores, self.chosen, dim=-1)
        top /= top.sum(dim=-1, keepdim=True)
        return top, experts


class Experts(nn.Module):
    """MLPs as two tensors: tokens sorted by expert go through products of groups."""

    def __init__(self, shape: DecoderShape, n_ranks: int) -> None:
        super().__init__()
        n, width, inner = shape.experts, shape.width, shape.inner // n_ranks
        self.gate_up_proj = nn.Parameter(torch.empty(n, 2 * inner, width))
        self.down_proj = nn.Parameter(torch.empty(n, width, inner))

    def forward(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
    ) -> torch.Tensor:
        n_experts, n_chosen = len(self.down_proj), experts.shape[-1]
        order, places = torch.sort(experts.reshape(-1))
        taken, scales = x[places // n_chosen], weights.reshape(-1)[places]
        counts = torch.histc(order.int(), bins=n_experts, min=0, max=n_experts - 1)
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        gate, up = product_of_groups(taken, self.gate_up_proj, ends).chunk(2, dim=-1)
        made = product_of_groups(F.silu(gate) * up, self.down_proj, ends) * scales.unsqueeze(-1)
        back = torch.empty_like(places)
        back[places] = torch.arange(len(places), device=places.device)
        return made[back].view(len(x), n_chosen, -1).sum(dim=1).to(x.dtype)


def product_of_groups(x: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return each group of rows times its own matrix."""
    grouped: Any = F.grouped_mm
    found: torch.Tensor = grouped(x.to(weights.dtype), weights.transpose(-2, -1), offs=ends)
    return found


class MixtureMLP(nn.Module):
    """Mixtral's."""

    def __init__(self, shape: DecoderShape, n_ranks: int) -> None:
        super().__init__()
        self.n_ranks = n_ranks
        self.gate = Router(shape)
        self.experts = Experts(shape, n_ranks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = entering(x, self.n_ranks).view(-1, x.shape[-1])
        made: torch.Tensor = self.experts(rows, *self.gate(rows))
        return leaving(made.reshape(x.shape), self.n_ranks)


class LlamaLayer(nn.Module):
    """A layer of Llama or its kin."""

    def __init__(self, shape: DecoderShape, n_ranks: int) -> None:
        super().__init__()
        norm = GemmaNorm if shape.kind == "gemma" else RMSNorm
        self.self_attn = Attention(shape, n_ranks)
        self.mlp = (MixtureMLP if shape.experts else GatedMLP)(shape, n_ranks)
        self.input_layernorm = norm(shape.width)
        self.post_attention_layernorm = norm(shape.width)

    def forward(self, x: torch.Tensor, angles: Angles, mask: torch.Tensor | None) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles, mask)
        made: torch.Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + made


# -- layers of GPT-2 and BLOOM -------------------------------------------------------------------


class Transposed(nn.Module):
    """GPT-2's linear layer, whose weight has inputs first."""

    def __init__(self, n_out: int, n_in: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_in, n_out))
        self.bias = nn.Parameter(torch.zeros(n_out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return made.view(*x.shape[:-1], -1)


class GPT2Attention(nn.Module):
    """Of a rank's heads."""

    def __init__(self, shape: DecoderShape, n_ranks: int) -> None:
        super().__init__()
        self.part, self.n_ranks = shape.heads // n_ranks * shape.head_width, n_ranks
        self.head_dim, self.dropout = shape.head_width, shape.dropout
        self.c_attn = Transposed(3 * self.part, shape.width)
        self.c_proj = Transposed(shape.width, self.part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.c_attn(entering(x, self.n_ranks)).split(self.part, dim=2)
        heads = (row.view(*row.shape[:-1], -1, self.head_dim).transpose(1, 2) for row in rows)
        query, key, value = heads
        dropout = self.dropout if self.training else 0.0
        out = attended(query, key, value, dropout=dropout)
        out = leaving(self.c_proj(out.reshape(*out.shape[:-2], -1).contiguous()), self.n_ranks)
        return F.dropout(out, self.dropout, self.training)


class GPT2MLP(nn.Module):
    """Of a rank's part of the inner width."""

    def __init__(self, shape: DecoderShape, n_ranks: int) -> None:
        super().__init__()
        inner, self.n_ranks, self.dropout = shape.inner // n_ranks, n_ranks, shape.dropout
        self.c_fc = Transposed(inner, shape.width)
        self.c_proj = Transposed(shape.width, inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.c_fc(entering(x, self.n_ranks))
        wide = 0.5 * x
        x = wide * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
        return F.dropout(leaving(self.c_proj(x), self.n_ranks), self.dropout, self.training)


class GPT2Layer(nn.Module):
    """A layer of GPT-2, GPT-3 or Megatron's models."""

    def __init__(self, shape: DecoderShape, n_ranks: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(shape.width)
        self.attn = GPT2Attention(shape, n_ranks)
        self.ln_2 = nn.LayerNorm(shape.width)
        self.mlp = GPT2MLP(shape, n_ranks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attn(self.ln_1(x)) + x
        made: torch.Tensor = self.mlp(self.ln_2(x))
        return x + made


class BloomAttention(nn.Module):
    """Attention with a bias by distance, whose scores are made: no fused kernel takes the bias."""

    def __init__(self, shape: DecoderShape, n_ranks: int) -> None:
        super().__init__()
        self.n_ranks, self.head_dim = n_ranks, shape.head_width
        self.heads = shape.heads // n_ranks
        part = self.heads * shape.head_width
        self.query_key_value = nn.Linear(shape.width, 3 * part)
        self.dense = nn.Linear(part, shape.width)

    def forward(self, x: torch.Tensor, alibi: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        n, length, _ = x.shape
        rows = self.query_key_value(entering(x, self.n_ranks))
        rows = rows.view(n, length, self.heads, 3, self.head_dim)
        flat = n * self.heads, -1, self.head_dim
        query, key, value = (rows[..., at, :].transpose(1, 2).reshape(flat) for at in range(3))
        scores = alibi.baddbmm(query, key.transpose(-1, -2), beta=1.0, alpha=self.head_dim**-0.5)
        scores = scores.view(n, self.heads, length, -1) + mask
        shares = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        made = torch.bmm(shares.view(n * self.heads, length, -1), value)
        made = made.view(n, self.heads, length, self.head_dim).permute(0, 2, 1, 3)
        return leaving(self.dense(made.reshape(n, length, -1)), self.n_ranks)


class BloomGelu(torch.autograd.Function):
    """BLOOM's activation: only its input is kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        tanh = torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))
        slope = 0.5 * x * ((1 - tanh * tanh) * (0.79788456 + 0.1070322243 * x * x))
        found: torch.Tensor = (slope + 0.5 * (1 + tanh)) * grads[0]
        return found


class BloomMLP(nn.Module):
    """Of a rank's part of the inner width."""

    def __init__(self, shape: DecoderShape, n_ranks: int) -> None:
        super().__init__()
        self.n_ranks = n_ranks
        self.dense_h_to_4h = nn.Linear(shape.width, shape.inner // n_ranks)
        self.dense_4h_to_h = nn.Linear(shape.inner // n_ranks, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.dense_h_to_4h(entering(x, self.n_ranks))
        found: torch.Tensor = self.dense_4h_to_h(apply_function(BloomGelu, made))
        return leaving(found, self.n_ranks)


class BloomLayer(nn.Module):
    """A layer of BLOOM."""

    def __init__(self, shape: DecoderShape, n_ranks: int) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(shape.width)
        self.self_attention = BloomAttention(shape, n_ranks)
        self.post_attention_layernorm = nn.LayerNorm(shape.width)
        self.mlp = BloomMLP(shape, n_ranks)

    def forward(self, x: torch.Tensor, alibi: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attention(self.input_layernorm(x), alibi, mask)
        made: torch.Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + made
