"""Plans of meshes against runs that were published. Nothing here is fitted to them."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from benchmarks.engine import Figure, Figures
from benchmarks.plan import machine_file
from hetero.errors import ConfigError
from hetero.plan.figures import Figure as Measured
from hetero.plan.hardware import find
from hetero.plan.presets import PRESETS
from hetero.plan.shape import DecoderShape, shape_of
from hetero.rehearse.meshes import MeshPlan, plan_mesh
from hetero.rehearse.search import search

GIB = 2**30
SEQUENCE = 2048
BLOOM = {"pp": 12, "tp": 4, "dp_shard": 8}
BLOOM_SAMPLES, BLOOM_PASS = 2048, 2
BLOOM_TFLOPS, BLOOM_SECONDS, BLOOM_GIB = 150.05, 104.5, 59
"""Of a step with these sizes, before training began; memory as nvidia-smi showed it
(bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles-prequel.md, 112 heads)."""
OMNI_PATH = 4 * 100e9 / 8 / 8
"""Bytes a second of each of 8 GPUs, of 4 links of 100 Gb/s a machine (its README)."""
MASTERED = 12
"""Bytes of a parameter's fp32 weight and two moments, which ZeRO-1 divides."""
WHOLE = 2 + 2 + 4
"""Those of its bf16 weight, its gradient, and the fp32 sum of gradients, which it does not."""


class Published(NamedTuple):
    """A row of Megatron-LM's table of 2021."""

    name: str
    tp: int
    pp: int
    gpus: int
    samples: int
    tflops: float


MEGATRON = (
    Published("megatron-1.7b", 1, 1, 32, 512, 137),
    Published("megatron-3.6b", 2, 1, 64, 512, 138),
    Published("megatron-7.5b", 4, 1, 128, 512, 142),
    Published("megatron-18b", 8, 1, 256, 1024, 135),
    Published("megatron-39b", 8, 2, 512, 1536, 138),
    Published("megatron-76b", 8, 4, 1024, 1792, 140),
    Published("megatron-145b", 8, 8, 1536, 2304, 148),
    Published("megatron-310b", 8, 16, 1920, 2160, 155),
    Published("megatron-530b", 8, 35, 2520, 2520, 163),
    Published("megatron-1008b", 8, 64, 3072, 3072, 163),
)
PASSES = (1, 4)
"""Samples of a pass that are tried; the table does not say which were taken."""


def published_flops(shape: DecoderShape, samples: int, sequence: int) -> float:
    """Return the operations that published rates count: 96 B s l h^2 (1 + s / 6h + V / 16lh)."""
    b, s, n, h = samples, sequence, shape.layers, shape.width
    return 96.0 * b * s * n * h * h * (1 + s / (6 * h) + shape.vocab / (16 * n * h))


def shape(name: str) -> DecoderShape:
    found = shape_of(PRESETS[name])
    if found is None:
        raise ConfigError(f"{name} is no decoder", advice="name one that is")
    return found


def plan_bloom(device: str | None = None) -> Figures:
    """BLOOM's run (384 A100-80, pp 12, tp 4, dp 8) planned, against what was published of it."""
    began = time.perf_counter()
    with jean_zay() as profile:
        found = bloom(profile)
    seconds = time.perf_counter() - began
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    resident *= 1 if sys.platform == "darwin" else 1024
    flops = published_flops(shape("bloom-176b"), BLOOM_SAMPLES, SEQUENCE)
    tflops = flops / found.step_seconds / found.n_ranks / 1e12
    peak = max(stage.peaks["HBM"] for stage in found.stages) + context_bytes()
    detail = {
        "step, s": found.step_seconds,
        "published step, s": BLOOM_SECONDS,
        "bubble": found.bubble,
        "HBM with context, GiB": peak / GIB,
        "published, GiB": BLOOM_GIB,
        "ZeRO-1's weights, gradients and states, GiB": zero_1(found) / GIB,
        "of the first stage, GiB": {k: n / GIB for k, n in found.stages[0].kinds.items()},
        "RAM of a rank, GiB": max(stage.peaks.get("HOST", 0) for stage in found.stages) / GIB,
        "limit": found.limit,
    }
    rows = [
        Figure("seconds to plan", seconds, " s", "<=", 60.0),
        Figure("memory to plan", resident / GIB, " GiB", "<=", 1.0),
        Figure("TFLOP/s a GPU, error", abs(tflops / BLOOM_TFLOPS - 1), "", "<=", 0.2),
        Figure("HBM, error", abs(peak / GIB / BLOOM_GIB - 1), "", "<=", 0.05),
    ]
    return Figures(rows, {**detail, "TFLOP/s": tflops, "published TFLOP/s": BLOOM_TFLOPS})


def bloom(profile: str) -> MeshPlan:
    """Return the plan of BLOOM's step."""
    return plan_mesh(
        "bloom-176b",
        (BLOOM_SAMPLES // BLOOM["dp_shard"], SEQUENCE),
        mesh=BLOOM,
        micro_batch=BLOOM_PASS,
        activations="recompute",
        precision="bf16",
        profile=profile,
    )


@contextmanager
def jean_zay() -> Iterator[str]:
    """Write the profile of the machines that trained BLOOM: A100-80 with their own network."""
    machine = find("a100-80")
    if machine.net is None or machine.net.inter is None:
        raise ConfigError("a100-80 has no [net.inter]", advice="add one")
    inter = replace(machine.net.inter, bytes_per_second=Measured(OMNI_PATH, "est"))
    machine = replace(machine, net=replace(machine.net, inter=inter))
    with machine_file(machine) as name:
        yield name


def context_bytes() -> float:
    """Return the bytes of CUDA's context, which a plan does not count."""
    gpu = find("a100-80").gpu
    return gpu.context_bytes.value if gpu is not None and gpu.context_bytes is not None else 0.0


def zero_1(found: MeshPlan) -> float:
    """Return the bytes that Megatron-DeepSpeed with ZeRO-1 keeps of the first stage's parameters:
    activations, workspaces and buffers of NCCL come on top."""
    return found.stages[0].numel * (WHOLE + MASTERED / BLOOM["dp_shard"])


def plan_megatron(device: str | None = None) -> Figures:
    """Megatron-LM's table of 1.7 B to 1 T parameters (A100-80) planned, against its rates."""
    rows = [against(row) for row in MEGATRON]
    errors = sorted(abs(row["error"]) for row in rows)
    figures = [
        Figure("TFLOP/s a GPU, median error", statistics.median(errors), "", "<=", 0.2),
        Figure("largest error", errors[-1], "", "<=", 0.4),
    ]
    return Figures(figures, {"rows": rows})


def against(row: Published) -> dict[str, Any]:
    """Return the best plan of a row, and its error."""
    dp = row.gpus // row.tp // row.pp
    best: dict[str, Any] = {}
    for micro_batch in PASSES:
        if row.samples // dp % micro_batch:
            continue
        found = plan_mesh(
            row.name,
            (row.samples // dp, SEQUENCE),
            mesh={"pp": row.pp, "dp_shard": dp, "tp": row.tp},
            micro_batch=micro_batch,
            activations="recompute",
            precision="bf16",
            profile="a100-80",
        )
        flops = published_flops(shape(row.name), row.samples, SEQUENCE)
        tflops = flops / found.step_seconds / row.gpus / 1e12 if found.fits else 0.0
        if tflops > best.get("planned", -1.0):
            best = {
                "name": row.name,
                "planned": tflops,
                "published": row.tflops,
                "error": tflops / row.tflops - 1,
                "pass": micro_batch,
                "bubble": found.bubble,
                "HBM, GiB": max(s.peaks.get("HBM", 0) for s in found.stages) / GIB,
                "fits": found.fits,
                "limit": found.limit,
            }
    return best


def plan_search(device: str | None = None) -> Figures:
    """The ten best meshes of 384 A100-80 for BLOOM: how long the search takes."""
    began = time.perf_counter()
    with jean_zay() as profile:
        found = search(
            "bloom-176b", 384, (BLOOM_SAMPLES, SEQUENCE), precision="bf16", profile=profile
        )
        seconds = time.perf_counter() - began
        as_run = bloom(profile).step_seconds
    best = found.rows[0].plan.step_seconds
    rows = [
        Figure("seconds to search", seconds, " s", "<=", 600.0),
        Figure("rows that fit", sum(row.plan.fits for row in found.rows), "", ">=", 1.0),
        Figure("best step over that of the run's mesh", best / as_run, "x", "<=", 1.0),
    ]
    meshes = [
        {**r.candidate._asdict(), "step": r.plan.step_seconds, "fits": r.plan.fits}
        for r in found.rows
    ]
    return Figures(rows, {"rehearsed": found.n_rehearsed, "meshes": meshes})
