"""`hetero.split`: stages of a pipeline, balanced on the clock of a machine (floor 4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hetero.config import Config
from hetero.parallel.splitting import RankStages
from hetero.parallel.splitting import split as split_by
from hetero.plan.machine import MachineProfile
from hetero.rehearse.clock import OpClock
from hetero.rehearse.kernels import AsOn
from hetero.rehearse.named import machine
from hetero.rehearse.stand_in import device_for


def split(
    model: nn.Module,
    mesh: Any,
    schedule: Any = "1F1B",
    *,
    profile: str,
    batch: Any = None,
    call: Mapping[str, Any] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    stages_per_rank: int | None = None,
    labels: str | None = None,
) -> RankStages:
    """Cut a model into stages that take equally long on a machine, and return those of this rank.

    Units are rehearsed: their operations run without bytes, and take the time that a hardware
    profile says. Collective: all ranks call it, alike.

    Args:
        model: a decoder, or any model around a list of blocks; without memory too
            (`hetero.empty_init`). It stays as it is, and shares its modules with the stages.
        mesh: as for `hetero.prepare`, with an axis "pp".
        schedule: a class of torch.distributed.pipelining, or its name.
        profile: the machine, as for `hetero.plan`.
        batch: arguments of one micro-batch, by whose shapes units are weighed: a tensor, or a
            mapping, whose first value is the positional one (the others are passed to the
            schedule's step by name). None: ids of a usual length.
        call: arguments of every call that are no tensors.
        loss: of the model's output; it weighs on the last stage.
        stages_per_rank: of schedules that take several; None: two.
        labels: name of an argument of the model that the last stage alone gets. A schedule passes
            what it is given by name to all stages of a rank, and those before have no logits.

    Raises ConfigError for a model that is no chain, is too short, or shares a weight between stages
    of several ranks.

    Example:
        >>> import torch, hetero
        >>> from torch.distributed import HashStore, destroy_process_group, init_process_group
        >>> init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
        >>> found = hetero.split(model, {"pp": 1}, batch=torch.ones(4, 64), profile="rtx4090")
        >>> found.indices, found.n_stages
        ((0,), 1)
        >>> destroy_process_group()
    """
    clock = MachineClock(machine(Config.load(profile=profile)))
    return split_by(
        *(model, mesh, schedule),
        batch=batch,
        call=call,
        loss=loss,
        stages_per_rank=stages_per_rank,
        labels=labels,
        clock=clock,
    )


class MachineClock:
    """Weighs operations by the seconds that they take on a machine."""

    def __init__(self, profile: MachineProfile) -> None:
        self._profile = profile
        self._device = device_for(Config.load(), profile)

    @contextmanager
    def running(self) -> Iterator[None]:
        with AsOn(is_cuda=self._device.is_cuda), OpClock(self._device, self._profile):
            yield

    def now(self) -> float:
        return self._device.clock()
