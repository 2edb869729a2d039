"""A decoder on ranks along three axes, each of which keeps a share of a part of some layers:

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 8 examples/three_d.py [STEPS [SHARES]]

Two stages of a pipeline, whose tensors two ranks divide, and of each part two ranks keep a half.
On GPUs it is the same: `torchrun --nnodes 2 --nproc-per-node 8 ... examples/three_d.py 20 4` has
16 ranks, 2 x 4 x 2, each with its own device.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import hetero
from hetero.parallel.tensor import parallelize
from hetero.recipes.gpt import GPT, GPTConfig

TEXT = torch.tensor(list((Path(__file__).parent.parent / "LICENSE").read_bytes()))
LENGTH, MICRO_BATCHES = 32, 4
AXES = ("pp", "dp_shard", "tp")


def batch(step: int, share: int) -> torch.Tensor:
    """Return what the ranks of one pipeline learn in a step."""
    dice = torch.Generator().manual_seed(1000 * step + share)
    starts = torch.randint(0, len(TEXT) - LENGTH - 1, (MICRO_BATCHES,), generator=dice)
    return torch.stack([TEXT[start : start + LENGTH + 1] for start in starts.tolist()])


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def main(steps: int = 10, n_shares: int = 2) -> None:
    on_gpus = torch.cuda.is_available()
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    kind = "cuda" if on_gpus else "cpu"
    dist.init_process_group("nccl" if on_gpus else "gloo")
    mesh = init_device_mesh(kind, (2, n_shares, 2), mesh_dim_names=AXES)
    # 1. the whole model, as every rank draws it
    torch.manual_seed(0)
    model = GPT(GPTConfig(width=64, layers=6, heads=4, context=LENGTH))
    # 2. this rank's stage of it, and its part of each tensor there
    found = hetero.split(model, mesh, "1F1B", profile="h100-sxm")
    placed = parallelize(found.stages, mesh["tp"])
    if dist.get_rank() == 0:
        print(f"{found}\n\n{placed}\n")
    # 3. of which it keeps a share, within its budgets
    optimizer = torch.optim.AdamW(found.stages.parameters(), lr=3e-3)
    stages, optimizer = hetero.prepare(
        *(found.stages, optimizer),
        mesh=mesh,
        device="cuda" if on_gpus else "cpu:sim",
        hbm="600KB",
        activations="recompute",
    )
    schedule = found.schedule(MICRO_BATCHES, loss_of, device=kind)

    share = mesh.get_local_rank("dp_shard")
    for step in range(steps):
        losses: list[torch.Tensor] = []
        tokens = batch(step, share).to(kind)
        given = {"target": tokens[:, 1:], "losses": losses} if found.is_last else {}
        schedule.step(*[tokens[:, :-1]] * found.is_first, **given)
        optimizer.step()
        optimizer.zero_grad()
        if losses and dist.get_rank() == dist.get_world_size() - 1:
            print(f"step {step:3}  loss {torch.stack(losses).mean().item():.4f}")

    seen = hetero.status(stages)
    print(
        f"rank {dist.get_rank()}: {seen.evictions} evictions, {seen.misses} misses a step\n", end=""
    )
    hetero.release(stages, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
