"""Traces of plain torch models on meta tensors: what operations hold, phase by phase.

CUDA's flash attention is called by its own name, since a meta tensor gets the fallback. A fused RMS
norm has no meta kernel: the one here keeps and makes the tensors that CUDA's keeps and makes.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from hetero.plan.footprint import (
    Attention,
    Footprint,
    NormCode,
    OptimizerCode,
    Peak,
    Term,
    Workload,
)
from hetero.plan.shape import Decoder, Norm

DTYPES = {2: torch.bfloat16, 4: torch.float32}


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations made and somebody holds, with a peak for each phase."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peaks: dict[str, int] = {}
        self.phase = ""
        self.seen: dict[int, Any] = {}

    def known(self, tensors: Any) -> None:
        """Let tensors count for nothing."""
        self.seen |= dict.fromkeys(t.untyped_storage()._cdata for t in tensors)

    def enter(self, phase: str) -> None:
        """Begin a phase, with what is there."""
        self.phase = phase
        self.peaks[phase] = max(self.peaks.get(phase, 0), self.live_bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                self.note(tensor.untyped_storage())
        self.enter(self.phase)
        return found

    def note(self, storage: torch.UntypedStorage) -> None:
        key, n_bytes = storage._cdata, storage.nbytes()
        if key in self.seen:
            return

        def gone(_: object) -> None:
            del self.seen[key]
            self.live_bytes -= n_bytes

        self.live_bytes += n_bytes
        self.seen[key] = weakref.ref(storage, gone)


class FusedNorm(torch.autograd.Function):
    """Keeps and makes what ``aten._fused_rms_norm`` does on CUDA."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rstd = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(x, weight, rstd)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class RMSNorm(nn.Module):
    def __init__(self, width: int, code: NormCode) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.code = code

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.code is NormCode.FUSED:
            return FusedNorm.apply(x, self.weight)
        if self.code is NormCode.COMPOSITE:
            return F.rms_norm(x, self.weight.shape, self.weight, 1e-5)
        y = x.float()  # as Llama's in transformers
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * y.to(x.dtype)


def make_norm(shape: Decoder, load: Workload, width: int) -> nn.Module:
    return nn.LayerNorm(width) if shape.norm is Norm.LAYER else RMSNorm(width, load.norm)


class SelfAttention(nn.Module):
    def __init__(self, shape: Decoder, load: Workload) -> None:
        super().__init__()
        self.shape, self.load = shape, load
        h, bias = shape.hidden, shape.qkv_bias
        self.q = nn.Linear(h, shape.query_dim, bias=bias)
        self.k = nn.Linear(h, shape.kv_dim, bias=bias)
        self.v = nn.Linear(h, shape.kv_dim, bias=bias)
        self.out = nn.Linear(shape.query_dim, h, bias=shape.out_bias)
        if shape.head_norms:
            self.q_norm = make_norm(shape, load, shape.head_dim)
            self.k_norm = make_norm(shape, load, shape.head_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = (*x.shape[:2], -1, self.shape.head_dim)
        q, k, v = self.q(x).view(split), self.k(x).view(split), self.v(x).view(split)
        if self.shape.head_norms:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if self.load.attention is Attention.MATH:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            mixed = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
        return self.out(mixed.transpose(1, 2).reshape(*x.shape[:2], -1))


class MLP(nn.Module):
    def __init__(self, shape: Decoder) -> None:
        super().__init__()
        self.gated = shape.gated
        h, f, bias = shape.hidden, shape.ffn, shape.mlp_bias
        self.gate = nn.Linear(h, f, bias=bias) if self.gated else None
        self.up = nn.Linear(h, f, bias=bias)
        self.down = nn.Linear(f, h, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gate is not None:
            return self.down(F.silu(self.gate(x)) * self.up(x))
        return self.down(F.gelu(self.up(x)))


class Experts(nn.Module):
    """Every expert gets as many tokens, chosen beforehand; the rest is as in Mixtral."""

    def __init__(self, shape: Decoder) -> None:
        super().__init__()
        self.shape = shape
        self.router = nn.Linear(shape.hidden, shape.experts, bias=False)
        dense = replace(shape, experts=0)
        self.experts = nn.ModuleList(MLP(dense) for _ in range(shape.experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        weights = self.router(flat).float().softmax(-1).to(x.dtype)
        n_tokens = flat.shape[0] * self.shape.experts_per_token // self.shape.experts
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            index = torch.empty(n_tokens, dtype=torch.long, device=x.device)
            mine = expert(flat[index]) * weights[index, i, None]
            out.index_add_(0, index, mine)
        return out.view_as(x)


class Layer(nn.Module):
    def __init__(self, shape: Decoder, load: Workload) -> None:
        super().__init__()
        self.attention_norm = make_norm(shape, load, shape.hidden)
        self.attention = SelfAttention(shape, load)
        self.mlp_norm = make_norm(shape, load, shape.hidden)
        self.mlp = Experts(shape) if shape.experts else MLP(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class PlainDecoder(nn.Module):
    """A decoder as people write it."""

    def __init__(self, shape: Decoder, load: Workload) -> None:
        super().__init__()
        self.load = load
        self.tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.positions = nn.Embedding(shape.positions, shape.hidden) if shape.positions else None
        self.layers = nn.ModuleList(Layer(shape, load) for _ in range(shape.layers))
        self.norm = make_norm(shape, load, shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, mode: LiveBytes) -> Any:
        x = self.tokens(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device))
        mode.enter("forward")
        self.watch(x, "end of backward", self.layers[0], mode)
        for i, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=False) if self.load.checkpoint else layer(x)
            behind = self.layers[i + 1] if i + 1 < len(self.layers) else nn.ModuleList()
            place = {0: "first layer", len(self.layers) - 1: "last layer"}.get(i, "a layer")
            self.watch(x, f"backward of the {place}", behind, mode)
        mode.enter("loss")
        x = self.norm(x)
        logits = self.head(x)
        wide = logits.float() if self.load.upcast_logits else logits
        loss = F.cross_entropy(wide.flatten(0, 1), labels.flatten())
        return loss, logits if self.load.returns_logits else None

    def watch(self, x: torch.Tensor, phase: str, behind: nn.Module, mode: LiveBytes) -> None:
        """Begin a phase of backward when the gradient of ``x`` is there."""

        def arrived(_: torch.Tensor) -> None:
            if not self.load.keeps_gradients:
                for module in (behind, self.norm, self.head):
                    module.zero_grad()
            mode.enter(phase)

        x.register_hook(arrived)


def trace(shape: Decoder, load: Workload) -> tuple[Footprint, int]:
    """Return the peaks of a step, and the peak of its forward."""
    with torch.device("meta"):
        model = PlainDecoder(shape, load).to(DTYPES[load.activation_bytes])
        ids = torch.empty(load.micro_batch, load.sequence, dtype=torch.long)
        labels = torch.empty_like(ids)
    assert sum(param.numel() for param in model.parameters()) == shape.numel
    mode = LiveBytes()
    mode.known([*model.parameters(), ids, labels])
    with mode:
        loss, logits = model(ids, labels, mode)
        forward_bytes = max(mode.peaks.values())
        loss.backward()
    phases = ["forward", "loss", "backward of the last layer", "backward of the first layer"]
    phases.append("end of backward")
    if load.keeps_gradients:
        del loss, logits
        update(model, load, mode)
        phases.append("optimizer")
    peaks = [Peak(phase, (Term("traced", mode.peaks[phase]),)) for phase in phases]
    return Footprint(tuple(peaks)), forward_bytes


def update(model: nn.Module, load: Workload, mode: LiveBytes) -> None:
    """Watch the second step of torch's Adam: its states are there, and count for nothing."""
    foreach = load.optimizer is OptimizerCode.FOREACH
    adam = torch.optim.AdamW(model.parameters(), foreach=foreach)
    adam.step()
    mode.known(value for state in adam.state.values() for value in state.values())
    mode.enter("optimizer")
    if load.optimizer is not OptimizerCode.FUSED:  # which has no meta kernel
        with mode:
            adam.step()


def extrapolate(two: Footprint, three: Footprint, n_layers: int) -> Footprint:
    """Return the footprint of ``n_layers`` from those of two and of three layers (E14).

    Each phase grows by the same bytes with every layer, term by term: x2 + (n - 2)·(x3 - x2).
    """
    peaks = []
    for low, high in zip(two.peaks, three.peaks, strict=True):
        pairs = list(zip(low.terms, high.terms, strict=True))
        assert low.phase == high.phase and all(a.name == b.name for a, b in pairs)
        terms = [
            Term(a.name, a.n_bytes + (n_layers - 2) * (b.n_bytes - a.n_bytes)) for a, b in pairs
        ]
        peaks.append(Peak(low.phase, tuple(terms), low.at))
    return Footprint(tuple(peaks))
