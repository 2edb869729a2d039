"""Ranks have parts of the same sequences, each within its own budget:

    torchrun --nproc-per-node 2 examples/context_parallel.py [STEPS] [zigzag | ring | ulysses]

Attention is over whole sequences, by a ring of ranks or by heads. A block and an axis of the mesh
differ from a plain loop of torch.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import hetero
from hetero.parallel.context import context_parallel

TEXT = torch.tensor(list((Path(__file__).parent.parent / "LICENSE").read_bytes()))
LENGTH, SAMPLES, WIDTH, HEADS, BLOCKS = 128, 4, 64, 4, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.mlp(x)
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, words: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        # a part of a sequence does not know where it is: places come along
        out: torch.Tensor = self.head(self.blocks(self.embed(words) + self.places(places)))
        return out


def batch(step: int) -> list[torch.Tensor]:
    """Return words, labels and places of whole sequences: the same ones on all ranks."""
    dice = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(TEXT) - LENGTH, (SAMPLES,), generator=dice)
    text = torch.stack([TEXT[start : start + LENGTH + 1] for start in starts.tolist()])
    places = torch.arange(LENGTH).expand(SAMPLES, -1).clone()
    # labels are shifted here: the next word of a part's last one is in another part
    return [text[:, :-1].clone(), text[:, 1:].clone(), places]


def main(steps: int, how: str) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = hetero.prepare(
        model, optimizer, mesh={"cp": size}, device="cpu:sim", hbm="3600KiB", max_grad_norm=1.0
    )

    for step in range(steps):
        buffers = batch(step)
        with context_parallel(mesh, how, buffers=buffers, buffer_seq_dims=[1, 1, 1]):
            words, labels, places = buffers
            loss = F.cross_entropy(model(words, places).flatten(0, 1), labels.flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach()
        dist.all_reduce(whole)  # a rank's loss is of its part: the mean is that of all
        if rank == 0 and (step % 5 == 0 or step == steps - 1):
            print(f"step {step:3}  loss {float(whole) / size:.4f}")

    seen = hetero.status(model)
    print(
        f"rank {rank} of {size}: {seen.evictions} evictions, {seen.misses} misses a step\n", end=""
    )
    hetero.release(model, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(
        int(sys.argv[1]) if len(sys.argv) > 1 else 20,
        sys.argv[2] if len(sys.argv) > 2 else "zigzag",
    )
