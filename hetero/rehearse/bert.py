"""BERT with a head for words in plain torch, as transformers builds it (floor 4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hetero.rehearse.layers import attended

DROPOUT = 0.1
EPS = 1e-12


class Added(nn.Module):
    """A layer, dropout, and the norm of its sum with what came before it."""

    def __init__(self, n_in: int, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(n_in, width)
        self.LayerNorm = nn.LayerNorm(width, eps=EPS)

    def forward(self, x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = F.dropout(self.dense(x), DROPOUT, self.training)
        found: torch.Tensor = self.LayerNorm(made + before)
        return found


class SelfAttention(nn.Module):
    """Every token sees all."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = self.query, self.key, self.value
        n, length, width = x.shape
        rows = (layer(x).view(n, length, self.heads, -1).transpose(1, 2) for layer in layers)
        query, key, value = rows
        dropout = DROPOUT if self.training else 0.0
        return attended(query, key, value, dropout=dropout, causal=False).reshape(n, length, width)


class BertLayer(nn.Module):
    """Attention and an MLP."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        attention = {"self": SelfAttention(width, heads), "output": Added(width, width)}
        self.attention = nn.ModuleDict(attention)
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(width, inner)})
        self.output = Added(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention["output"](self.attention["self"](x), x)
        found: torch.Tensor = self.output(F.gelu(self.intermediate["dense"](x)), x)
        return found


class Embeddings(nn.Module):
    """Of words, positions and kinds of sentences."""

    position_ids: torch.Tensor
    token_type_ids: torch.Tensor

    def __init__(self, vocab: int, width: int, positions: int, types: int) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab, width)
        self.position_embeddings = nn.Embedding(positions, width)
        self.token_type_embeddings = nn.Embedding(types, width)
        self.LayerNorm = nn.LayerNorm(width, eps=EPS)
        rows = torch.arange(positions).expand((1, -1))
        self.register_buffer("position_ids", rows, persistent=False)
        kinds = torch.zeros(rows.size(), dtype=torch.long)
        self.register_buffer("token_type_ids", kinds, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = self.position_ids[:, : tokens.shape[1]]
        kinds = torch.gather(self.token_type_ids.expand(1, -1), 1, rows).expand(tokens.shape)
        x = self.word_embeddings(tokens) + self.token_type_embeddings(kinds)
        x = self.LayerNorm(x + self.position_embeddings(rows))
        return F.dropout(x, DROPOUT, self.training)


class Predictions(nn.Module):
    """Words from what the layers made: a layer, a norm, and the embedding once more."""

    def __init__(self, words: nn.Embedding) -> None:
        super().__init__()
        vocab, width = words.weight.shape
        self.bias = nn.Parameter(torch.zeros(vocab))
        parts = {"dense": nn.Linear(width, width), "LayerNorm": nn.LayerNorm(width, eps=EPS)}
        self.transform = nn.ModuleDict(parts)
        self.decoder = nn.Linear(width, vocab)
        self.decoder.weight, self.decoder.bias = words.weight, self.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.transform["LayerNorm"](F.gelu(self.transform["dense"](x)))
        found: torch.Tensor = self.decoder(x)
        return found


class Bert(nn.Module):
    """The model with its loss, that of the next word, as transformers takes it of any model."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, heads = config["hidden_size"], config["num_attention_heads"]
        sizes = width, config["max_position_embeddings"], config["type_vocab_size"]
        embeddings = Embeddings(config["vocab_size"], *sizes)
        layers = nn.ModuleList(
            BertLayer(width, heads, config["intermediate_size"])
            for _ in range(config["num_hidden_layers"])
        )
        encoder = nn.ModuleDict({"layer": layers})
        self.bert = nn.ModuleDict({"embeddings": embeddings, "encoder": encoder})
        self.cls = nn.ModuleDict({"predictions": Predictions(embeddings.word_embeddings)})

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        x = self.bert["embeddings"](input_ids)
        for layer in self.bert.get_submodule("encoder.layer").children():
            x = layer(x)
        logits = self.cls["predictions"](x)
        if labels is None:
            return {"logits": logits}
        return {"loss": next_word_loss(logits, labels), "logits": logits}


def next_word_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of the next words, in fp32."""
    logits = logits.float()
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))
