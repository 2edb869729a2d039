"""A pipeline of two ranks, each with two stages of one model within its own budget:

    torchrun --nproc-per-node 2 examples/pipeline.py [STEPS]

The schedule is torch's. A rank's stages are prepared together, as one model with one optimizer.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

import hetero

TEXT = torch.tensor(list((Path(__file__).parent.parent / "LICENSE").read_bytes()))
LENGTH, SAMPLES, MICRO_BATCHES, WIDTH, STAGES = 64, 8, 4, 128, 4


class Stage(nn.Module):
    """Two blocks, with the embedding before the first stage's and the head after the last one's."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.embed = nn.Embedding(256, WIDTH) if index == 0 else nn.Identity()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 256) if index == STAGES - 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


def batch(step: int) -> torch.Tensor:
    dice = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(TEXT) - LENGTH, (SAMPLES,), generator=dice)
    return torch.stack([TEXT[start : start + LENGTH] for start in starts.tolist()])


def loss_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def main(steps: int) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    indices = range(rank, STAGES, size)
    stages = nn.ModuleList(Stage(index) for index in indices)
    optimizer = torch.optim.AdamW(stages.parameters(), lr=1e-3)
    stages, optimizer = hetero.prepare(
        stages, optimizer, mesh={"pp": size}, device="cpu:sim", hbm="8MB", activations="offload"
    )
    there = [
        PipelineStage(stage, index, STAGES, torch.device("cpu"))
        for stage, index in zip(stages, indices, strict=True)
    ]
    schedule = ScheduleInterleaved1F1B(there, MICRO_BATCHES, loss_fn=loss_of)

    for step in range(steps):
        tokens, losses = batch(step), []
        given = [tokens[:, :-1]] if there[0].is_first else []
        if there[-1].is_last:
            schedule.step(*given, target=tokens[:, 1:], losses=losses)
            if step % 5 == 0 or step == steps - 1:
                print(f"step {step:3}  loss {torch.stack(losses).mean().item():.4f}")
        else:
            schedule.step(*given)
        optimizer.step()
        optimizer.zero_grad()

    seen = hetero.status(stages)
    print(
        f"rank {rank} of {size}: {seen.evictions} evictions, {seen.misses} misses a step\n", end=""
    )
    hetero.release(stages, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
