"""A plain torch loop under a byte budget: python examples/plain_loop.py [STEPS]

The model has 13 MB of parameters, 51 MB of states with AdamW; all that is on the device at once has
to fit 8 MB.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import hetero


def block(width: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())


def main(steps: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), *(block(512) for _ in range(12)), nn.Linear(512, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)

    device = "cuda" if torch.cuda.is_available() else "cpu:sim"
    model, optimizer = hetero.prepare(model, optimizer, device=device, hbm="8MB")  # the one line

    place = "cuda" if device == "cuda" else "cpu"
    for step in range(steps):
        x = torch.randn(32, 64, device=place)
        loss = (model(x) - x[:, :3].prod(1, keepdim=True)).pow(2).mean()
        loss.backward()
        norm = optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step:3}  loss {loss.item():.4f}  gradient norm {norm.item():.4f}")

    status = hetero.status(model)
    print(
        f"HBM peak {status.tiers['HBM']['peak']} of {status.tiers['HBM']['budget']} bytes;", end=" "
    )
    print(f"last step: {status.h2d_bytes} bytes up, {status.d2h_bytes} down,", end=" ")
    print(f"{status.misses} misses")
    model, optimizer = hetero.release(model, optimizer)  # plain torch again


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
