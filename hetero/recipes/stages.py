"""`hetero train` on the stages of a pipeline (floor 4).

The micro-batches are the passes of a step, in the same order, each with its weight in the loss: so
the run is that of one rank with the same passes, bit for bit.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import pickle
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from hetero.api import engine_of
from hetero.config import Config
from hetero.errors import ConfigError
from hetero.parallel.anatomy import DROPOUTS
from hetero.parallel.launch import Launch
from hetero.parallel.mesh import SHARD, STAGES, TENSOR, sizes_named, sizes_of
from hetero.parallel.orders import orders_of
from hetero.parallel.splitting import (
    RankStages,
    is_multi,
    kind_of,
    pipeline_group,
    ranks_of,
    split,
)
from hetero.parallel.stages import Cut, stages_in
from hetero.parallel.ties import shared_weights
from hetero.plan.pipeline import HALVED, INTERLEAVED, KINDS
from hetero.recipes.learners import raw, weights_of
from hetero.recipes.options import TrainOptions
from hetero.recipes.passes import Passes
from hetero.recipes.setup import Size, size_of
from hetero.recipes.task import Task
from hetero.recipes.text import Batch
from hetero.rehearse.named import machine
from hetero.rehearse.split import MachineClock

PIECE_BYTES = 16 << 20
"""Of a weight, that all ranks are sent at once for the digest."""


@dataclasses.dataclass(frozen=True)
class StagedTask:
    """A rank's stages of a task's model."""

    task: Task
    """Whose model is those stages."""
    found: RankStages
    names: tuple[str, ...]
    """In the state dict of the whole model, of what trains."""


def staged(task: Task, options: TrainOptions, config: Config) -> StagedTask:
    """Return this rank's stages of a task. Collective.

    Raises ConfigError, on all ranks, for what would not have the bits of one rank.
    """
    check_dropout(task.model)
    ids = torch.empty(options.batch, options.seq, dtype=torch.long, device="meta")
    clock = MachineClock(machine(config)) if config.profile else None
    found = split(
        *(task.model, config.mesh, KINDS[options.pipeline]),
        batch=ids,
        call=task.call,
        stages_per_rank=options.stages_per_rank,
        labels="targets" if options.is_demo else "labels",
        clock=clock,
    )
    check_alone(task.model, found.cut)
    frozen = {name for name, param in task.model.named_parameters() if not param.requires_grad}
    names = tuple(name for name in task.model.state_dict() if name not in frozen)
    mine = dataclasses.replace(task, model=found.stages.train(), write=refuse_writing)
    return StagedTask(mine, found, names)


def refuse_writing(folder: Path) -> NoReturn:
    raise AssertionError("refused before the run")


def check_options(options: TrainOptions, config: Config, ranks: Launch) -> None:
    """Raise ConfigError for options that stages cannot have, before anything is built."""
    if ranks.size == 1:
        named = sizes_named(config.mesh)
        given = ",".join(f"{axis}={n}" for axis, n in named.items())
        raise ConfigError(
            f"--mesh {given}: this is the only rank",
            advice=f"start it as torchrun --nproc-per-node {math.prod(named.values())} -m hetero"
            f" train --mesh {given} ...",
        )
    sizes = sizes_of(config.mesh, ranks.size)
    n_copies = ranks.size // sizes[STAGES] // sizes[TENSOR]
    check_passes(options, sizes[STAGES], n_copies)
    check_pipeline(options, config, sizes, n_copies)
    if options.task == "sft":
        raise ConfigError(
            f"--mesh with {STAGES} and --task sft: stages send each other tensors of one size, and"
            " answers differ in length",
            advice="use --mesh dp_shard=N, or tp=N; or --task pretrain",
        )
    if options.lora_rank is not None:
        raise ConfigError(
            f"--mesh with {STAGES} and --lora-rank: a model with adapters is not cut into stages",
            advice="use --mesh dp_shard=N: a frozen model of which each rank keeps a share",
        )
    if config.precision == "fp16":
        raise ConfigError(
            f"--mesh with {STAGES} and --precision fp16: a schedule begins backward passes itself,"
            " and does not scale the loss",
            advice="use --precision bf16",
        )
    if options.out is not None:
        raise ConfigError(
            f"--mesh with {STAGES} and --out: one rank writes the whole model, and each has some"
            " layers of it",
            advice="leave --out out; when the run is over, write the model on one rank, without"
            " --mesh, by --resume --save-dir and --out",
        )


def check_no_pipeline(options: TrainOptions) -> None:
    """Raise ConfigError for options of stages without any."""
    default = TrainOptions()
    for name in ("pipeline", "stages_per_rank"):
        if (given := getattr(options, name)) != getattr(default, name):
            raise ConfigError(
                f"--{name.replace('_', '-')} {given}: the model is not cut into stages",
                advice=f"leave it out, or use --mesh {STAGES}=N",
            )


def check_passes(options: TrainOptions, n_stages: int, n_copies: int) -> None:
    """Raise ConfigError for fewer passes than fill the pipelines."""
    least = n_stages * n_copies
    if options.accumulate < least or options.accumulate % n_copies:
        enough = max(least, -(-options.accumulate // n_copies) * n_copies)
        raise ConfigError(
            f"--accumulate {options.accumulate} on {n_copies} pipelines of {n_stages} stages: the"
            " passes of a step are the micro-batches, which fill a pipeline from as many as it has"
            " stages",
            advice=f"use --accumulate {enough}, or more: the more, the less ranks wait",
        )


def check_pipeline(
    options: TrainOptions, config: Config, sizes: Mapping[str, int], n_copies: int
) -> None:
    """Raise ConfigError for a pipeline that is not there, or has other bits than one rank."""
    named = f"--pipeline {options.pipeline}"
    kind = kind_of(KINDS[options.pipeline])
    halves = options.pipeline in HALVED
    for there, what, why in (
        (n_copies > 1, SHARD, "ranks that share a stage sum gradients in a backward pass"),
        (config.precision == "bf16", "--precision bf16", "these add up in bf16, not in fp32"),
    ):
        if halves and there:
            raise ConfigError(
                f"{named} with {what}: it computes gradients of weights between passes, and {why}",
                advice=f"use --pipeline 1f1b or {INTERLEAVED}",
            )
    orders_of(
        kind, ranks_of(kind, sizes[STAGES], options.stages_per_rank), options.accumulate // n_copies
    )


def check_alone(model: nn.Module, cut: Cut) -> None:
    """Raise ConfigError for a weight of several stages of a rank, whose gradients add up in another
    order than one rank's."""
    shared = next(shared_weights(model, cut), None)
    if shared is not None:
        raise ConfigError(
            f"{shared[0]!r} and {shared[-1]!r} are one weight of two stages, whose gradients add up"
            " in another order than on one rank",
            advice="give the head a weight of its own (tie_word_embeddings=false in config.json),"
            " or use --mesh dp_shard=N",
        )


def check_dropout(model: nn.Module) -> None:
    """Raise ConfigError for a model that drops out: each rank would draw numbers of its own."""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            is_rate = isinstance(value, float) and ("drop" in key or isinstance(module, DROPOUTS))
            if is_rate and value > 0:
                raise ConfigError(
                    f"--mesh with {STAGES}: {name or 'the model'!r} drops out ({key}={value}), and"
                    " stages of other ranks would draw other numbers than one rank does",
                    advice="set the model's dropout to 0 in its config.json, or use --mesh"
                    " dp_shard=N",
                )


class Scheduled:
    """A schedule of stages makes the passes of a step.

    Args:
        staged: whose stages are prepared.
        n_tensor: ranks that divide a tensor, which make the same passes.
    """

    def __init__(
        self,
        staged: StagedTask,
        ranks: Launch,
        place: torch.device,
        passes: Passes,
        n_tensor: int,
        options: TrainOptions,
    ) -> None:
        self._task, self._ranks, self._place, self._passes = staged.task, ranks, place, passes
        self._names = staged.names
        found = staged.found
        if place.type == "cuda":  # gloo sends nothing from there
            n_ranks = found.cut.n_ranks
            group = pipeline_group({STAGES: n_ranks}, ranks.size, n_ranks, "nccl")
            found = dataclasses.replace(found, group=group)
        self._found = found
        self._everyone = engine_of(staged.task.model).setup.everyone
        n_stage = ranks.size // found.cut.n_ranks
        self._firsts = range(0, ranks.size, n_stage)  # of the ranks of each stage
        last = found.cut.stages[-1].rank * n_stage
        self._lasts = range(last, last + n_stage, n_tensor)  # who have losses
        self._n_mine = options.accumulate // passes.size
        self._schedule = found.schedule(
            *(self._n_mine, weighted_loss),
            device=place,
            exchange=options.exchange,
            scale_grads=False,  # losses have their weights
        )
        self._evaluating: dict[Any, Any] = {}

    def learn(self, batches: Sequence[Batch], step: int) -> list[torch.Tensor]:
        weights = weights_of(batches, self._passes.size)
        mine = self._passes.mine(batches)
        told = torch.tensor([weights[number] for number, _ in mine], dtype=torch.float64)
        losses = self._run(self._schedule.step, [batch for _, batch in mine], told)
        return [loss.detach() for loss in losses]

    def told(self, losses: Sequence[torch.Tensor]) -> list[float]:
        return self._spread([loss.item() / self._passes.size for loss in losses])

    def evaluate(self, batches: Sequence[Batch]) -> list[float]:
        dealt, size = self._passes.dealt(batches), self._passes.size
        rounds = [dealt[at : at + size] for at in range(0, len(dealt), size)]
        found: list[float] = []
        for shapes, alike in itertools.groupby(rounds, key=shapes_of):
            for some in in_parts(list(alike), self._n_mine):
                mine = [self._passes.mine(each)[0][1] for each in some]
                n = len(mine)
                if is_multi(self._found.kind):  # which takes no other number
                    mine += mine[-1:] * (self._n_mine - n)
                key = len(mine), shapes
                if key not in self._evaluating:
                    made = self._found.evaluation(len(mine), own_loss, device=self._place)
                    self._evaluating[key] = made
                ones = torch.ones(len(mine))
                losses = self._run(self._evaluating[key].eval, mine, ones)
                found += [loss.item() for loss in losses[:n]]
        return self._spread(found)[: len(batches)]

    def _run(self, run: Any, mine: Sequence[Batch], target: torch.Tensor) -> list[torch.Tensor]:
        """Run a schedule on batches; returns their losses where the last stage is."""
        inputs, labels = mine[0]
        joined = {name: torch.cat([each[name] for each in mine]) for name in (inputs, labels)}
        losses: list[torch.Tensor] = []
        given: dict[str, Any] = {}
        if self._found.is_last:
            there = joined[labels].to(self._place)
            given = {labels: there, "target": target, "losses": losses}
        run(*[joined[inputs].to(self._place)] * self._found.is_first, **given)
        return losses

    def _spread(self, mine: list[float]) -> list[float]:
        """Return the figures of the last stage's ranks, in the order of the passes."""
        rows = self._everyone.agree(pickle.dumps(mine), "figures of a step")
        told: list[list[float]] = [pickle.loads(rows[rank]) for rank in self._lasts]
        return [row[at] for at in range(len(told[0])) for row in told]

    # -- the whole model -------------------------------------------------------------------------

    def size(self) -> Size:
        mine = self._ranks.each(lambda: size_of(self._task.model), "sizes of stages")
        return Size(*map(sum, zip(*(mine[rank] for rank in self._firsts), strict=True)))

    def digest(self) -> str:
        own = {
            stage.in_whole(name): value
            for _, stage in stages_in(self._found.stages)
            for name, value in stage.state_dict().items()
        }
        mine = {name: raw(name, own[name], gathers=True) for name in self._names if name in own}
        sizes = self._ranks.each(lambda: {n: len(row) for n, row in mine.items()}, "weights")
        sha = hashlib.sha256()
        for name in self._names:
            owner = next(rank for rank, row in enumerate(sizes) if name in row)
            for start in range(0, sizes[owner][name], PIECE_BYTES):
                end = min(start + PIECE_BYTES, sizes[owner][name])
                piece = torch.empty(end - start, dtype=torch.uint8, device="cpu")
                if self._ranks.rank == owner:
                    piece.copy_(mine[name][start:end])
                self._ranks.spread(piece, owner, "the digest of weights")
                sha.update(piece.numpy().data)
        return sha.hexdigest()


def weighted_loss(output: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the part of a micro-batch in the mean over all tokens, of its mean loss [1]."""
    return output[0] * weight.item()


def own_loss(output: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return a micro-batch's mean loss [1] as it is."""
    return output[0]


def shapes_of(batches: Iterable[Batch]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(next(iter(batch.values())).shape) for batch in batches)


def in_parts(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[at : at + size] for at in range(0, len(items), size)]
