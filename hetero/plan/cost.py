"""Time in closed form: seconds of a step from plain rates (floor 1, policy).

T1 to T10 are the planner's equations; the letters are those of `hetero.plan.footprint`. Rates are
what a device achieves, not what its datasheet says. Nothing here knows of a schedule: a step takes
at least as long as its busiest resource, and `step_seconds` adds what is known not to overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hetero.plan.footprint import States
from hetero.plan.shape import Decoder

BACKWARD = 2
"""Forwards that a backward takes: one for the gradients of inputs, one for those of weights."""


# --- operations -----------------------------------------------------------------------------------


def layer_flops(decoder: Decoder, *, tokens: int, sequence: int, causal: bool = True) -> int:
    """Return the operations of a layer's forward: 2·T·N_l + 4·T·s·a·d, the latter halved if causal.

    N_l are the weights a token is multiplied with (T1). Kernels of causal attention skip what is
    masked; most papers' formulas count it, so name the convention beside a utilisation.
    """
    scores = 4 * tokens * sequence * decoder.query_dim
    return 2 * tokens * decoder.layer_matmul_numel + (scores // 2 if causal else scores)


def head_flops(decoder: Decoder, *, tokens: int) -> int:
    """Return the operations of the head's forward: 2·T·h·V (T1)."""
    return 2 * tokens * decoder.head_matmul_numel


def step_flops(
    decoder: Decoder, *, tokens: int, sequence: int, causal: bool = True, checkpoint: bool = False
) -> int:
    """Return the operations of forward and backward (T1); checkpointed layers run forward twice.

    Without causal and checkpoint this is 72·b·L·s·h²·(1 + s/(6·h) + V/(12·h·L)) for a GPT.
    """
    layers = decoder.layers * layer_flops(decoder, tokens=tokens, sequence=sequence, causal=causal)
    head = head_flops(decoder, tokens=tokens)
    return (1 + BACKWARD) * (layers + head) + checkpoint * layers


def wave_slowdown(tiles: int, processors: int) -> float:
    """Return how much longer tiles take than they would in whole waves: ⌈n/p⌉·p/n (T2)."""
    return -(-tiles // processors) * processors / tiles


def operation_seconds(
    *,
    flops: float,
    n_bytes: float,
    flops_per_second: float,
    bytes_per_second: float,
    launch_seconds: float = 0.0,
) -> float:
    """Return the roofline of one operation: max(compute, memory), and its launch (T2)."""
    return max(flops / flops_per_second, n_bytes / bytes_per_second) + launch_seconds


def overlapped_seconds(seconds: float, beside_seconds: float, slowdown: float) -> float:
    """Return how long work takes that runs ``slowdown`` times as long while another does (T7)."""
    if seconds * slowdown <= beside_seconds:
        return seconds * slowdown
    return seconds + beside_seconds * (1 - 1 / slowdown)


# --- links, memory and disks ----------------------------------------------------------------------


def transfer_seconds(
    n_bytes: float, *, bytes_per_second: float, latency_seconds: float = 0.0
) -> float:
    """Return latency + n/rate of one direction of a link (T3)."""
    return latency_seconds + n_bytes / bytes_per_second


def touched_bytes(states: States) -> int:
    """Return what an update reads and writes of one parameter (T4).

    Gradient, master and moments are read, weight, master and moments are written: 30 with fp32
    gradients, 28 with bf16 ones. A split master reads the weight as its high half, and writes it
    once: 26. Stores that are not streaming read what they overwrite of others besides.
    """
    whole_master = states.master >= 4
    return states.total - whole_master * states.weight + states.resting


def update_seconds(
    numel: int, *, touched_bytes: float, bytes_per_second: float, numel_per_second: float
) -> float:
    """Return the optimizer's time on CPU: max(N·B/DRAM, N/kernel) (T4)."""
    return max(numel * touched_bytes / bytes_per_second, numel / numel_per_second)


class WriteStage(NamedTuple):
    """How fast a disk writes its next bytes: a cache of single-level cells first, then others."""

    n_bytes: float
    bytes_per_second: float


def write_seconds(
    n_bytes: float, stages: Sequence[WriteStage], *, written_bytes: float = 0.0
) -> float:
    """Return how long a disk writes, ``written_bytes`` after it was last idle (T5).

    The last stage has no end. A disk that is idle gets its cache back: begin at 0 again.
    """
    seconds, at, left = 0.0, 0.0, float(n_bytes)
    for i, stage in enumerate(stages):
        end = at + stage.n_bytes if i + 1 < len(stages) else float("inf")
        here = min(left, max(0.0, end - max(at, written_bytes)))
        seconds += here / stage.bytes_per_second
        left -= here
        at = end
    return seconds


def wear_steps(endurance_bytes: float, step_bytes: float) -> int:
    """Return after how many steps a disk has been written as often as its maker promises."""
    return int(endurance_bytes // step_bytes)


# --- several devices ------------------------------------------------------------------------------


def gather_seconds(
    n_bytes: float, ranks: int, *, bytes_per_second: float, latency_seconds: float = 0.0
) -> float:
    """Return a ring's all-gather or reduce-scatter: (n - 1)/n·S/busbw + (n - 1)·latency (T8).

    ``n_bytes`` are of the whole result; an all-reduce is one of each.
    """
    hops = ranks - 1
    return hops / ranks * n_bytes / bytes_per_second + hops * latency_seconds


def zero3_bytes(decoder: Decoder, ranks: int, *, gathers: int = 2, item_bytes: int = 2) -> float:
    """Return what each rank sends in a step: weights gathered, gradients scattered (T8).

    3·2·N·(n - 1)/n when backward gathers again, 2 where the first gather is kept.
    """
    return (gathers + 1) * item_bytes * decoder.numel * (ranks - 1) / ranks


def pipeline_seconds(
    micro_batch_seconds: float, *, micro_batches: int, stages: int, interleaved: int = 1
) -> float:
    """Return a pipeline's step: (m + (p - 1)/v)·(t_f + t_b) of its slowest stage (T9)."""
    return (micro_batches + (stages - 1) / interleaved) * micro_batch_seconds


# --- the step -------------------------------------------------------------------------------------


class Work(NamedTuple):
    """Seconds of work that a step has for each resource (T10)."""

    compute: float = 0.0
    h2d: float = 0.0
    d2h: float = 0.0
    dram: float = 0.0
    """Everything that goes through it: copies, updates, disks (T6)."""
    cpu: float = 0.0
    disk_read: float = 0.0
    disk_write: float = 0.0
    collective: float = 0.0

    @property
    def bottleneck(self) -> str:
        """The resource that a step waits for at least."""
        return max(self._fields, key=lambda name: float(getattr(self, name)))


def dram_seconds(*n_bytes: float, bytes_per_second: float) -> float:
    """Return how long all traffic takes that shares one memory (T6)."""
    return sum(n_bytes) / bytes_per_second


def step_seconds(work: Work, *, exposed_seconds: float = 0.0) -> float:
    """Return max over resources, and what overlaps with nothing: fill, drain, waits (T10)."""
    return max(work) + exposed_seconds


def offload_efficiency(
    intensity: float, *, bytes_per_second: float, flops_per_second: float
) -> float:
    """Return the share of compute's rate that is left beside one stream of transfers.

    ait·bw/(ait·bw + peak), without overlap (arXiv 2104.07857). ``intensity`` is operations for each
    byte: s·b for weights and gradients, s·b/4 for optimizer states, 24·h·k for checkpoints every k
    layers.
    """
    streamed = intensity * bytes_per_second
    return streamed / (streamed + flops_per_second)
