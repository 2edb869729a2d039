"""`split`: a rank's stages of a model, balanced (floor 3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from hetero.errors import ConfigError
from hetero.internals import leave_forwards
from hetero.parallel.anatomy import (
    Anatomy,
    Call,
    Clock,
    Followed,
    Products,
    blank,
    examine,
    refuse,
    sample,
    without_bytes,
)
from hetero.parallel.grouped import of_any_dtype
from hetero.parallel.mesh import STAGES, sizes_of, stage_ranks, world_size
from hetero.parallel.stages import Cut, ModelStage, cut_model
from hetero.parallel.ties import check_ties

V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
"""Schedules of torch whose ranks have two stages each, the first rank the first and the last."""
EXCHANGES = ("pass", "step")
"""When ranks that share stages exchange gradients."""
LOOPS = 2  # stages of a rank, if the schedule takes several


@dataclass(frozen=True)
class RankStages:
    """A rank's stages of a model; prints as a table of all stages."""

    cut: Cut
    stages: nn.ModuleList
    """In the order of ``indices``: what `hetero.prepare` takes."""
    indices: tuple[int, ...]
    """Of these stages in the pipeline."""
    kind: Any
    """torch's class of the schedule."""
    group: Any = None
    """The ranks of this one's pipeline; None: all of the process group."""

    def __str__(self) -> str:
        return str(self.cut)

    @property
    def n_stages(self) -> int:
        return len(self.cut.stages)

    @property
    def is_first(self) -> bool:
        """Whether this rank's schedule takes the inputs."""
        return 0 in self.indices

    @property
    def is_last(self) -> bool:
        """Whether it takes the targets, and has the losses."""
        return self.n_stages - 1 in self.indices

    def schedule(
        self,
        n_micro_batches: int,
        loss_fn: Callable[..., Any],
        *,
        device: Any = "cpu",
        exchange: str = "pass",
        **given: Any,
    ) -> Any:
        """Return torch's schedule of these stages, prepared or not.

        Args:
            device: where activations are, and what other stages send.
            exchange: when ranks that share the stages exchange gradients: in every backward "pass",
                micro-batch first, then rank; or once a "step", where those of a rank add up before,
                on the device, in the parameters' dtype.
            given: further arguments of the schedule's class.

        Raises ConfigError if the schedule does not take so few micro-batches, or for another
        ``exchange``.
        """
        if exchange not in EXCHANGES:
            raise ConfigError(
                f"exchange={exchange!r}", advice=f"use one of {', '.join(map(repr, EXCHANGES))}"
            )
        n_passes = n_micro_batches * len(self.stages)
        divides = n_micro_batches > 1 and given.get("scale_grads", True)
        make = stage_class(self.stages, n_passes if exchange == "step" else None, divides=divides)
        there = [
            make(stage, index, self.n_stages, torch.device(device), group=self.group)
            for stage, index in zip(self.stages, self.indices, strict=True)
        ]
        try:
            return self.kind(
                there if is_multi(self.kind) else there[0], n_micro_batches, loss_fn, **given
            )
        except ConfigError:
            raise
        except ValueError as error:
            raise refused(error, n_micro_batches, self.n_stages) from error

    def evaluation(self, n_micro_batches: int, loss_fn: Callable[..., Any], **given: Any) -> Any:
        """Return a schedule for calls of its ``eval`` alone: forwards, as those of `schedule`.

        With one stage a rank any number of micro-batches will do.
        """
        if not is_multi(self.kind):
            gpipe = replace(self, kind=kind_of("GPipe"))
            given = {"scale_grads": False, **given}  # else eval divides gradients that wait
            return gpipe.schedule(n_micro_batches, loss_fn, **given)
        found = self.schedule(n_micro_batches, loss_fn, **given)
        leave_forwards(found)
        return found


def split(
    model: nn.Module,
    mesh: Any,
    schedule: Any = "1F1B",
    *,
    batch: Any = None,
    call: Mapping[str, Any] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    stages_per_rank: int | None = None,
    labels: str | None = None,
    clock: Clock | None = None,
) -> RankStages:
    """Cut a model into stages that take equally long, and return those of this rank. Collective.

    The model is a chain: what comes before a list of blocks, the blocks, of which each takes what
    the one before returned, and what comes after. A stage has the whole model's own code, and its
    modules' own names (``stages[0].model``); modules of other stages are replaced. In order, the
    stages compute the model's bits.

    Args:
        model: of any size, also one without memory (`hetero.empty_init`); stays as it is, and
            shares its modules with the stages.
        mesh: as `Config.mesh`, with an axis "pp".
        schedule: a class of torch.distributed.pipelining, or its name.
        batch: arguments of one micro-batch, by whose shapes units are weighed: a tensor, or a
            mapping, whose first value is the positional one (the others are passed to the
            schedule's step by name). None: ids of a usual length.
        call: arguments of every call that are no tensors.
        loss: of the model's output; it weighs on the last stage.
        stages_per_rank: of schedules that take several; None: two.
        labels: name of an argument of the model that the last stage alone gets. A schedule passes
            what it is given by name to all stages of a rank, and those before have no logits.
        clock: weighs units; None: by their matrix products. `hetero.split` has that of a machine.

    Raises ConfigError for a model that is no chain, is too short, or shares a weight between stages
    of several ranks.
    """
    world = world_size()
    if not world:
        raise ConfigError(
            "a model is split without a process group",
            advice="start the script with torchrun, and call"
            " torch.distributed.init_process_group() before",
        )
    n_ranks = sizes_of(mesh, world)[STAGES]
    kind = kind_of(schedule)
    ranks = ranks_of(kind, n_ranks, stages_per_rank)
    bound = {**call_of(model), **(call or {})}
    tried = sample_of(model, batch, bound)
    anatomy = examine(model, tried, clock or Products(), loss)
    found = cut_model(anatomy, ranks, is_timed=clock is not None)
    check_ties(model, found)
    check_runs(model, anatomy, found, tried, bound)
    mine = found.of_rank(stage_ranks(mesh, world).start // (world // n_ranks))
    return RankStages(
        cut=found,
        stages=nn.ModuleList(ModelStage(model, anatomy, each.own, bound, labels) for each in mine),
        indices=tuple(each.index for each in mine),
        kind=kind,
        group=pipeline_group(mesh, world, n_ranks),
    )


@of_any_dtype()
def check_runs(
    model: nn.Module, anatomy: Anatomy, found: Cut, call: Call, bound: Mapping[str, Any]
) -> None:
    """Refuse a model of which a stage does not run without the modules of others: its code may ask
    them for more than a tensor."""
    twin, call = without_bytes(model), blank(call)
    x, *others = call.args
    named = {key: value for key, value in call.kwargs.items() if key not in bound}
    with torch.no_grad(), Followed(answers=True):
        for each in found.stages:
            stage = ModelStage(twin, anatomy, each.own, bound)
            try:
                x = stage(x, *others, **named)
            except ConfigError:
                raise
            except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
                what = f"stage {each.index} does not run without the others ({error})"
                raise refuse(model, what) from error


def refused(error: ValueError, n_micro_batches: int, n_stages: int) -> ConfigError:
    """Return what is raised in place of torch's refusal of a number of micro-batches."""
    said = " ".join(str(error).split())
    return ConfigError(
        f"{n_micro_batches} micro-batches through {n_stages} stages: {said}",
        advice=f"use {n_stages} micro-batches or more, a multiple of it; more also shorten the time"
        " in which ranks wait",
    )


def sample_of(model: nn.Module, batch: Any, bound: Mapping[str, Any]) -> Call:
    """Return the call of one micro-batch; ConfigError for one with several positional arguments."""
    if batch is None:
        found = sample(model)
    elif isinstance(batch, Mapping):
        first, *others = batch.items()
        found = Call((first[1],), dict(others))
    else:
        found = Call(tuple(batch) if isinstance(batch, (tuple, list)) else (batch,))
    if len(found.args) > 1:
        raise ConfigError(
            f"batch= has {len(found.args)} positional arguments, and a schedule gives those to the"
            " first stage alone",
            advice="pass a mapping of names, and all but the first by name to the schedule's step",
        )
    return Call(found.args, {**bound, **found.kwargs})


def call_of(model: nn.Module) -> dict[str, Any]:
    """Return what each call of a model says: training looks at every position once."""
    caches = getattr(getattr(model, "config", None), "use_cache", None) is not None
    return {"use_cache": False} if caches else {}


# -- schedules -----------------------------------------------------------------------------------


def stage_class(stages: nn.ModuleList, n_passes: int | None, *, divides: bool) -> Any:
    """Return what makes the stages of a rank's schedule, which ``divides`` gradients or not; if
    they exchange them once, in the last of the rank's ``n_passes`` backward passes of a step."""
    from hetero.parallel.means import Means, RankStage  # which imports torch's
    from hetero.parallel.once import Once, OnceStage

    means = Means(stages, divides=divides)
    if n_passes is None:
        return partial(RankStage, means=means)
    return partial(OnceStage, means=means, once=Once(stages, n_passes))


def kind_of(schedule: Any) -> Any:
    """Return torch's class of a schedule; ConfigError for a name that it does not know."""
    if not isinstance(schedule, str):
        return schedule
    from torch.distributed.pipelining import schedules  # a second to import

    try:
        return schedules.get_schedule_class(schedule.removeprefix("Schedule"))
    except ValueError as error:
        raise ConfigError(str(error), advice="name one of these, as '1F1B'") from error


def is_multi(kind: Any) -> bool:
    """Whether a schedule takes a list of stages."""
    return any(base.__name__ == "PipelineScheduleMulti" for base in kind.__mro__)


def ranks_of(kind: Any, n_ranks: int, stages_per_rank: int | None) -> list[int]:
    """Return the rank of each stage, as a schedule wants them."""
    if not is_multi(kind):
        n_loops = 1
    else:
        n_loops = LOOPS if stages_per_rank is None else stages_per_rank
    is_v = kind.__name__ in V_SHAPED
    if stages_per_rank not in (None, n_loops) or n_loops < 1 or (is_v and n_loops != 2):
        wanted = 2 if is_v else 1
        raise ConfigError(
            f"stages_per_rank={stages_per_rank}: {kind.__name__} takes {wanted} a rank",
            advice="leave stages_per_rank out, or use an interleaved schedule",
        )
    ranks = list(range(n_ranks))
    return [*ranks, *reversed(ranks)] if is_v else ranks * n_loops


def pipeline_group(mesh: Any, world: int, n_ranks: int, backend: str | None = None) -> Any:
    """Return the process group of this rank's pipeline; None if that is the default one.

    ``backend``: of a group of its own. Collective.
    """
    if n_ranks == world and backend is None:
        return None
    if isinstance(mesh, DeviceMesh) and backend is None:
        return mesh[STAGES].get_group()
    each = world // n_ranks
    rows = [list(range(first, world, each)) for first in range(each)]
    groups = [dist.new_group(row, backend=backend) for row in rows]
    return groups[dist.get_rank() % each]
