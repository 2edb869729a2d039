"""Plan before you run, for machines that are not here: python examples/plan.py

Neither model takes memory or computes anything; the second one needs transformers
(pip install 'hetero[integrations]').
"""

from __future__ import annotations

import importlib.util

import torch
from torch import nn

import hetero


def show(plan: hetero.Plan) -> None:
    print(f"{plan.model} on {plan.profile}: {'fits' if plan.fits else 'does not fit'}")
    for short in plan.shortfalls:
        print(f"  {short.tier} is {short.short_bytes:,} bytes short")
    for tier in plan.tiers:
        print(f"  {tier.tier} holds {tier.peak_bytes:,} bytes at most")
    print(f"  a step takes {plan.step_seconds:.3g} s, most of it: {plan.bottleneck}")
    print(f"  {plan.paste}")


def block(width: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())


def main() -> None:
    with torch.device("meta"):  # or a real module: it is left as it is
        model = nn.Sequential(nn.Linear(64, 2048), *(block(2048) for _ in range(12)))
        batch = torch.empty(256, 64)
    show(hetero.plan(model, batch, profile="rtx4090", hbm="512MiB", estimates=False))

    if importlib.util.find_spec("transformers"):
        samples_and_positions = (8, 512)
        settings = {"profile": "rtx4090", "precision": "bf16", "estimates": False}
        show(hetero.plan("smollm2-135m", samples_and_positions, **settings))


if __name__ == "__main__":
    main()
