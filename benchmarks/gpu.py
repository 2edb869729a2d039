"""What a step takes on a GPU: with hetero, in torch alone, or under FSDP2 with offload.

``python -m benchmarks.gpu 8B --tokens 4096 16384 --hbm 20GiB --card 24GiB`` prints a JSON object
for each number of tokens. One model in one process; each way of training has a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch

import hetero
from benchmarks.planned import COMMON, SEQUENCE
from hetero.config import parse_bytes
from hetero.errors import HeteroError

LAYERS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
SHAPES = {
    "0.3B": (1024, 12, 16, 4096),
    "1B": (2048, 16, 32, 8192),
    "3B": (3072, 28, 24, 8192),
    "8B": (4096, 32, 32, 14336),
    "14B": (5120, 40, 40, 17408),
}
RATE = 1e-4
VOCABULARY = 128256
WARM = 3
"""Steps that are not measured: hetero divides HBM at their ends."""
KERNELS = 40
"""Kinds of kernels in a row, with ``--kernels``."""
Step = Callable[[torch.Tensor], list[float]]
"""Trains on a batch; returns the loss and when its parts ended, of the host's clock."""
PARTS = ("forward", "backward", "update", "loss")


def built(name: str) -> Any:
    """Return a Llama of transformers in bf16 on the GPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = dict(zip(LAYERS, SHAPES[name], strict=True))
    common: dict[str, Any] = {**COMMON, **shape, "max_position_embeddings": 1 << 18}
    config = LlamaConfig(**common, use_cache=False)
    config._attn_implementation = "sdpa"
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return LlamaForCausalLM(config).train()
    finally:
        torch.set_default_dtype(before)


def with_hetero(model: Any, settings: Mapping[str, Any]) -> Any:
    """Return a step of a prepared model, and what tells of it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    prepared: tuple[Any, Any] = hetero.prepare(
        model, optimizer, device="cuda", precision="bf16", fused_loss=True, **settings
    )
    return (partial(trained, *prepared), *prepared)


def in_torch(model: Any, settings: Mapping[str, Any]) -> Any:
    """Return a step of a model whose weights and states are bf16, on the GPU."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    return partial(trained, model, optimizer), None, None


def under_fsdp(model: Any, settings: Mapping[str, Any]) -> Any:
    """Return a step under FSDP2: fp32 weights and states in RAM, updates on the CPU, activations
    computed again."""
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    os.environ.update(NCCL_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    where = f"file://{tempfile.mkdtemp()}/store"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=where, rank=0, world_size=1)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.float()
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    given: dict[str, Any] = {"mp_policy": mixed, "offload_policy": CPUOffloadPolicy()}
    for layer in model.model.layers:
        fully_shard(layer, **given)
    fully_shard(model, **given)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    return partial(trained, model, optimizer), None, None


def trained(model: Any, optimizer: Any, tokens: torch.Tensor) -> list[float]:
    """Train on one batch; the loss is read after the step."""
    times = [time.monotonic()]
    loss = model(input_ids=tokens, labels=tokens).loss
    times.append(time.monotonic())
    loss.backward()
    times.append(time.monotonic())
    optimizer.step()
    optimizer.zero_grad()
    times.append(time.monotonic())
    value = float(loss.item())
    return [value, *times, time.monotonic()]


WAYS = {"hetero": with_hetero, "torch": in_torch, "fsdp": under_fsdp}


def measured(name: str, way: str, given: argparse.Namespace) -> None:
    """Print a row for each number of tokens."""
    settings = dict(pair.split("=", 1) for pair in given.set)
    settings = {key: int(value) if value.isdigit() else value for key, value in settings.items()}
    if given.hbm:
        settings["hbm"] = given.hbm
    if given.card:  # an emulated card
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(parse_bytes(given.card, "card") / whole)
    head = {"model": name, "way": way, "card": given.card, "settings": settings}
    begin = time.monotonic()
    model = built(name)
    n_params = sum(p.numel() for p in model.parameters())
    torch.cuda.synchronize()
    made = time.monotonic()
    print(f"built after {made - begin:.1f} s", file=sys.stderr, flush=True)
    step, prepared, optimizer = WAYS[way](model, settings)
    head |= {
        "n_params": n_params,
        "build_seconds": round(made - begin, 2),
        "prepare_seconds": round(time.monotonic() - made, 2),
    }
    print(f"prepared in {head['prepare_seconds']} s", file=sys.stderr, flush=True)
    for tokens in given.tokens:
        if time.monotonic() - begin > given.seconds:
            say(given, {**head, "tokens": tokens, "problem": "no time was left"})
            continue
        torch.cuda.reset_peak_memory_stats()
        try:
            row = timed(step, tokens, given.steps, begin + given.seconds)
        except (torch.OutOfMemoryError, HeteroError) as error:
            say(given, {**head, "tokens": tokens, "problem": str(error)[:400]})
            gc.collect()
            continue
        if prepared is not None:
            row |= told(prepared)
        say(given, {**head, "tokens": tokens, **row})
        if given.kernels:  # in a row of its own: a profiler may fail
            found = kernels(partial(step, batch(tokens, 0)))
            say(given, {**head, "tokens": tokens, "kernel_seconds": found})
    if given.record and prepared is not None:
        recorded(step, prepared, optimizer, given)


def timed(step: Step, tokens: int, n_steps: int, until: float) -> dict[str, Any]:
    """Return what steps took, from the end of one to that of the next, and the host in each."""
    rows, begin, seconds = [], time.monotonic(), []
    for number in range(WARM + n_steps):
        rows.append(step(batch(tokens, number)))
        end = rows[-1][-1]
        seconds.append(end - begin)
        print(f"step {number}: {end - begin:.3f} s", file=sys.stderr, flush=True)
        begin = end
        if end > until and number >= WARM:
            break
    median = statistics.median(seconds[WARM:])
    parts = [[after - before for before, after in pairwise(row[1:])] for row in rows[WARM:]]
    host = zip(PARTS, map(statistics.median, zip(*parts, strict=True)), strict=True)
    return {
        "step_seconds": round(median, 4),
        "tokens_per_second": round(tokens / median),
        "all_seconds": [round(each, 3) for each in seconds],
        "host_seconds": {name: round(each, 4) for name, each in host},
        "loss": [rows[0][0], rows[-1][0]],
        "reserved_gib": gib(torch.cuda.max_memory_reserved()),
        "retries": torch.cuda.memory_stats().get("num_alloc_retries", 0),
        "rss_gib": gib(psutil.Process().memory_info().rss),
    }


def batch(tokens: int, number: int) -> torch.Tensor:
    """Return random tokens, the same ones for every way."""
    length = min(tokens, SEQUENCE)
    generator = torch.Generator().manual_seed(number)
    size = max(1, tokens // SEQUENCE), length
    found: torch.Tensor = torch.randint(0, VOCABULARY, size, generator=generator)
    return found.to("cuda")


def told(model: Any) -> dict[str, Any]:
    """Return what hetero says of its last step."""
    found = asdict(hetero.status(model))
    units = Counter(found.pop("units").values())
    policies = Counter(found.pop("policies").values())
    return {"status": {**found, "units": units, "policies": policies}}


def recorded(step: Step, model: Any, optimizer: Any, given: argparse.Namespace) -> None:
    """Record two steps in a folder, and write their report there."""
    with hetero.profile(model, given.record, optimizer=optimizer):
        for number in range(2):
            step(batch(given.tokens[-1], number))
    hetero.report(given.record, Path(given.record) / "report.html")


def kernels(step: Callable[[], object]) -> dict[str, tuple[float, int]]:
    """Return {kernel or copy: (seconds on the device, number)} of a step, the longest first.

    In the rest of the step's time nothing ran.
    """
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as found:
        step()
        torch.cuda.synchronize()
    times = {e.key: (e.self_device_time_total / 1e6, e.count) for e in found.key_averages()}
    longest = sorted(times.items(), key=lambda each: -each[1][0])
    return {key[:120]: (round(seconds, 5), n) for key, (seconds, n) in longest[:KERNELS]}


def gib(n_bytes: int) -> float:
    return round(n_bytes / 2**30, 2)


def say(given: argparse.Namespace, row: Mapping[str, Any]) -> None:
    line = json.dumps(row, default=str)
    print(line, flush=True)
    with open(given.output, "a", encoding="utf-8") if given.output else nullcontext() as file:
        if file is not None:
            file.write(line + "\n")


def main() -> None:
    """Measure one model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=SHAPES)
    parser.add_argument("--way", choices=WAYS, default="hetero")
    parser.add_argument("--tokens", nargs="*", type=int, default=[4096, 16384])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--hbm")
    parser.add_argument("--card", help="of what torch may take of the GPU, as 24GiB: emulated")
    parser.add_argument("--set", nargs="*", default=[], help="KEY=VALUE of hetero.prepare")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--output")
    parser.add_argument("--kernels", action="store_true", help="seconds of each kind of kernel")
    parser.add_argument("--record", help="a folder for the run of two steps, and its report")
    given = parser.parse_args()
    measured(given.model, given.way, given)


if __name__ == "__main__":
    main()
