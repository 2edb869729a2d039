"""What `hetero.watch` costs a program that it follows."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.engine import Figure, Figures, adamw, timed, train_step
from hetero.recipes.gpt import GPT, GPTConfig
from hetero.watch.observer import Observer

WARM = 4  # pairs that make states, and are sampled


def watch_overhead(device: str | None = None, pairs: int = 41) -> Figures:
    """A watched step over one that is not: CPU seconds (on CUDA time), median of pairs."""
    place = "cuda" if device == "cuda" else "cpu"
    torch.manual_seed(0)
    config = GPTConfig(width=256, layers=6, heads=4, context=128, checkpoint_blocks=False)
    plain = GPT(config).to(place)
    twin = copy.deepcopy(plain)
    sides = [(plain, adamw(plain)), (twin, adamw(twin))]
    tokens = torch.randint(0, 256, (4, 128), device=place)
    observer = Observer()
    ratios, seconds, watched = [], [], []
    for pair in range(pairs + WARM):
        took = {}
        for side in (0, 1) if pair % 2 else (1, 0):
            if side:
                observer.install()
            took[side] = spent(partial(train_step, *sides[side], tokens), place)
            if side:
                observer.remove()
        if pair >= WARM:
            ratios.append(took[1] / took[0])
            seconds.append(took[0])
            watched.append(took[1])
    equal = all(
        torch.equal(a, b) for a, b in zip(plain.parameters(), twin.parameters(), strict=True)
    )
    detail = {
        "plain_step_cpu_seconds": statistics.median(seconds),
        "steps seen allocation by allocation": observer.sampler.n_samples,
        "all steps, with those that are sampled": sum(watched) / sum(seconds),
        "ratios": ratios,
    }
    rows = [
        Figure("watched / plain", statistics.median(ratios), "ratio", "<=", 1.03),
        Figure("all weights equal plain torch's, bit by bit", float(equal), "", "==", 1.0),
    ]
    return Figures(rows, detail)


def spent(call: Callable[[], None], place: str) -> float:
    """Return what a call takes of a CPU, whatever else runs on it; on CUDA, its time."""
    if place == "cuda":
        return timed(call, place)
    start = time.process_time()
    call()
    return time.process_time() - start
