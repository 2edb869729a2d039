"""Several ranks train one model, of which each keeps a share:

    torchrun --nproc-per-node 2 examples/ranks.py [STEPS]

Two lines differ from a loop on one rank: the process group, and mesh="world". N ranks give the bits
of one rank with N micro-batches.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import hetero

TEXT = torch.tensor(list((Path(__file__).parent.parent / "LICENSE").read_bytes()))
LENGTH, SAMPLES, WIDTH = 64, 4, 128


def build() -> nn.Module:
    torch.manual_seed(0)  # or not: the first rank's values count
    block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
    return nn.Sequential(
        nn.Embedding(256, WIDTH), nn.TransformerEncoder(block, 6), nn.Linear(WIDTH, 256)
    )


def batch(step: int, rank: int) -> torch.Tensor:
    dice = torch.Generator().manual_seed(1000 * step + rank)  # each rank has data of its own
    starts = torch.randint(0, len(TEXT) - LENGTH, (SAMPLES,), generator=dice)
    return torch.stack([TEXT[start : start + LENGTH] for start in starts.tolist()])


def main(steps: int) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = hetero.prepare(
        model, optimizer, mesh="world", device="cpu:sim", hbm="9MB", max_grad_norm=1.0
    )

    for step in range(steps):
        tokens = batch(step, rank)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()  # gradients are the mean of all ranks' from here on
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step % 5 == 0 or step == steps - 1):
            print(f"step {step:3}  loss {loss.item():.4f}")

    kept = hetero.status(model).tiers["HOST"]["used"]
    whole = 16 * sum(param.numel() for param in model.parameters())  # weight, gradient, moments
    print(f"rank {rank} of {size} keeps {kept:,} bytes at home; all states are {whole:,}\n", end="")
    folder = os.environ.get("FOLDER") or tempfile.gettempdir() + "/hetero-ranks"
    hetero.save_checkpoint(folder, model, optimizer, step=steps, keep_last=1)
    hetero.release(model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
