"""A model whose ranks have parts of its sequences, and its training by plain torch and by hetero on
the same ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import hetero
from hetero.parallel.context import context_parallel
from tests.ranks.models import OPTIMIZERS

WORDS, WIDTH, HEADS, SAMPLES, LENGTH = 20, 16, 4, 2, 16
TIGHT: Mapping[str, Any] = {"device": "cpu:sim", "hbm": 62_000, "chunk_bytes": 1024}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.mlp(x)
        return out


class LM(nn.Module):
    def __init__(self, n_blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(n_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def hidden(self, words: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        x = self.embed(words) + self.places(places)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.norm(x)
        return out

    def forward(self, words: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.hidden(words, places))
        return out


@dataclass(frozen=True)
class ContextRun:
    """What a run does."""

    how: str = "zigzag"
    optimizer: str = "adamw"
    steps: int = 5
    clip: float | None = None
    dp: int = 1
    """Ranks that have other samples; those of a sequence follow each other."""
    ignores: bool = False
    """Whether labels of some positions do not count."""
    loss: str = "mean"
    """"mean", "linear" (without logits), or "own" (a sum of ours over a count of ours)."""
    rows: int = SAMPLES
    """Samples that units take at once."""
    tile: int | None = None
    """Positions that MLPs take at once."""
    settings: Mapping[str, Any] = field(default_factory=lambda: TIGHT)


@dataclass
class Trained:
    """What a run came to on one rank."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    states: list[torch.Tensor]
    status: Any = None


def batch(run: ContextRun, step: int, dp_rank: int) -> list[torch.Tensor]:
    """Return words, labels and places of whole sequences: the label is the next word."""
    source = torch.Generator().manual_seed(1000 * step + dp_rank)
    words = torch.randint(0, WORDS, (SAMPLES, LENGTH + 1), generator=source)
    labels = words[:, 1:].clone()
    if run.ignores:
        labels[:, : LENGTH // 3] = -100
    return [words[:, :-1].clone(), labels, torch.arange(LENGTH).expand(SAMPLES, -1).clone()]


def built(run: ContextRun) -> tuple[LM, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = LM()
    for block in model.blocks if run.tile else ():
        hetero.tile(block.mlp, size=run.tile)
    return model, OPTIMIZERS[run.optimizer](model.parameters())


def mesh_of(run: ContextRun) -> Any:
    """Return the ranks of this one's sequences."""
    sizes = (run.dp, dist.get_world_size() // run.dp)
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp_shard", "cp"))["cp"]


def averaged(model: nn.Module) -> None:
    """Make each gradient the mean of all ranks', added in their order."""
    size = dist.get_world_size()
    for param in model.parameters():
        if param.grad is None:
            continue
        rows = [torch.empty_like(param.grad) for _ in range(size)]
        dist.all_gather(rows, param.grad.contiguous())
        total = rows[0] * (1 / size)
        for row in rows[1:]:
            total.add_(row * (1 / size))
        param.grad = total


def loss_of(
    model: LM, run: ContextRun, parts: Any, words: torch.Tensor, labels: torch.Tensor, places: Any
) -> torch.Tensor:
    """Return this rank's loss: with others' the mean over the labels that count."""
    if run.loss == "linear":
        hidden = model.hidden(words, places)
        return hetero.linear_cross_entropy(hidden, model.head.weight, labels)
    logits, flat = model(words, places).flatten(0, 1), labels.flatten()
    if run.loss == "mean" and run.rows == SAMPLES:
        return F.cross_entropy(logits, flat)
    total = F.cross_entropy(logits, flat, reduction="sum")
    if run.loss == "own":
        found: torch.Tensor = parts.mean(total, (flat != -100).sum())
        return found
    return total / (SAMPLES * words.shape[1])  # of whole batches, of which this may be a slice


def train(model: Any, optimizer: Any, run: ContextRun, *, is_prepared: bool) -> Trained:
    mesh = mesh_of(run)
    dp_rank = dist.get_rank() // mesh.size()
    losses, norms = [], []
    for step in range(run.steps):
        whole, total = batch(run, step, dp_rank), 0.0
        # plain torch accumulates over the samples that units of hetero take at once
        for at in range(0, SAMPLES, SAMPLES if is_prepared else run.rows):
            rows = slice(at, at + SAMPLES if is_prepared else at + run.rows)
            given = [each[rows].clone() for each in whole]
            with context_parallel(mesh, run.how, buffers=given, buffer_seq_dims=[1, 1, 1]) as parts:
                loss = loss_of(model, run, parts, *given)
                loss.backward()
            total += float(loss.detach())
        losses.append(total)
        if not is_prepared:
            averaged(model)
        if run.clip is not None:
            clip = optimizer.clip_grad_norm_ if is_prepared else clip_of(model)
            norms.append(float(clip(run.clip)))
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    kept = optimizer.state_dict()["state"].values()
    states = [v.clone() for state in kept for v in state.values() if isinstance(v, torch.Tensor)]
    return Trained(losses, norms, weights, states)


def clip_of(model: nn.Module) -> Any:
    return lambda most: nn.utils.clip_grad_norm_(model.parameters(), most)


def by_torch(run: ContextRun) -> Trained:
    return train(*built(run), run, is_prepared=False)


def by_hetero(run: ContextRun, **settings: Any) -> Trained:
    model, plain = built(run)
    mesh = {"dp_shard": run.dp, "cp": dist.get_world_size() // run.dp}
    if run.rows < SAMPLES:
        settings["micro_batch"] = run.rows
    given = {"mesh": mesh, **run.settings, **settings}
    model, optimizer = hetero.prepare(model, plain, **given)
    found = train(model, optimizer, run, is_prepared=True)
    found.status = hetero.status(model)
    hetero.release(model, optimizer)
    return found


def difference(one: Trained, other: Trained) -> list[str]:
    """Return the names of what has other bits."""
    odd = [name for name in ("losses", "norms") if getattr(one, name) != getattr(other, name)]
    odd += [n for n, value in one.weights.items() if not torch.equal(value, other.weights[n])]
    pairs = zip(one.states, other.states, strict=True)
    return odd + [f"state {n}" for n, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
