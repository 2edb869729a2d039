"""What ranks that share one model cost, and whether they give the bits of one."""

from __future__ import annotations

import copy
import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import engine
from benchmarks.disk import scratch
from benchmarks.engine import Figure, Figures, adamw
from hetero.api import engine_of, prepare, prepare_tuned, release
from hetero.checkpoint.reader import CheckpointReader
from hetero.checkpoint.save import save_checkpoint
from hetero.config import Config
from hetero.cores import torch_threads
from hetero.recipes.gpt import GPT, GPTConfig
from hetero.status import status
from hetero.testing import rank_divergence, rank_faults
from hetero.testing.ranks import N_THREADS, run_ranks
from hetero.train.engine.tuning import Tuning
from hetero.types import Lane

SMALL = GPTConfig(width=64, layers=4, heads=4, context=32, checkpoint_blocks=False)
MIDDLE = GPTConfig(width=256, layers=8, heads=8, context=64, checkpoint_blocks=False)
LARGE = GPTConfig(width=480, layers=8, heads=8, context=128, checkpoint_blocks=False)
LARGEST = GPTConfig(width=768, layers=8, heads=8, context=64, checkpoint_blocks=False)


def tokens(config: GPTConfig, step: int, rank: int, samples: int = 4) -> torch.Tensor:
    dice = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 256, (samples, config.context), generator=dice)


def built(config: GPTConfig) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = GPT(config)
    return model, adamw(model)


# -- equal ---------------------------------------------------------------------------------------

STEPS = 4


def equal(device: str | None = None) -> Figures:
    """Weights of N ranks against one process's N micro-batches, for budgets and chunk sizes."""
    rows, settings = [], []
    for hbm in (1.0, 2.0, 8.0):
        for chunk_bytes in (1024, 8192):
            settings.append({"chunk_bytes": chunk_bytes, "hbm": int(hbm * 2**20)})
    for n_ranks in (1, 2, 3, 4):
        with torch_threads(N_THREADS):
            expected = micro_batches(n_ranks)
        same = 0
        for given in settings:
            found = run_ranks(n_ranks, _trained, {**given, "device": device or "cpu:sim"})
            same += all(
                torch.equal(each[name], value) for each in found for name, value in expected.items()
            )
        rows.append(Figure(f"N = {n_ranks}: equal", same / len(settings), "share", "==", 1.0))
    return Figures(rows, {"settings": settings, "steps": STEPS})


def micro_batches(n_ranks: int) -> dict[str, torch.Tensor]:
    """Train in plain torch, with gradients summed in the order of ranks."""
    model, optimizer = built(SMALL)
    params = list(model.parameters())
    for step in range(STEPS):
        for rank in range(n_ranks):
            batch = tokens(SMALL, step, rank)
            for param, grad in zip(
                params, torch.autograd.grad(model(batch, batch), params), strict=True
            ):
                grad = grad * (1 / n_ranks)
                param.grad = grad if param.grad is None else param.grad.add_(grad)
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def _trained(rank: int, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    model, plain = built(SMALL)
    model, optimizer = prepare(model, plain, mesh="world", **settings)
    for step in range(STEPS):
        batch = tokens(SMALL, step, rank)
        model(batch, batch).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    release(model, optimizer)
    return dict(model.state_dict())


# -- memory --------------------------------------------------------------------------------------


def memory(device: str | None = None) -> Figures:
    """Homes on HOST of a rank over those of one rank alone divided by the ranks: ledger, pages."""
    alone = run_ranks(1, _held, device or "cpu:sim")[0]
    rows, detail = [], {"1": [alone]}
    for n_ranks in (2, 4):
        found = detail[str(n_ranks)] = run_ranks(n_ranks, _held, device or "cpu:sim")
        ledger = max(each["ledger"] for each in found) / (alone["ledger"] / n_ranks)
        files = {number: n for each in found for number, n in each["files"].items()}
        pages = sum(files.values()) / alone["ledger"]
        rows.append(Figure(f"N = {n_ranks}: ledger", ledger, "ratio", "<=", 1.03))
        rows.append(Figure(f"N = {n_ranks}: pages", pages, "ratio", "<=", 1.08))
    return Figures(rows, detail)


def _held(rank: int, device: str) -> dict[str, Any]:
    """Return what a rank's homes take after three steps: as charged, and as pages that exist."""
    model, plain = built(LARGE)
    several = dist.get_world_size() > 1
    settings = {"device": device, "hbm": "32MiB", "mesh": "world" if several else {"dp_shard": 1}}
    model, optimizer = prepare(model, plain, **settings)
    for number in range(3):
        batch = tokens(LARGE, number, rank, 1)
        optimizer.zero_grad()
        model(batch, batch).backward()
        if number < 2:
            optimizer.step()
    dist.barrier()  # with gradients at home: the most that there is
    used = status(model).tiers["HOST"]
    kinds = ("param", "grad", "master", "state")
    return {"ledger": sum(used[kind] or 0 for kind in kinds), "files": memory_files()}


def memory_files() -> dict[int, int]:
    """Return the bytes that exist of the files of memory that this process maps, by inode."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(link).startswith("/memfd:hetero"):
                there = os.stat(link)
                found[there.st_ino] = there.st_blocks * 512
        except OSError:  # of the listing itself
            continue
    return found


# -- step ----------------------------------------------------------------------------------------


def step(device: str | None = None, pairs: int = 15) -> Figures:
    """A step of two ranks over FSDP2's on gloo, where frames hold the whole model; paired."""
    found = run_ranks(2, _paired, device or "cpu", pairs)
    ratios = found[0]["ratios"]
    rows = [Figure("hetero / FSDP2", statistics.median(ratios), "ratio", "<=", 1.0)]
    return Figures(rows, found[0])


def _paired(rank: int, device: str, pairs: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    plain, optimizer = built(LARGE)
    theirs = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in theirs.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(theirs, mesh=mesh)
    ours, optimizer = prepare(plain, optimizer, mesh="world", device=device, hbm="2GiB")
    loops: list[tuple[Any, Any]] = [(theirs, adamw(theirs)), (ours, optimizer)]
    took: list[list[float]] = [[], []]
    for pair in range(pairs + 3):
        for side in (0, 1) if pair % 2 else (1, 0):
            dist.barrier()
            began = time.perf_counter()
            _step(*loops[side], pair, rank)
            dist.barrier()
            if pair >= 3:
                took[side].append(time.perf_counter() - began)
    ratios = [mine / other for other, mine in zip(*took, strict=True)]
    return {"ratios": ratios, "fsdp2": took[0], "hetero": took[1]}


def _step(model: Any, optimizer: torch.optim.Optimizer, number: int, rank: int) -> None:
    batch = tokens(LARGE, number, rank)
    model(batch, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


# -- bytes on the wire ---------------------------------------------------------------------------


def wire(device: str | None = None) -> Figures:
    """Bytes gathered and exchanged in a step over the least, with frames for all weights or few."""
    rows, detail = [], {}
    for n_ranks in (2, 4):
        for hbm in ("1GiB", "16MiB"):
            found = run_ranks(n_ranks, _moved, device or "cpu:sim", hbm)
            detail[f"{n_ranks} {hbm}"] = found
            for kind in ("gathered", "exchanged"):
                most = max(each[kind] / each[f"least {kind}"] for each in found)
                name = f"N = {n_ranks}, {hbm}: {kind} / least"
                rows.append(Figure(name, most, "ratio", "<=", 1.01))
    return Figures(rows, detail)


def _moved(rank: int, device: str, hbm: str) -> dict[str, float]:
    """Return what other ranks' shares and addends moved in a step, and the least of each.

    Each bucket crosses once for forward. For backward those cross again that frames do not hold
    when it begins: whole buckets, the largest first.
    """
    n_ranks = dist.get_world_size()
    model, plain = built(MIDDLE)
    config = Config.load(device=device, hbm=hbm, mesh="world")
    model, optimizer = prepare_tuned(model, plain, config, Tuning(one_sided=False))
    for number in range(5):
        batch = tokens(MIDDLE, number, rank, 1)
        model(batch, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    setup, of_others = engine_of(model).setup, (n_ranks - 1) / n_ranks
    moved = setup.stats.n_bytes
    room = (status(model).division or {})["frames"]
    sizes = [sum(s.spec.numel for s in b.segments) * b.dtype.itemsize for b in setup.buckets]
    again = sum(sizes)
    for size in sorted(sizes, reverse=True):
        if size <= room:
            room, again = room - size, again - size
    return {
        "gathered": moved[Lane.GATHER],
        "least gathered": of_others * (sum(sizes) + again),
        "exchanged": moved[Lane.REDUCE],
        "least exchanged": of_others * sum(sizes),
    }


# -- overlap -------------------------------------------------------------------------------------


def overlap(device: str | None = None) -> Figures:
    """Two ranks on modelled links: a planned step over the larger of compute and link time."""
    hbm = engine.UNIT_BYTES * (engine.UNITS // 4) + engine.activations(1.0)
    rows, detail = [], {}
    for ratio in (0.5, 1.0, 2.0):
        found = run_ranks(2, _modelled, hbm, ratio)
        name = f"transfer {ratio:g}x compute"
        rows.append(
            Figure(name, max(each.seconds / each.bound for each in found), "ratio", "<=", 1.10)
        )
        detail[name] = [each._asdict() for each in found]
    return Figures(rows, detail)


def _modelled(rank: int, hbm: int, ratio: float) -> engine.Modelled:
    return engine.modelled_in(hbm, ratio, engine.virtual(), mesh="world")


# -- the roll call -------------------------------------------------------------------------------


def roll_call(device: str | None = None) -> Figures:
    """A call that all ranks join, over a step of the quickstart's model; median of many."""
    rows, detail = [], {}
    for n_ranks in (2, 4):
        found = run_ranks(n_ranks, _called)[0]
        detail[n_ranks] = found
        share = found["call"] / found["step"]
        rows.append(Figure(f"{n_ranks} ranks: call / step", share, "share", "<=", 0.01))
    return Figures(rows, {str(n): each for n, each in detail.items()})


def _called(rank: int) -> dict[str, float]:
    model, plain = built(MIDDLE)
    model, optimizer = prepare(model, plain, mesh="world", device="cpu", hbm="1GiB")
    comm = engine_of(model).setup.comm
    steps, calls = [], []
    for number in range(5):
        began = time.perf_counter()
        batch = tokens(MIDDLE, number, rank)
        model(batch, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(time.perf_counter() - began)
    for _ in range(200):
        began = time.perf_counter()
        comm.agree(b"x" * 200, "a roll call")
        calls.append(time.perf_counter() - began)
    return {"step": statistics.median(steps), "call": statistics.median(calls)}


# -- checkpoints ---------------------------------------------------------------------------------

SAVES = 5


def save(device: str | None = None) -> Figures:
    """The largest of four ranks' shards over a fair one; their save over one rank's, in pairs."""
    ratios, largest = [], 0.0
    with scratch() as path:
        for number in range(SAVES):
            took = {}
            for n_ranks in (1, 4) if number % 2 else (4, 1):
                folder = path / f"{number}-{n_ranks}"
                took[n_ranks] = max(run_ranks(n_ranks, _saved, str(folder), device or "cpu:sim"))
                with CheckpointReader.open(folder) as reader:
                    shards = reader.shard_bytes
                largest = max(largest, max(shards) / (sum(shards) / n_ranks))
                shutil.rmtree(folder)
            ratios.append(took[4] / took[1])
    rows = [
        Figure("largest shard / (total / 4)", largest, "ratio", "<=", 1.02),
        Figure("4 ranks / one, median of pairs", statistics.median(ratios), "ratio", "<=", 1.1),
    ]
    return Figures(rows, {"ratios": ratios})


def _saved(rank: int, folder: str, device: str) -> float:
    """Return the seconds of the quickest of three saves."""
    model, plain = built(LARGEST)
    several = dist.get_world_size() > 1
    settings = {"device": device, "hbm": "128MiB", "mesh": "world" if several else {"dp_shard": 1}}
    model, optimizer = prepare(model, plain, **settings)
    batch = tokens(LARGEST, 0, rank, 1)
    model(batch, batch).backward()
    optimizer.step()
    took = []
    for number in range(3):
        dist.barrier()
        began = time.perf_counter()
        save_checkpoint(folder, model, optimizer, step=number)
        took.append(time.perf_counter() - began)
    release(model, optimizer)
    return min(took)


# -- what goes wrong -----------------------------------------------------------------------------

SPARE_SECONDS = 2.0


def faults(device: str | None = None, n_faults: int = 300) -> Figures:
    """Ranks killed, stopped or failed at drawn places: right ends, and when all are gone."""
    found = [rank_faults.outcome_of(rank_faults.drawn(number)) for number in range(n_faults)]
    good = sum(each.wrong == "" for each in found)
    late = rank_faults.TIMEOUT_SECONDS + SPARE_SECONDS
    rows = [
        Figure(f"of {n_faults} faults: right ends", good, "faults", "==", n_faults),
        Figure("gone after", max(each.seconds for each in found), "s", "<=", late),
    ]
    return Figures(rows, {"wrong": [each.wrong for each in found if each.wrong]})


def diverge(device: str | None = None, n_divergences: int = 200) -> Figures:
    """One rank does something else: all are told, or all have the right bits."""
    found = [rank_divergence.found(rank_divergence.drawn(n)) for n in range(n_divergences)]
    good = sum(each.wrong == "" for each in found)
    rows = [Figure(f"of {n_divergences}: told, or right", good, "cases", "==", n_divergences)]
    told = sum(each.told for each in found)
    return Figures(rows, {"told": told, "wrong": [each.wrong for each in found if each.wrong]})
