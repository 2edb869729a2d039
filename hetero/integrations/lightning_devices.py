"""Where a strategy of Lightning's computes: on one device, or as one of several ranks (floor 4)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from hetero.api import no_sync
from hetero.config import Config, Settings
from hetero.device import open_device
from hetero.errors import ConfigError
from hetero.parallel.mesh import refuse_context, refuse_stages

LOCAL = "LOCAL_WORLD_SIZE"
"""The variable in which torchrun says how many ranks a machine has."""


class OneDevice:
    """The common part of the strategies on one device."""

    accelerator: Any
    root_device: torch.device

    def __init__(self, config: Settings = None, **settings: Any) -> None:
        self.config = checked(Config.load(config, **settings))
        if self.config.mesh is not None:
            raise ConfigError(
                f"{type(self).__name__} computes on one device, and mesh= is set",
                advice="derive it from HeteroRanksStrategy, or from HeteroFabricRanksStrategy",
            )
        stock: Any = super()  # Trainer's strategy, or Fabric's
        stock.__init__(open_device(self.config.device).torch_device)

    def setup_environment(self) -> None:
        """Set up the device; ConfigError if Trainer or Fabric has another one."""
        check_device(self.accelerator, self.root_device)
        stock: Any = super()
        stock.setup_environment()

    @property
    def parallel_devices(self) -> None:
        """None; a Trainer or a Fabric says here what devices it was given."""

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[Any]) -> None:
        check_alone(len(devices), "devices")

    @property
    def num_nodes(self) -> int:
        """1; a Trainer says here how many machines it was given, and a Fabric in `_num_nodes`."""
        return 1

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        check_alone(number, "machines")

    _num_nodes = num_nodes

    def for_file(self, state: dict[str, Any], ties: Mapping[str, str]) -> dict[str, Any]:
        """Return a state dict as it is: whatever writes it reads it."""
        return state


class SeveralRanks:
    """The common part of the strategies of ranks that share a model; each has one device.

    They are Lightning's strategies of DDP, of which they keep the launcher, the process group,
    the sampler and all that reduces or gathers values, and nothing that touches the model: every
    backward pass of a prepared model exchanges gradients, whatever Lightning accumulates.
    """

    accelerator: Any
    root_device: torch.device
    num_processes: int
    is_global_zero: bool

    def __init__(self, config: Settings = None, **settings: Any) -> None:
        self.config = checked(Config.load(config, **settings))
        refuse_stages(self.config.mesh, "Lightning")
        refuse_context(self.config.mesh, "Lightning", "write a loop: docs/context-parallel.md")
        stock: Any = super()  # Trainer's strategy, or Fabric's
        stock.__init__(timeout=timedelta(seconds=self.config.timeout_seconds))

    def setup_environment(self) -> None:
        """Set up the device, and join the ranks in a process group unless they are in one."""
        if getattr(self, "_layer_sync", None) is not None:
            raise ConfigError(
                "sync_batchnorm=True: units that are recomputed would call other ranks, which need"
                " not recompute them",
                advice="leave it out, or use a norm without running means",
            )
        # for hetero, which divides a machine's cores and RAM; Lightning's launcher does not set it
        os.environ.setdefault(LOCAL, str(self.num_processes))
        stock: Any = super()
        stock.setup_environment()
        check_device(self.accelerator, open_device(self.config.device).torch_device)

    def for_file(self, state: dict[str, Any], ties: Mapping[str, str]) -> dict[str, Any]:
        """Return what the first rank writes of a state dict: its values, read by all ranks alike.

        Ranks that gather weights read one together, or none of them does.

        Args:
            state: of the same names on every rank.
            ties: {another name: first name} of tensors with several names.
        """
        found: dict[str, Any] = {}
        for name, value in state.items():
            first = ties.get(name, name)
            if first not in found:
                read = value.clone() if isinstance(value, torch.Tensor) else value
                found[first] = read if self.is_global_zero else None
        return {name: found[ties.get(name, name)] for name in state}


class ExplicitNoSync:
    """What ``fabric.no_backward_sync`` is on ranks: `hetero.no_sync`."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return no_sync(module) if enabled else nullcontext()


def checked(config: Config) -> Config:
    """Refuse precision="fp16": it needs hetero's own backward."""
    if config.precision == "fp16":
        raise ConfigError(
            "precision='fp16' scales the loss, which Lightning takes backward by itself",
            advice="use precision='bf16', or the Trainer's own precision='16-mixed'",
        )
    return config


def names_ranks(config: Settings, settings: Mapping[str, Any]) -> bool:
    """Whether settings name the ranks that share a model."""
    return Config.load(config, **settings).mesh is not None


def check_alone(number: int, what: str) -> None:
    """Refuse several devices or machines where no mesh joins them."""
    if number > 1:
        raise ConfigError(
            f"{number} {what}, and mesh= is not set: the strategy computes on one device",
            advice="share the model with mesh='world', or pass devices=1 and num_nodes=1",
        )


def check_device(accelerator: Any, place: torch.device) -> None:
    """Refuse a strategy whose device is not the accelerator's."""
    name = type(accelerator).__name__
    if ("CUDA" in name) != (place.type == "cuda"):
        kind = "gpu" if place.type == "cuda" else "cpu"
        raise ConfigError(
            f"the strategy computes on {place.type}, {name} elsewhere",
            advice=f"pass accelerator={kind!r}, or another device= to the strategy",
        )
