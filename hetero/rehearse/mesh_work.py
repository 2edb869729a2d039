"""A step on a mesh of ranks that is to be planned, and what of it is refused (floor 4)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hetero.config import Config
from hetero.errors import ConfigError
from hetero.parallel.mesh import (
    AXES,
    REPLICATE,
    SHARD,
    STAGES,
    TENSOR,
    check_axes,
    refuse_context,
)
from hetero.parallel.orders import order_of as torchs
from hetero.parallel.splitting import kind_of
from hetero.plan.machine import MachineProfile
from hetero.plan.pipeline import (
    HALVED,
    INTERLEAVED,
    KINDS,
    LOOPED,
    SCHEDULES,
    V_SHAPED,
    Pass,
    order_of,
    ranks_of,
    round_of,
)
from hetero.plan.shape import KINDS as DECODERS
from hetero.plan.shape import DecoderShape, check_divides, shape_of
from hetero.rehearse.clock import Costs
from hetero.rehearse.mirror import NO_CONTEXT
from hetero.rehearse.models import POSITIONS
from hetero.rehearse.named import ModelConfig, config_of, machine

EXCHANGES = ("step", "pass")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshWork:
    """A step on a mesh."""

    shape: DecoderShape
    name: str
    sizes: Mapping[str, int]
    """Of all axes."""
    samples: int
    """Of a step, of each rank that has batches of its own."""
    sequence: int
    micro_batch: int
    """Samples of a pass."""
    schedule: str
    n_turns: int
    """Stages of a rank."""
    exchange: str
    """"step" or "pass": after which ranks exchange gradients."""
    config: Config
    profile: MachineProfile
    costs: Costs = field(default_factory=Costs)
    """Of operations: stages have layers of one shape."""

    @property
    def depth(self) -> int:
        """Ranks of a pipeline."""
        return self.sizes[STAGES]

    @property
    def n_ranks(self) -> int:
        return self.depth * self.sizes[TENSOR] * self.n_copies

    @property
    def n_copies(self) -> int:
        """Ranks that have batches of their own."""
        return self.sizes[SHARD] * self.sizes[REPLICATE]

    @property
    def n_passes(self) -> int:
        """Micro-batches of a step."""
        return self.samples // self.micro_batch

    @property
    def at_once(self) -> int:
        """Micro-batches that a stage runs before its rank turns to its next one, if it has one."""
        if self.n_turns == 1:
            return 1
        return round_of(self.schedule, self.depth, self.n_passes, self.n_turns)

    @property
    def ranks(self) -> list[int]:
        """Of each stage, its rank of the pipeline."""
        return ranks_of(self.schedule, self.depth, self.n_turns)

    def order(self, rank: int, n_passes: int | None = None) -> list[Pass]:
        """Return what a rank does in a step of so many passes; None: as many as there are."""
        n = n_passes or self.n_passes
        if self.schedule in HALVED:
            return [*halves_of(self.schedule, self.ranks, n, rank)]
        return order_of(self.schedule, self.depth, n, rank, self.n_turns, self.at_once)


def halves_of(schedule: str, ranks: Sequence[int], n_passes: int, rank: int) -> Iterator[Pass]:
    """Yield what torch's schedule of halves does on a rank; the first stage has no gradients of
    inputs, and makes whole backwards."""
    mine = [stage for stage, owner in enumerate(ranks) if owner == rank]
    for kind, stage, batch in torchs(kind_of(KINDS[schedule]), ranks, n_passes, rank):
        is_whole = kind == "B" or (kind == "W" and stage == 0)
        if kind != "I" or stage:
            half = "" if kind == "F" or is_whole else kind
            yield Pass(batch, kind == "F", mine.index(stage), half)


def mesh_work(
    model: ModelConfig,
    batch: tuple[int, int] | None = None,
    *,
    schedule: str = "1f1b",
    stages_per_rank: int | None = None,
    exchange: str = "step",
    config: Any = None,
    **settings: Any,
) -> MeshWork:
    """Return the work that a model, a batch and settings describe; see `plan_mesh`."""
    samples, sequence = batch or (1, POSITIONS)
    known = Config.load(config, **settings)
    mapping, name = config_of(model)
    shape = shape_of(mapping)
    if shape is None:
        raise ConfigError(
            f"{name}: a mesh with stages or divided tensors is planned of a published decoder",
            advice=f"name one, or a configuration of {', '.join(DECODERS)} that says no more"
            " than its sizes",
        )
    sizes = sizes_of_axes(known.mesh or {})
    check_divides(shape, sizes[TENSOR])
    if schedule not in SCHEDULES or exchange not in EXCHANGES:
        raise ConfigError(
            f"schedule={schedule!r}, exchange={exchange!r}",
            advice=f"schedules are {', '.join(SCHEDULES)}; exchanges are after each"
            f" {' or '.join(EXCHANGES)}",
        )
    apart = [axis for axis in (SHARD, REPLICATE) if sizes[axis] > 1]
    if schedule in HALVED and apart:
        raise ConfigError(
            f"schedule={schedule!r} with {apart[0]}: ranks of it do not sum gradients that are"
            " computed between passes",
            advice=f"use 1f1b or {INTERLEAVED}",
        )
    if known.fused_loss and sizes[STAGES] > 1:
        raise ConfigError(
            "fused_loss with stages: hetero.prepare knows the head of a whole model alone",
            advice="leave it out, and call hetero.linear_cross_entropy in the last stage's loss",
        )
    if known.gather_shares and sizes[STAGES] * sizes[TENSOR] > 1:
        raise ConfigError(
            "gather_shares with stages or divided tensors, which CUDA devices do not gather",
            advice="leave it out, or plan ranks that share the model alone",
        )
    micro_batch = known.micro_batch or 1
    if samples % micro_batch:
        raise ConfigError(
            f"{samples} samples make no passes of {micro_batch}",
            advice="let micro_batch= divide the batch",
        )
    work = MeshWork(
        shape=shape,
        name=name,
        sizes=sizes,
        samples=samples,
        sequence=sequence,
        micro_batch=micro_batch,
        schedule=schedule,
        n_turns=stages_per_rank or (2 if schedule in (*LOOPED, *V_SHAPED) else 1),
        exchange=exchange,
        config=replace(known, micro_batch=None),
        profile=machine(known),
    )
    round_of(schedule, work.depth, work.n_passes, work.n_turns)  # or it is refused at once
    work.order(0)
    return work


def sizes_of_axes(mesh: Mapping[str, Any]) -> dict[str, int]:
    """Return the size of each axis of a mesh; ConfigError for one that `hetero.prepare` refuses."""
    check_axes(mesh)
    sizes = {axis: int(mesh.get(axis, 1)) for axis in AXES}
    refuse_context(mesh, "a plan", NO_CONTEXT)
    if sizes[REPLICATE] > 1 and sizes[SHARD] == 1:
        raise ConfigError(
            f"mesh={dict(mesh)}: nothing would average the gradients of {sizes[REPLICATE]} whole"
            " models",
            advice=f"let them share the model: {SHARD} in place of {REPLICATE}, or dp for short",
        )
    return sizes
