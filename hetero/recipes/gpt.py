"""A byte-level GPT in plain PyTorch: the demo of `hetero train`, and a model to try hetero on."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

INIT_STD = 0.02  # GPT-2's
TOKEN_STD = 1.0  # of an untied embedding: the blocks' output must not drown the token


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Shape of a `GPT`; the defaults have 31.9 million parameters."""

    vocab: int = 256
    """Number of tokens; 256 for bytes."""
    width: int = 512
    """Features of the residual stream, a multiple of ``heads``."""
    layers: int = 10
    """Number of blocks."""
    heads: int = 8
    """Attention heads per block."""
    context: int = 256
    """Longest sequence, in tokens."""
    tied_head: bool = False
    """Let the head use the embedding's weight."""
    checkpoint_blocks: bool = True
    """Keep only the input of each block for backward, and recompute the block there."""

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"width={self.width} is not a multiple of heads={self.heads}")


class CausalAttention(nn.Module):
    """Causal self-attention over [batch, tokens, width]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return out


class MLP(nn.Module):
    """Two linear layers with GELU between, four times as wide inside."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(F.gelu(self.up(x)))
        return out


class Block(nn.Module):
    """Attention and MLP, each on a normed copy of the residual stream (pre-norm)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.width)
        self.attention = CausalAttention(config)
        self.norm_mlp = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_attention(x))
        mixed: torch.Tensor = x + self.mlp(self.norm_mlp(x))
        return mixed


class GPT(nn.Module):
    """A decoder-only transformer with learned positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        if config.tied_head:
            self.head.weight = self.tokens.weight
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weights; layers that write to the residual stream start small (GPT-2)."""
        residual_std = INIT_STD / math.sqrt(2 * self.config.layers)
        for name, param in self.named_parameters():
            if param.dim() > 1:
                writes = name.endswith(("attention.out.weight", "mlp.down.weight"))
                param.normal_(0.0, residual_std if writes else INIT_STD)
            elif name.endswith("bias"):
                param.zero_()
        if not self.config.tied_head:
            self.tokens.weight.normal_(0.0, TOKEN_STD)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits [batch, tokens, vocab], or with ``targets`` the mean loss in nats.

        ``tokens`` and ``targets`` are int64 [batch, tokens], tokens <= ``context``.
        """
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for block in self.blocks:
            x = self._run(block, x)
        logits: torch.Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def _run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.config.checkpoint_blocks and torch.is_grad_enabled():
            out: torch.Tensor = checkpoint(block, x, use_reentrant=False)
        else:
            out = block(x)
        return out
