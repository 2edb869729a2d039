"""Benchmarks: ratios measured in one run, each against the figure it has to reach."""

from __future__ import annotations

import operator
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import torch

from benchmarks import (
    activations,
    context,
    disk,
    engine,
    inference,
    launching,
    lora,
    memory,
    meshes,
    micro_batches,
    pinned,
    placement,
    plan,
    plugin,
    ranks,
    scale,
    stages,
    tensors,
    update,
    watching,
)
from hetero.device import accelerator_name
from hetero.errors import ConfigError
from hetero.version import __version__

COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
}


@dataclass(frozen=True, slots=True)
class Case:
    """One figure: its value, and whether it holds against what it has to reach."""

    name: str
    value: float
    unit: str
    op: str
    reach: float
    holds: bool


@dataclass(frozen=True, slots=True)
class Result:
    """What a benchmark measured, where, and what is worth knowing besides."""

    bench: str
    cases: tuple[Case, ...]
    machine: dict[str, Any]
    detail: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """Return one JSON-ready object with the keys bench, cases, machine, detail."""
        return {
            "bench": self.bench,
            "cases": [asdict(case) for case in self.cases],
            "machine": self.machine,
            "detail": self.detail,
        }


BENCHES: dict[str, Callable[[str | None], engine.Figures]] = {
    "overhead": engine.overhead,
    "paged": engine.paged,
    "access": engine.access,
    "overlap": engine.overlap,
    "misses": engine.misses,
    "waste": memory.waste,
    "host": memory.host,
    "optimizer": update.optimizer,
    "optimizer-peer": update.optimizer_peer,
    "update-overlap": update.update_overlap,
    "bytes": update.bytes_a_parameter,
    "fp32-step": update.fp32_step,
    "launches": launching.launches,
    "disk": disk.disk,
    "disk-step": disk.disk_step,
    "checksum": disk.checksum,
    "save": disk.save,
    "page-cache": disk.page_cache,
    "load": inference.load,
    "generate": inference.generate,
    "activations": activations.activations,
    "micro-batch": activations.micro_batch,
    "loss": activations.loss,
    "context": activations.context,
    "cp-context": context.longest,
    "pipeline-fetches": micro_batches.pipeline_fetches,
    "pipeline-step": stages.pipeline_step,
    "split": stages.split,
    "predict": plan.predict,
    "plan-70b": plan.plan_70b,
    "plan-1000": plan.plan_1000,
    "plan-bloom": meshes.plan_bloom,
    "plan-megatron": meshes.plan_megatron,
    "plan-search": meshes.plan_search,
    "lora": lora.lora,
    "profile-cost": plan.profile_cost,
    "auto": plan.auto,
    "pinned": pinned.pinned,
    "placement": placement.placement,
    "plugin": plugin.plugin,
    "scale": scale.scale,
    "ranks-equal": ranks.equal,
    "ranks-memory": ranks.memory,
    "ranks-step": ranks.step,
    "ranks-wire": ranks.wire,
    "ranks-overlap": ranks.overlap,
    "ranks-faults": ranks.faults,
    "ranks-diverge": ranks.diverge,
    "roll-call": ranks.roll_call,
    "save-ranks": ranks.save,
    "tensor-pages": tensors.pages,
    "tp-volume": tensors.volume,
    "watch-overhead": watching.watch_overhead,
}


def names() -> list[tuple[str, str]]:
    """Return (name, one-line description) of every benchmark."""
    return [(name, (run.__doc__ or "").splitlines()[0]) for name, run in BENCHES.items()]


def run_bench(name: str, device: str | None = None) -> Result:
    """Run one benchmark; ``device`` overrides where it runs, where that makes sense."""
    if name not in BENCHES:
        raise ConfigError(f"no benchmark {name!r}", advice=f"one of {', '.join(BENCHES)}")
    figures = BENCHES[name](device)
    cases = tuple(
        Case(f.name, f.value, f.unit, f.op, f.reach, COMPARE[f.op](f.value, f.reach))
        for f in figures.rows
    )
    return Result(name, cases, machine(device), figures.detail)


def machine(device: str | None) -> dict[str, Any]:
    """Describe this machine: what figures depend on, and nothing that names it."""
    found: dict[str, Any] = {
        "hetero": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": len(psutil.Process().cpu_affinity())
        if hasattr(psutil.Process, "cpu_affinity")
        else 0,
        "threads": torch.get_num_threads(),
        "ram_bytes": psutil.virtual_memory().total,
        "device": device or "default",
    }
    if (gpu := accelerator_name()) is not None:
        found["gpu"] = gpu
    return found
