"""A plan of a decoder on a mesh: one rank of each kind of stage is rehearsed (floor 4).

A stage's rank has its layers, and its part of each tensor. It runs the passes of its schedule, and
its data parallel ranks are mirrored. How the passes of all stages follow each other is played then.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from hetero.errors import BudgetError
from hetero.parallel.mesh import SHARD, STAGES, TENSOR
from hetero.plan.network import node_size, send_seconds
from hetero.plan.pipeline import HALVED, KINDS, Pass, Played, most_in_flight, played
from hetero.plan.shape import StageShare, even_cut
from hetero.rehearse.decoders import decoder
from hetero.rehearse.mesh_work import MeshWork, mesh_work
from hetero.rehearse.models import META
from hetero.rehearse.named import ModelConfig
from hetero.rehearse.plan import settings_of
from hetero.rehearse.rehearsal import Rehearsal, Scene, rehearse, set_apart
from hetero.train.engine.lacking import lacking, refuse_lacking
from hetero.types import Tier

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SPARE_PASSES = 4  # micro-batches that are rehearsed beyond those in flight: of these, one is steady


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """A rank of a stage, or of several."""

    stage: int
    """Its first one; every stage as far on as a pipeline has ranks is its own, too."""
    layers: int
    numel: int
    """Parameters that it has."""
    peaks: Mapping[str, int]
    """The most bytes of each tier, of one rank."""
    kinds: Mapping[str, int]
    """The most bytes of each kind in HBM; their peaks may be at different times."""
    in_flight: int
    """Forwards that wait for their backward at once."""
    forward_seconds: float
    backward_seconds: float
    """Of a micro-batch in the middle of a step, through all of its stages."""
    summed_seconds: float
    """Of a micro-batch's sums over ranks that divide tensors, in both passes."""
    rest_seconds: float
    """Of its step beyond the passes: gradients exchanged, weights updated and gathered."""
    flops: float
    """Of a step."""
    policies: Mapping[str, int]
    shortfall: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPlan:
    """What a step on a mesh takes."""

    model: str
    profile: str
    n_params: int
    mesh: Mapping[str, int]
    n_ranks: int
    n_passes: int
    schedule: str
    stages_per_rank: int
    exchange: str
    """"step" or "pass": after which ranks exchange gradients."""
    fits: bool
    stages: tuple[StagePlan, ...]
    step_seconds: float
    """0 if it does not fit, as all times and rates then."""
    pipeline_seconds: float
    """From the first pass to the last one of any rank."""
    bubble: float
    """The part of them in which the busiest rank waits for others."""
    send_seconds: float
    """Of what a stage sends the next one, a micro-batch."""
    tokens: int
    """Of a step, of all ranks."""
    flops: float
    """Of a step, of all ranks, what is computed again among them."""
    settings: Mapping[str, Any]
    limit: str
    """What most of a step of the busiest rank is spent on."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds if self.step_seconds else 0.0

    @property
    def tflops(self) -> float:
        """Of each rank, in units of 10^12 a second."""
        return self.flops / self.step_seconds / self.n_ranks / 1e12 if self.step_seconds else 0.0

    @property
    def paste(self) -> str:
        """The line for a training script."""
        mesh = {axis: n for axis, n in self.mesh.items() if n > 1}
        given = "".join(f", {key}={value!r}" for key, value in self.settings.items())
        what = "stages" if STAGES in mesh else "model"
        line = f"{what}, optimizer = hetero.prepare({what}, optimizer, mesh={mesh!r}{given})"
        if STAGES not in mesh:
            return f"{line}  # {self.n_passes} passes a step"
        given = f", exchange={self.exchange!r}" if self.mesh.get(SHARD, 1) > 1 else ""
        made = f"schedule = found.schedule({self.n_passes}, loss_of{given})"
        return f"{line}; {made}  # {KINDS[self.schedule]}"

    def as_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        others = ("tokens_per_second", "tflops", "paste")
        return {**asdict(self), **{name: getattr(self, name) for name in others}}


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsedStage:
    """One rank of a stage or of several, and the micro-batches that were rehearsed."""

    shares: Sequence[StageShare]
    order: Sequence[Pass]
    at_once: int
    """Micro-batches of a round."""
    in_flight: int
    found: Rehearsal | None
    shortfall: str

    @property
    def n_passes(self) -> int:
        """Micro-batches that were rehearsed."""
        return sum(each.forward for each in self.order) // len(self.shares)

    def seconds(self, here: Pass, n_passes: int) -> float:
        """Return the time of a pass in a step of ``n_passes``: the first and the last ones are as
        rehearsed, those between as the one of the round in the middle."""
        steps = self.found.steps if self.found is not None else ()
        if not steps:
            return 0.0
        batch, half = here.batch, self._middle
        if batch >= half:
            from_the_end = batch - (n_passes - self.n_passes)
            batch = max(from_the_end, half + (batch - half) % self.at_once)
        return steps[-1].pass_seconds[self.order.index(here._replace(batch=batch))]

    @property
    def _middle(self) -> int:
        """The first micro-batch of the round in the middle; of halves, which have no rounds, the
        one there."""
        if any(each.half for each in self.order):
            return self.n_passes // 2
        return self.n_passes // 2 // self.at_once * self.at_once

    def through(self, batch: int, n_passes: int, *, forward: bool) -> float:
        """Return the time of a micro-batch through all of its stages."""
        at = batch if n_passes == self.n_passes else self._middle
        alike = [p for p in self.order if p.batch == at and p.forward == forward]
        return sum(self.seconds(here._replace(batch=batch), n_passes) for here in alike)

    @property
    def end_seconds(self) -> float:
        """From its last pass to the end of its step."""
        steps = self.found.steps if self.found is not None else ()
        return max(0.0, steps[-1].seconds - sum(steps[-1].pass_seconds)) if steps else 0.0

    @property
    def rest_seconds(self) -> float:
        """Of its step, beyond as many passes as there are, all like the one in the middle."""
        steps = self.found.steps if self.found is not None else ()
        if not steps:
            return 0.0
        n = self.n_passes
        middle = sum(self.through(self._middle, n, forward=way) for way in (True, False))
        return max(0.0, steps[-1].seconds - n * middle)


def plan_mesh(
    model: ModelConfig, batch: tuple[int, int] | None = None, **settings: Any
) -> MeshPlan:
    """Find out the memory and the time of a step on a mesh with stages and divided tensors.

    Args:
        model: the name of a published decoder, or its configuration.
        batch: (samples, positions) of a step, of each rank that has batches of its own.
        settings: as for `hetero.prepare`; ``mesh`` has sizes of pp, dp_replicate, dp_shard and tp;
            ``micro_batch`` are samples of a pass; ``schedule`` is "1f1b", "gpipe", "interleaved" or
            "interleaved-zb", with ``stages_per_rank`` (2), "zbv" or "dualpipev"; ``exchange``
            "step" for gradients that are exchanged after the last pass of a step alone
            (`hetero.no_sync` around the others), "pass" for those of every pass.

    Raises ConfigError for what cannot be planned.
    """
    work = mesh_work(model, batch, **settings)
    with set_apart():
        return drawn(work, stages_of(work))


def stages_of(work: MeshWork) -> list[RehearsedStage]:
    """Rehearse a rank of each kind of stage; returns that of each rank of a pipeline.

    Stages with as many layers are of a kind. Of these the first rank holds most micro-batches, and
    it is the one that is rehearsed; each rank is, where backwards have halves, whose order differs.
    """
    ranks = work.ranks
    cut = even_cut(work.shape, len(ranks), work.sizes[TENSOR])
    shares = [
        [share for share, owner in zip(cut, ranks, strict=True) if owner == rank]
        for rank in range(work.depth)
    ]
    refuse_lacking([lacking(stages_in(work, own), None, work.config) for own in shares])
    kinds: list[tuple[Any, ...]] = [
        tuple((each.n_layers, each.opens, each.closes) for each in own) for own in shares
    ]
    if work.schedule in HALVED:
        kinds = [(*kind, rank) for rank, kind in enumerate(kinds)]
    seen: dict[tuple[Any, ...], RehearsedStage] = {}
    for rank, (own, kind) in enumerate(zip(shares, kinds, strict=True)):
        if kind not in seen:
            fits = not any(other.shortfall for other in seen.values())
            seen[kind] = rehearsed(work, rank, own) if fits else skipped(work, rank, own)
    return [seen[kind] for kind in kinds]


def skipped(work: MeshWork, rank: int, shares: Sequence[StageShare]) -> RehearsedStage:
    """Return a rank that need not be rehearsed: another one does not fit."""
    order = work.order(rank)
    return RehearsedStage(
        shares=shares,
        order=order,
        at_once=work.at_once,
        in_flight=most_in_flight(order),
        found=None,
        shortfall="",
    )


def rehearsed(work: MeshWork, rank: int, shares: Sequence[StageShare]) -> RehearsedStage:
    """Rehearse a rank: as many micro-batches as are in flight, and some more, in whole rounds."""
    in_flight = most_in_flight(work.order(rank))
    rounds = math.ceil((in_flight / work.n_turns + SPARE_PASSES) / work.at_once)
    n_passes = rounds * work.at_once
    order = work.order(rank, min(work.n_passes, n_passes))
    found, said = None, ""
    try:
        found = rehearse(scene_of_stage(work, shares, order))
    except BudgetError as error:
        said = str(error.args[0])
    if found is not None and found.error is not None:
        said = str(found.error.args[0])
    return RehearsedStage(
        shares=shares,
        order=order,
        at_once=work.at_once,
        in_flight=in_flight,
        found=found,
        shortfall=said,
    )


def stages_in(work: MeshWork, shares: Sequence[StageShare]) -> nn.Module:
    """Return the model of a rank."""
    stages = [decoder(work.shape, share) for share in shares]
    return stages[0] if len(stages) == 1 else nn.ModuleList(stages)


def scene_of_stage(work: MeshWork, shares: Sequence[StageShare], order: Sequence[Pass]) -> Scene:
    """Return what a rank does in a step."""
    model = stages_in(work, shares)
    tokens = torch.empty(work.micro_batch, work.sequence, dtype=torch.long, device=META)
    return Scene(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        args=(),
        kwargs={"input_ids": tokens, "labels": tokens},
        loss=sent_or_loss,
        config=work.config,
        profile=work.profile,
        order=order,
        exchange_once=work.n_copies > 1 and work.exchange == "step",
        costs=work.costs,
    )


def sent_or_loss(output: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return where backward of a stage begins: at its loss, or at what it sends on."""
    return output["loss"] if "loss" in output else output["hidden"]


# -- the plan of them ----------------------------------------------------------------------------


def drawn(work: MeshWork, stages: Sequence[RehearsedStage]) -> MeshPlan:
    """Return the plan of rehearsed stages."""
    n = work.n_passes
    orders = [work.order(rank) for rank in range(work.depth)]
    sends = sends_of(work)
    run = played(
        *(orders, lambda at, i: stages[at].seconds(orders[at][i], n), lambda at: sends[at]),
        ranks=work.ranks,
    )
    ends = (end + stage.end_seconds for end, stage in zip(run.ends, stages, strict=True))
    plans = tuple(stage_plan(work, stage, at) for at, stage in enumerate(stages))
    mesh = {axis: size for axis, size in work.sizes.items() if size > 1}
    fits = not any(plan.shortfall for plan in plans)
    seconds = max(ends) if fits else 0.0
    return MeshPlan(
        model=work.name,
        profile=work.profile.name,
        n_params=work.shape.numel,
        mesh=mesh,
        n_ranks=work.n_ranks,
        n_passes=n,
        schedule=work.schedule,
        stages_per_rank=work.n_turns,
        exchange=work.exchange,
        fits=fits,
        stages=plans,
        step_seconds=seconds,
        pipeline_seconds=run.seconds if fits else 0.0,
        bubble=run.bubble if fits else 0.0,
        send_seconds=max(sends, default=0.0),
        tokens=work.samples * work.n_copies * work.sequence,
        flops=sum(plan.flops for plan in plans) * work.sizes[TENSOR] * work.n_copies,
        settings=settings_of(replace(work.config, mesh=None)),
        limit=limit_of(work, run, plans, seconds),
    )


def sends_of(work: MeshWork) -> list[float]:
    """Return the time of what each stage but the last sends the next one, a micro-batch."""
    size = torch.finfo(DTYPES[work.config.precision]).bits // 8
    n_bytes = work.micro_batch * work.sequence * work.shape.width * size
    ranks = work.n_ranks // work.depth  # of a stage, one after the other
    devices = node_size(work.profile, work.n_ranks)
    nodes = [rank * ranks // devices for rank in range(work.depth)]
    return [
        send_seconds(work.profile, n_bytes, near=nodes[here] == nodes[there])
        if here != there
        else 0
        for here, there in itertools.pairwise(work.ranks)
    ]


def stage_plan(work: MeshWork, stage: RehearsedStage, at: int) -> StagePlan:
    """Return the figures of a rank of a stage."""
    found, n = stage.found, work.n_passes
    middle = n // 2
    peaks, kinds, flops, summed = {}, {}, 0.0, 0.0
    if found is not None:
        peaks = {tier.name: n_bytes for tier, n_bytes in found.peaks.items() if n_bytes}
        kinds = {k.value: b for (tier, k), b in found.kinds.items() if tier is Tier.HBM and b}
        if found.steps:
            flops = found.steps[-1].flops / stage.n_passes * n
            summed = found.steps[-1].summed_seconds / stage.n_passes
    return StagePlan(
        stage=at,
        layers=sum(share.n_layers for share in stage.shares),
        numel=sum(sum(work.shape.share_numel(share)) for share in stage.shares),
        peaks=peaks,
        kinds=kinds,
        in_flight=stage.in_flight,
        forward_seconds=stage.through(middle, n, forward=True),
        backward_seconds=stage.through(middle, n, forward=False),
        summed_seconds=summed,
        rest_seconds=stage.rest_seconds,
        flops=flops,
        policies=dict(Counter(found.policies.values())) if found is not None else {},
        shortfall=stage.shortfall,
    )


def limit_of(work: MeshWork, run: Played, plans: Sequence[StagePlan], seconds: float) -> str:
    """Return what most of the busiest rank's step is spent on."""
    at = max(range(len(plans)), key=lambda stage: run.busy[stage])
    summed = plans[at].summed_seconds * work.n_passes
    parts = {
        "compute": run.busy[at] - summed,
        "sums over tp": summed,
        "the bubble": run.seconds - run.busy[at],
        "updates and exchanges": seconds - run.seconds + plans[at].rest_seconds,
    }
    return max(parts, key=lambda part: parts[part])
