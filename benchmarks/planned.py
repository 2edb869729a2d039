"""What plans say of models on machines: the table of the docs (`python -m benchmarks.planned`).

None of these machines was measured: each row is a rehearsal on the clock of a profile.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from hetero.config import Config
from hetero.errors import BudgetError, HeteroError
from hetero.events import Event
from hetero.rehearse.attempts import Fitted, overflows
from hetero.rehearse.models import describe
from hetero.rehearse.named import machine
from hetero.rehearse.plan import Plan, drawn, plan, scene_of
from hetero.rehearse.rehearsal import rehearse

SEQUENCE = 4096
TOKENS = (4096, 16384, 65536, 163840)
COMMON = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8}
MODELS: dict[str, str | Mapping[str, Any]] = {
    "8B": "llama-3-8b",
    "14B": {
        **COMMON,
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "intermediate_size": 17408,
    },
    "32B": {
        **COMMON,
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "intermediate_size": 27648,
    },
    "70B": "llama-3-70b",
}
# samples that a unit takes at once: a few make products of full speed
MACHINES: dict[str, dict[str, Any]] = {
    "H200, 1 TiB": {"profile": "h200-sxm", "micro_batch": 4},
    "RTX 4090, 64 GiB": {"profile": "rtx4090", "host": "60GiB", "micro_batch": 1},
    "RTX 4090, 128 GiB": {"profile": "rtx4090", "host": "120GiB", "micro_batch": 1},
    "A100-80": {"profile": "a100-80", "micro_batch": 2},
    "GH200-96": {"profile": "gh200-96", "micro_batch": 4},
    "GB10": {"profile": "gb10", "micro_batch": 1},
}
NS = 10**9
WORK = ("compute_", "rest_", "step_")  # shares in which the device computes


class Span(NamedTuple):
    """What a lane does, in nanoseconds."""

    begin: int
    end: int
    bucket: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A plan, or why there is none."""

    model: str
    machine: str
    tokens: int
    n_params: float = 0.0
    step_seconds: float = 0.0
    tokens_per_second: float = 0.0
    limit: str = ""
    """The lane that is busy longest."""
    roofline: float = 0.0
    """How long that is, of the step."""
    ordered: float = 0.0
    """How long a step takes at least whose updates come before its forward ends, of the step."""
    hbm_gib: float = 0.0
    host_gib: float = 0.0
    disk_gib: float = 0.0
    problem: str = ""


def row(model: str, machine: str, tokens: int, settings: Mapping[str, Any]) -> Row:
    """Plan a step; with a disk if RAM does not hold the model."""
    named = partial(Row, model=model, machine=machine, tokens=tokens)
    samples = tokens // SEQUENCE
    given = {**MACHINES[machine], "precision": "bf16", "fused_loss": True, **settings}
    if given["micro_batch"] >= samples:
        del given["micro_batch"]
    with tempfile.TemporaryDirectory() as disk:
        try:
            found = within(model, samples, given)
            if found is None:
                again = {**given, "nvme": disk}
                found = plan(MODELS[model], (samples, SEQUENCE), estimates=False, **again)
        except HeteroError as error:
            return named(problem=str(error).splitlines()[0][:120])
    if not found.fits:
        short = found.shortfalls[0]
        return named(problem=f"needs {short.needed_bytes / 2**30:.0f} GiB of {short.tier}")
    busy = lanes(found)
    limit = max(busy, key=lambda lane: busy[lane])
    peaks = {tier.tier: round(tier.peak_bytes / 2**30, 1) for tier in found.tiers}
    return named(
        n_params=found.n_params,
        step_seconds=found.step_seconds,
        tokens_per_second=found.tokens_per_second,
        limit=limit,
        roofline=busy[limit] / found.step_seconds,
        ordered=in_order(found) / found.step_seconds,
        hbm_gib=peaks.get("HBM", 0.0),
        host_gib=peaks.get("HOST", 0.0),
        disk_gib=peaks.get("NVME", 0.0),
    )


def within(model: str, samples: int, given: Mapping[str, Any]) -> Plan | None:
    """Return the plan of a step that its budgets hold; None, if they do not, without a search for
    larger ones."""
    known, described = Config.load(None, **given), describe(MODELS[model], (samples, SEQUENCE))
    scene = scene_of(described, None, None, known, machine(known))
    try:
        found = rehearse(scene)
    except BudgetError:
        return None
    if found.error is not None:
        return None
    if overflows(scene, found):
        return plan(MODELS[model], (samples, SEQUENCE), estimates=False, **given)
    return drawn(scene, described, Fitted(found, known, ()), estimates=False)


def lanes(found: Plan) -> dict[str, float]:
    """Return the seconds that each lane is busy in the last step."""
    busy = {lane: union(rows) / NS for lane, rows in spans_of(found).items()}
    busy["compute"] = sum(s for name, s in found.shares.items() if name.startswith(WORK))
    return busy


def in_order(found: Plan) -> float:
    """Return how long the last step takes at least if `step` is a barrier: all updates come
    between it and the end of forward, and gradients after that. Each of the two parts takes as long
    as the lane that is busy longest in it, or as a chain of the first."""
    phases = [(e.t_ns, e.t_ns + e.dur_ns, e.why) for e in last_step(found) if e.what == "phase"]
    border = max((end for _, end, why in phases if why == "forward"), default=0)
    spans = spans_of(found)
    work = {name: s for name, s in found.shares.items() if name.startswith(WORK)}
    forward = sum(s for name, s in work.items() if name.endswith("_forward_seconds"))
    first = [union(within_times(rows, 0, border)) / NS for rows in spans.values()]
    second = [union(within_times(rows, border, math.inf)) / NS for rows in spans.values()]
    first += [chain / NS for chain in chains(found, border, spans)]
    return max(*first, forward) + max(*second, sum(work.values()) - forward)


def chains(found: Plan, border: int, spans: Mapping[str, list[Span]]) -> Iterator[int]:
    """Yield, for each bucket that is updated on HOST, the time of all updates up to its own, of its
    fetch, and of what computes from there to the end of forward."""
    waits = [
        Span(e.t_ns, e.t_ns + e.dur_ns)
        for e in last_step(found)
        if e.what == "wait" and e.phase == "forward"
    ]
    updates = spans.get("update", [])
    ends: dict[int, int] = {}
    for span in updates:
        ends[span.bucket] = max(span.end, ends.get(span.bucket, 0))
    for bucket, end in ends.items():
        fetches = [
            s
            for s in spans.get("h2d", [])
            if s.bucket == bucket and end < s.end and s.begin < border
        ]
        if fetches:
            there = max(fetch.end for fetch in fetches)
            after = border - there - union(within_times(waits, there, border))
            yield union(within_times(updates, 0, end)) + union(fetches) + after


def within_times(spans: Iterable[Span], begin: float, end: float) -> list[Span]:
    """Return what lies between two times."""
    cut = ((max(s.begin, begin), min(s.end, end), s.bucket) for s in spans)
    return [Span(int(b), int(e), bucket) for b, e, bucket in cut if b < e]


def last_step(found: Plan) -> list[Event]:
    """Return the events of the last step."""
    events = found.rehearsal.run.events
    last = max(event.step for event in events)
    return [event for event in events if event.step == last]


def spans_of(found: Plan) -> dict[str, list[Span]]:
    """Return what each lane but compute does in the last step. What goes on after its end (updates)
    did so after the end of the step before, which was alike."""
    events = last_step(found)
    length = round(found.step_seconds * NS)
    end = min(event.t_ns for event in events) + length
    spans: defaultdict[str, list[Span]] = defaultdict(list)
    for event in events:
        if event.what in ("move", "update") and event.lane:
            goes_on = event.t_ns + event.dur_ns / 2 > end
            begin = event.t_ns - (length if goes_on else 0)
            spans[event.lane].append(Span(begin, begin + event.dur_ns, event.bucket))
    return spans


def union(spans: Iterable[Span]) -> int:
    """Return how long one of them goes on: updates of which some slices are carried overlap."""
    whole, until = 0, 0
    for begin, end, _ in sorted(spans):
        whole += max(0, end - max(begin, until))
        until = max(until, end)
    return whole


def main() -> None:
    """Print a JSON object for each row, and the table at the end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--machines", nargs="*", default=list(MACHINES))
    parser.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS))
    parser.add_argument("--updates", default="step")
    given = parser.parse_args()
    rows = []
    for place, model, tokens in product(given.machines, given.models, given.tokens):
        rows.append(row(model, place, tokens, {"updates": given.updates}))
        print(json.dumps(asdict(rows[-1])), flush=True)
    print("\n".join(table(rows)))


def table(rows: list[Row]) -> list[str]:
    """Return the rows as Markdown."""
    heads = (
        "machine",
        "model",
        "tokens a step",
        "step, s",
        "tokens/s",
        "longest lane, of the step",
        "least in this order",
    )
    found = [
        f"| {' | '.join((*heads, 'RAM, GiB', 'disk, GiB'))} |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for each in rows:
        head = f"| {each.machine} | {each.model} | {each.tokens:,} |"
        if each.problem:
            found.append(f"{head} {each.problem} | | | | | |")
            continue
        found.append(
            f"{head} {each.step_seconds:.3g} | {each.tokens_per_second:,.0f} |"
            f" {each.limit} {each.roofline:.0%} | {each.ordered:.0%} |"
            f" {each.host_gib:.0f} | {each.disk_gib:.0f} |"
        )
    return found


if __name__ == "__main__":
    main()
