"""What an Accelerator of hetero's refuses (floor 4)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from hetero.config import Config
from hetero.errors import ConfigError
from hetero.parallel.mesh import parts_of

FOREIGN = ("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin")
OTHERS = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA")


def refuse_plugins(given: Mapping[str, Any]) -> None:
    """Refuse plug-ins that place parameters, among an Accelerator's arguments."""
    found = [name for name in FOREIGN if given.get(name) is not None]
    if found:
        raise ConfigError(
            f"{found[0]} together with hetero_plugin: both would place the model's parameters",
            advice=f"drop {found[0]}",
        )


def refuse_type(distributed_type: Any) -> None:
    """Refuse a launch whose processes place parameters."""
    if distributed_type.value in OTHERS:
        raise ConfigError(
            f"hetero does not work under distributed_type={distributed_type.value}",
            advice="launch the script without it",
        )


def refuse_early(config: Config, n_passes: int, n_processes: int) -> None:
    """Refuse updates in backward if gradients are accumulated or averaged first."""
    if config.updates == "backward" and (n_passes > 1 or n_processes > 1):
        raise ConfigError(
            f"updates='backward' together with gradient_accumulation_steps={n_passes} on"
            f" {n_processes} processes: gradients are whole after the last pass only",
            advice="leave updates= at 'step'",
        )


@contextmanager
def even_inputs(
    accelerator: Any, joinables: Any, even_batches: bool | None = None
) -> Iterator[None]:
    """Do as `accelerate.Accelerator.join_uneven_inputs` where batches are even, and refuse others
    on several devices: torch's Join lets its own wrappers make the calls of a process that has no
    batch left."""
    even = accelerator.even_batches if even_batches is None else even_batches
    if accelerator.multi_device and not (even and accelerator.even_batches):
        raise ConfigError(
            "join_uneven_inputs with uneven batches: processes average gradients together, and one"
            " that has no batch left would not come",
            advice="leave even_batches at True, under which the first samples come again",
        )
    yield


def refuse_parts(model: nn.Module, n_processes: int) -> None:
    """Refuse a model of which ranks have parts, where processes average whole models."""
    if parts_of(model).kinds:
        raise ConfigError(
            f"ranks divide the model's tensors (DTensors), and {n_processes} processes are to"
            " average whole models",
            advice="name the ranks of a tensor: mesh={'tp': 2}, or with shares on top"
            " mesh={'dp_shard': 2, 'tp': 2}",
        )


def refuse_hook(handler: Any, n_processes: int) -> None:
    """Refuse a hook of torch's DistributedDataParallel, which would change what ranks exchange."""
    hook = getattr(handler, "comm_hook", None)  # not in old releases
    name = getattr(hook, "value", hook)
    if n_processes > 1 and name not in (None, "no"):
        raise ConfigError(
            f"DistributedDataParallelKwargs(comm_hook={name!r}): hetero exchanges gradients in"
            " their own dtype, and calls no hook of torch's DistributedDataParallel",
            advice="leave comm_hook out",
        )
