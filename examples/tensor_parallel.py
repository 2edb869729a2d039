"""Ranks divide the tensors of a model, as torch's parallelize_module says; each pages its parts:

    torchrun --nproc-per-node 2 examples/tensor_parallel.py [STEPS]

One line differs from a tensor parallel loop of torch: hetero.prepare. The bits are torch's own.
"""

from __future__ import annotations

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import hetero

WORDS, WIDTH, BLOCKS = 256, 64, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.blocks(self.embed(words))))
        return out


def build() -> nn.Module:
    torch.manual_seed(0)
    plan = {  # between layers each rank has a part of the sequence, in them a part of the width
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    for number in range(BLOCKS):
        plan[f"blocks.{number}.norm"] = SequenceParallel()
        plan[f"blocks.{number}.up"] = ColwiseParallel(input_layouts=Shard(1))
        plan[f"blocks.{number}.down"] = RowwiseParallel(output_layouts=Shard(1))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model: nn.Module = parallelize_module(Model(), mesh, plan)
    return model


def main(steps: int) -> None:
    dist.init_process_group("gloo")
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = hetero.prepare(
        model, optimizer, device="cpu:sim", hbm="700KiB", chunk_bytes=16384, max_grad_norm=1.0
    )

    for step in range(steps):
        dice = torch.Generator().manual_seed(step)  # the ranks of a tensor have the same batch
        start = torch.randint(0, WORDS, (4, 1), generator=dice)
        words = (start + 3 * torch.arange(17)) % WORDS
        with loss_parallel():  # logits stay divided, too
            logits = model(words[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        shown = float(loss.detach().full_tensor())
        if dist.get_rank() == 0 and (step % 5 == 0 or step == steps - 1):
            print(f"step {step:3}  loss {shown:.4f}")

    status = hetero.status(model)
    print(f"rank {dist.get_rank()}: {status.evictions} evictions in the last step\n", end="")
    folder = os.environ.get("FOLDER") or tempfile.gettempdir() + "/hetero-tensor-parallel"
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)  # loads at any mesh
    hetero.release(model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
