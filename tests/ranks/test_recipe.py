"""Layers that are known by their names are divided as torch's own classes say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import hetero
from hetero.errors import ConfigError
from hetero.parallel.tensor import parallelize
from hetero.testing.ranks import run_ranks
from tests.ranks.tensor_models import LM, difference, found_in, tiny_llama, whole


def lm(rank: int) -> tuple[str, float]:
    """Return the table, and how far outputs are from those of the whole model."""
    torch.manual_seed(0)
    model, mesh = LM(), init_device_mesh("cpu", (2,))
    words = torch.randint(0, 20, (3, 4))
    expected = model(words)
    table = str(parallelize(model, mesh))
    return table, float((model(words) - expected).detach().abs().max())


def test_a_table_says_what_became_of_each_layer() -> None:
    for table, off in run_ranks(2, lm):
        rows = [line.split() for line in table.splitlines()]
        assert "on each of 2 ranks" in table.splitlines()[0]
        assert ["embed.weight", "x", "1", "S(0)", "20", "x", "16", "10", "x", "16"] in rows
        assert ["blocks.*.up.weight", "x", "4", "S(0)", "64", "x", "16", "32", "x", "16"] in rows
        assert ["blocks.*.up.bias", "x", "4", "S(0)", "64", "32"] in rows
        assert ["blocks.*.down.weight", "x", "4", "S(1)", "16", "x", "64", "16", "x", "32"] in rows
        assert ["blocks.*.down.bias", "x", "4", "R", "16", "16"] in rows
        assert ["blocks.*.norm.weight", "x", "4", "whole", "16", "16"] in rows
        assert ["head.weight", "x", "1", "S(0)", "20", "x", "16", "10", "x", "16"] in rows
        assert off < 1e-6  # sums of two halves


class Attention(nn.Module):
    head_dim = 4

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(16, 4 * heads)
        self.o_proj = nn.Linear(4 * heads, 16)


def refused(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))

    def refuse(model: nn.Module, said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            parallelize(model, mesh)
        assert not any(isinstance(param, DTensor) for param in model.parameters())

    refuse(nn.Sequential(nn.Linear(4, 4)), "no layers of this Sequential are known")
    refuse(nn.ModuleDict({"a": Attention(3)}), r"'a.q_proj' has 3 heads of 4, which 2 ranks")
    words = nn.ModuleDict({"embed": nn.Embedding(7, 16), "a": Attention(4)})
    refuse(words, "'embed' has 7 words, which 2 ranks do not divide")
    mlp = {"up_proj": nn.Linear(16, 15), "down_proj": nn.Linear(15, 16)}
    refuse(nn.ModuleDict(mlp), "'up_proj' .*15.* 2 ranks")


def test_what_ranks_do_not_divide_is_refused_by_name() -> None:
    run_ranks(2, refused)


def llama(rank: int, hbm: int | None) -> Any:
    model: Any = tiny_llama().train()
    words = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(input_ids=words).logits
    parallelize(model, init_device_mesh("cpu", (2,)))
    with torch.no_grad():
        off = float((whole(model(input_ids=words).logits) - expected).abs().max())
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    evictions = 3
    if hbm is not None:
        settings = {"device": "cpu:sim", "hbm": hbm, "chunk_bytes": 1024}
        model, optimizer = hetero.prepare(model, optimizer, **settings)
    for _ in range(5):
        model(input_ids=words, labels=words).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    found = found_in(model, optimizer)
    if hbm is not None:
        evictions = hetero.status(model).evictions
    return found, off, evictions


@pytest.mark.slow  # transformers is imported
def test_a_llama_that_was_divided_is_paged_with_torchs_bits(tmp_path: Path) -> None:
    plain, paged = (run_ranks(2, llama, hbm) for hbm in (None, 100_000))
    for (expected, off, _), (found, _, evictions) in zip(plain, paged, strict=True):
        assert not difference(found, expected)
        assert off < 1e-5
        assert evictions >= 3
