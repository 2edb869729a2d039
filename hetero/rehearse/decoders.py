"""Published decoders in plain torch, whole or as one rank of a mesh has them (floor 4).

Parameters have the names that transformers gives them, and operations are its own, so a plan of a
configuration is the same with it and without.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hetero.errors import ConfigError
from hetero.functional.head import LOSS
from hetero.plan.shape import LLAMAS, DecoderShape, StageShare
from hetero.rehearse.layers import (
    HAS_EXPERTS,
    BloomLayer,
    GemmaNorm,
    GPT2Layer,
    LlamaLayer,
    RMSNorm,
    Rotary,
    entering,
    leaving,
    summed,
)

IGNORED = -100  # a label that no loss is taken of


class Words(nn.Embedding):
    """A rank's rows of an embedding; Gemma's scales what it finds."""

    def __init__(self, shape: DecoderShape, n_ranks: int) -> None:
        super().__init__(-(-shape.vocab // n_ranks), shape.width)
        self.n_ranks = n_ranks
        self.scaled = shape.kind == "gemma"
        if self.scaled:
            scale = torch.tensor(shape.width**0.5)
            self.register_buffer("embed_scale", scale, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = super().forward(tokens)
        if self.scaled:
            scale: Any = self.embed_scale
            found = found * scale.to(self.weight.dtype)
        return leaving(found, self.n_ranks)


class Body(nn.Module):
    """The layers of a stage, between its embedding and its last norm, if it has these."""

    def __init__(self, shape: DecoderShape, share: StageShare) -> None:
        super().__init__()
        self.shape, self.share = shape, share

    def masked(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        """Return the mask of positions that a token sees; None where a kernel knows it.

        transformers looks at positions, whether there are several sequences in a row.
        """
        rows = positions.expand(x.shape[0], -1)
        steps = torch.diff(rows, prepend=rows[:, :1] - 1, dim=-1)
        packed = (steps != 1).cumsum(-1)
        if not (packed[:, -1] == 0).all():
            raise ConfigError(
                "several sequences in a row of position ids",
                advice="plan one sequence for each sample",
            )
        window = self.shape.window
        if window is None or x.shape[1] <= window:
            return None
        distance = positions.T - positions
        return ((distance >= 0) & (distance < window))[None, None]


class LlamaBody(Body):
    """Of Llama or its kin."""

    def __init__(self, shape: DecoderShape, share: StageShare) -> None:
        super().__init__(shape, share)
        if share.opens:
            self.embed_tokens = Words(shape, share.n_ranks)
        self.layers = nn.ModuleList(LlamaLayer(shape, share.n_ranks) for _ in range(share.n_layers))
        if share.closes:
            self.norm = (GemmaNorm if shape.kind == "gemma" else RMSNorm)(shape.width)
        self.rotary_emb = Rotary(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(x) if self.share.opens else x
        positions = (torch.arange(x.shape[1], device=x.device) + 0).unsqueeze(0)
        mask = self.masked(x, positions)
        angles = self.rotary_emb(x, positions)
        for layer in self.layers:
            x = layer(x, angles, mask)
        return self.norm(x) if self.share.closes else x


class GPT2Body(Body):
    """Of GPT-2 and its kin."""

    def __init__(self, shape: DecoderShape, share: StageShare) -> None:
        super().__init__(shape, share)
        if share.opens:
            self.wte = Words(shape, share.n_ranks)
            self.wpe = nn.Embedding(shape.positions, shape.width)
        self.h = nn.ModuleList(GPT2Layer(shape, share.n_ranks) for _ in range(share.n_layers))
        if share.closes:
            self.ln_f = nn.LayerNorm(shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.share.opens:
            tokens, x = x, self.wte(x)
            positions = (torch.arange(tokens.shape[1], device=x.device) + 0).unsqueeze(0)
            x = x + self.wpe(positions)
            self.masked(x, positions)
            x = F.dropout(x, self.shape.dropout, self.training)
        for layer in self.h:
            x = layer(x)
        return self.ln_f(x) if self.share.closes else x


class BloomBody(Body):
    """Of BLOOM."""

    def __init__(self, shape: DecoderShape, share: StageShare) -> None:
        super().__init__(shape, share)
        if share.opens:
            self.word_embeddings = Words(shape, share.n_ranks)
            self.word_embeddings_layernorm = nn.LayerNorm(shape.width)
        self.h = nn.ModuleList(BloomLayer(shape, share.n_ranks) for _ in range(share.n_layers))
        if share.closes:
            self.ln_f = nn.LayerNorm(shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.share.opens:
            x = self.word_embeddings_layernorm(self.word_embeddings(x))
        slopes = slopes_of(self.shape.heads // self.share.n_ranks, x.device)
        distances = slopes[:, None, None] * torch.arange(x.shape[1], device=x.device)
        alibi = distances.repeat(x.shape[0], 1, 1).to(x.dtype)
        mask = causal(x)
        for layer in self.h:
            x = layer(x, alibi, mask)
        return self.ln_f(x) if self.share.closes else x


def slopes_of(heads: int, device: torch.device) -> torch.Tensor:
    """Return how fast the scores of each head fall with distance."""
    near = 2 ** math.floor(math.log2(heads))

    def powers(base: float, places: torch.Tensor) -> torch.Tensor:
        return torch.pow(torch.full((), base, device=device, dtype=torch.float32), places)

    slopes = powers(
        2 ** (-(2 ** -(math.log2(near) - 3))),
        torch.arange(1, 1 + near, device=device, dtype=torch.int32),
    )
    if near == heads:
        return slopes
    odd = torch.arange(1, 1 + 2 * (heads - near), 2, device=device, dtype=torch.int32)
    more = powers(2 ** (-(2 ** -(math.log2(2 * near) - 3))), odd)
    return torch.cat([slopes, more], dim=0)


def causal(x: torch.Tensor) -> torch.Tensor:
    """Return the mask that is added to scores: nothing, or the least number."""
    places = torch.arange(x.shape[1], device=x.device)
    seen = (places <= places[:, None]).expand(x.shape[0], 1, -1, -1)
    none = torch.tensor(0.0, device=x.device, dtype=x.dtype)
    return torch.where(seen, none, torch.finfo(x.dtype).min)


class Decoder(nn.Module):
    """A decoder, or one rank's share of it.

    The last stage returns a loss if it is given labels. Words that ranks divide are never gathered:
    the loss is of their parts, as torch's ``loss_parallel`` makes it.
    """

    def __init__(self, shape: DecoderShape, share: StageShare) -> None:
        super().__init__()
        self.shape, self.share = shape, share
        self.inbox: list[torch.Tensor] | None = None
        """What the stage before sent, noted where its gradient is asked for."""
        self.body_name = "model" if shape.kind in LLAMAS else "transformer"
        kinds = {"gpt2": GPT2Body, "bloom": BloomBody}
        self.add_module(self.body_name, kinds.get(shape.kind, LlamaBody)(shape, share))
        if share.closes:
            part = -(-shape.vocab // share.n_ranks)
            self.lm_head = nn.Linear(shape.width, part, bias=False)
            if shape.tied and share.opens:
                self.lm_head.weight = self.words.weight

    @property
    def words(self) -> nn.Embedding:
        """The embedding of its first stage."""
        return next(m for m in self.modules() if isinstance(m, Words))

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Return the loss and the logits of the last stage, or what another one sends on.

        Stages but the first receive as much as tokens make.
        """
        x = self.get_submodule(self.body_name)(self.received(input_ids))
        if not self.share.closes:
            return {"hidden": x}
        logits = self.lm_head(entering(x, self.share.n_ranks))
        if labels is None:
            return {"logits": logits}
        if self.share.n_ranks > 1:  # the largest logit, the sum of powers, and that of the label
            summed(torch.empty(3, labels.numel(), device=labels.device))
        loss = self.loss_function(
            logits=logits, labels=labels, vocab_size=self.lm_head.out_features
        )
        return {"loss": loss, "logits": logits}

    def get_output_embeddings(self) -> nn.Linear | None:
        """Return the head, as a model of transformers does: a fused loss asks for it."""
        return self.lm_head if self.share.closes else None

    @property
    def loss_function(self) -> Callable[..., torch.Tensor]:
        """The loss of transformers' causal models, unless another one has replaced it."""
        found: Callable[..., torch.Tensor] = self.__dict__.get("_loss_function", causal_loss)
        return found

    def received(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return what the stage before sends, in new memory; the first one has the tokens."""
        if self.share.opens:
            return tokens
        dtype = next(self.parameters()).dtype
        size = *tokens.shape, self.shape.width
        found = torch.empty(size, dtype=dtype, device=tokens.device, requires_grad=True)
        if self.inbox is not None:
            self.inbox.append(found)
        return found


def causal_loss(
    logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **kwargs: Any
) -> torch.Tensor:
    """Return the mean cross entropy of the next tokens, in fp32."""
    logits = logits.float()
    labels = F.pad(labels, (0, 1), value=IGNORED)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, vocab_size), labels.view(-1))


causal_loss.__name__ = LOSS


def decoder(shape: DecoderShape, share: StageShare | None = None) -> Decoder:
    """Return a decoder on the meta device; ConfigError if this torch has no experts."""
    if shape.experts and not HAS_EXPERTS:
        raise ConfigError(
            "experts in plain torch need torch.nn.functional.grouped_mm",
            advice="use torch 2.10 or later",
        )
    with torch.device("meta"):
        return Decoder(shape, share or StageShare(0, shape.layers, opens=True, closes=True)).train()
