"""What a frozen base costs under an adapter: bytes at rest, and on the link."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.engine import Figure, Figures
from hetero.api import engine_of, prepare_tuned
from hetero.config import FROZEN, Config
from hetero.recipes.gpt import GPT, GPTConfig
from hetero.status import status
from hetero.types import Kind, Tier

REACH = {"keep": 2.0, "int8": 1.0, "nf4": 0.55}  # bytes of a frozen bf16 parameter
SPARE = 1.02  # packing waste, and norms and biases that are kept
RANK = 8
TOKENS = 8  # bf16 takes its time on a CPU, and bytes depend on no batch
STEPS = 3  # the first has no plan
FRAMES = 3  # this part of the weights fits HBM, beside activations


class LowRank(nn.Module):
    """A frozen linear layer and what trains beside it (LoRA)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        dtype = base.weight.dtype
        self.base = base
        self.down = nn.Linear(base.in_features, RANK, bias=False, dtype=dtype)
        self.up = nn.Linear(RANK, base.out_features, bias=False, dtype=dtype)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.up(self.down(x))
        return out


def adapted(config: GPTConfig) -> GPT:
    """Return a bf16 GPT whose attention has adapters, and whose weights are frozen otherwise."""
    torch.manual_seed(0)
    model = GPT(config).to(torch.bfloat16).requires_grad_(False)
    for block in model.blocks:
        attention: Any = block.attention
        attention.qkv, attention.out = LowRank(attention.qkv), LowRank(attention.out)
    return model


def lora(device: str | None = None) -> Figures:
    """Bytes a frozen parameter over all tiers, by what frozen= makes of it, and on the link."""
    rows, detail = [], {}
    for frozen in FROZEN:
        found = measure(frozen, device or "cpu:sim")
        detail[frozen] = found
        reach = REACH[frozen] * SPARE
        rows.append(Figure(f"{frozen}: at rest", found["frozen_bytes"], "B", "<=", reach))
    for frozen in FROZEN[1:]:
        link = detail[frozen]["link_bytes_a_step"] / detail["keep"]["link_bytes_a_step"]
        reach = REACH[frozen] / REACH["keep"] * SPARE
        rows.append(Figure(f"{frozen}: link bytes / those of keep", link, "ratio", "<=", reach))
    return Figures(rows, detail)


def measure(frozen: str, device: str) -> dict[str, Any]:
    """Train an adapter for a few steps in a part of its base's bytes, and ask the ledger."""
    model: Any = adapted(GPTConfig(width=512, layers=10, context=64))
    whole = sum(p.nbytes for p in model.parameters())
    numel = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    adapter = sum(p.numel() for p in model.parameters() if p.requires_grad)
    settings = {"device": device, "hbm": whole // FRAMES, "frozen": frozen, "activations": "keep"}
    optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    model, optimizer = prepare_tuned(model, optimizer, Config.load(**settings), None)
    tokens = torch.arange(TOKENS)[None].to(engine_of(model).setup.device.torch_device)
    losses = []
    for _ in range(STEPS):
        loss = model(tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    engine, seen = engine_of(model), status(model)
    below = Tier.HOST, Tier.NVME
    at_rest = sum(engine.setup.ledger.used(tier, Kind.PARAM) for tier in below)
    trained = [b for b in engine.setup.blueprint.layout.buckets if b.trainable]
    own = sum(b.home_bytes for b in trained)
    others = sum(engine.setup.ledger.used(t, k) for t in below for k in (Kind.GRAD, Kind.STATE))
    return {
        "frozen_parameters": numel,
        "frozen_bytes": (at_rest - own) / numel,
        "adapter_parameters": adapter,
        "adapter_bytes": own + others,
        "adapter_bytes_a_parameter": (own + others) / adapter,
        "link_bytes_a_step": seen.h2d_bytes,
        "hbm_peak_bytes": seen.tiers["HBM"]["peak"],
        "evictions_a_step": seen.evictions,
        "chunk_bytes": seen.chunk_bytes,
        "losses": losses,
    }
