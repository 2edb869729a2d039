"""What plans say of models on machines: the table of the docs (`python -m benchmarks.planned`).

None of these machines was measured: each row is a rehearsal on the clock of a profile.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

from hetero.config import Config
from hetero.errors import BudgetError, HeteroError
from hetero.rehearse.models import describe
from hetero.rehearse.named import machine
from hetero.rehearse.plan import Fitted, Plan, drawn, overflows, plan, scene_of
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
}
WORK = ("compute_", "rest_", "step_")  # shares in which the device computes


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
    events = found.rehearsal.run.events
    last = max(event.step for event in events)
    spans: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event.step == last and event.what in ("move", "update") and event.lane:
            spans[event.lane].append((event.t_ns, event.t_ns + event.dur_ns))
    busy = {lane: union(rows) / 1e9 for lane, rows in spans.items()}
    busy["compute"] = sum(s for name, s in found.shares.items() if name.startswith(WORK))
    return busy


def union(spans: list[tuple[int, int]]) -> int:
    """Return how long one of them goes on: updates of which some slices are carried overlap."""
    whole, until = 0, 0
    for begin, end in sorted(spans):
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
    )
    found = [
        f"| {' | '.join((*heads, 'RAM, GiB', 'disk, GiB'))} |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in rows:
        head = f"| {each.machine} | {each.model} | {each.tokens:,} |"
        if each.problem:
            found.append(f"{head} {each.problem} | | | | |")
            continue
        found.append(
            f"{head} {each.step_seconds:.3g} | {each.tokens_per_second:,.0f} |"
            f" {each.limit} {each.roofline:.0%} | {each.host_gib:.0f} | {each.disk_gib:.0f} |"
        )
    return found


if __name__ == "__main__":
    main()
