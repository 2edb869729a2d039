"""What the engine logs of a run, and what the log has shown."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import hetero
from hetero.api import engine_of
from hetero.device import SimDevice
from hetero.events import Event
from hetero.plan.hardware import find
from hetero.recipes.gpt import GPT, GPTConfig
from hetero.types import Lane

TOKENS = torch.arange(32).view(2, 16)


def trained(steps: int = 4, **settings: Any) -> tuple[Any, list[Event]]:
    torch.manual_seed(0)
    shape = {"width": 32, "layers": 6, "heads": 4, "context": 16}
    model = GPT(GPTConfig(**shape, checkpoint_blocks=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    device = SimDevice(h2d_bytes_per_second=1e9, d2h_bytes_per_second=1e9)
    settings = {"hbm": 300_000, "chunk_bytes": 1024, "device": device, **settings}
    model, optimizer = hetero.prepare(model, optimizer, **settings)
    for _ in range(steps):
        model(TOKENS, TOKENS).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine = engine_of(model)
    return engine, list(engine.setup.log)


def test_a_unit_that_is_computed_again_sends_no_weight_home() -> None:
    """Its backward has unpacked a weight before it is computed again: that is nobody's view."""
    _, events = trained(activations="recompute")
    moved = Counter((e.lane, e.category, e.why) for e in events if e.what == "move")

    assert moved["d2h", "grad", "gradient"]
    assert ("d2h", "param", "flush") not in moved


def test_moves_add_up_to_what_the_links_have_counted() -> None:
    engine, events = trained(steps=3)
    counted = Counter(engine.residence.link.n_bytes)  # behind the last border
    counted.update(engine.setup.stats.n_bytes)  # of the last step
    border = max(e.seq for e in events if e.what == "step" and e.step == 1)
    moved = Counter()
    for event in events:
        if event.what == "move" and event.category != "activation":
            moved[event.lane] += event.n_bytes * (event.seq > border)
    # what the border of step 1 had fetched for the next one is counted with that
    ahead = sum(
        e.n_bytes
        for e in events
        if e.what == "move" and e.lane == "h2d" and e.step == 1 and e.phase == "step"
    )

    assert moved["d2h"] == counted[Lane.D2H] > 0
    assert moved["h2d"] <= counted[Lane.H2D] <= moved["h2d"] + ahead


def test_levels_are_those_of_the_ledger() -> None:
    engine, events = trained()
    last = {(e.tier, e.category): e.n_bytes for e in events if e.what == "level"}

    assert last
    for (tier, category), n_bytes in last.items():
        used = {t.name: t for t in engine.setup.ledger.budgets}[tier]
        kind = next(k for k in hetero.types.Kind if k.value == category)
        assert engine.setup.ledger.used(used, kind) == n_bytes


def test_phases_lie_in_their_steps_and_do_not_overlap() -> None:
    _, events = trained()
    steps = {e.step: e for e in events if e.what == "step"}
    phases = sorted((e for e in events if e.what == "phase"), key=lambda e: e.t_ns)

    assert Counter(e.why for e in phases) == {"forward": 4, "backward": 4, "step": 4}
    for before, after in pairwise(phases):
        assert before.t_ns + before.dur_ns <= after.t_ns
    for phase in phases:
        step = steps[phase.step]
        assert step.t_ns <= phase.t_ns
        assert phase.t_ns + phase.dur_ns <= step.t_ns + step.dur_ns


def test_every_unit_is_accessed_in_forward_and_in_backward() -> None:
    engine, events = trained()
    units = set(range(len(engine.setup.blueprint.units)))
    last = max(e.step for e in events if e.what == "step")
    seen = {(e.phase, e.unit) for e in events if e.what == "access" and e.step == last}

    assert {unit for phase, unit in seen if phase == "forward"} >= units - {
        i for i in units if engine.setup.blueprint.units[i].module is None
    }
    assert {phase for phase, _ in seen} == {"forward", "backward"}


def test_an_eviction_names_the_access_that_forced_it() -> None:
    _, events = trained()
    accesses = {e.seq for e in events if e.what == "access"}
    evicted = [e for e in events if e.what == "free" and e.why == "evict"]

    assert len(evicted) >= 3
    assert all(e.cause in accesses for e in evicted)


def test_a_choice_of_policies_is_logged_with_its_room() -> None:
    _, events = trained(activations="auto")
    said = [e.why for e in events if e.what == "decision"]

    assert any("keep" in why and "bytes" in why for why in said)


def test_a_model_that_comes_to_stay_says_so() -> None:
    _, events = trained(hbm="64MiB")

    assert "everything fits: the model stays" in [e.why for e in events if e.what == "decision"]


def test_copies_take_what_a_profile_says_where_one_is_named() -> None:
    engine, _ = trained(profile="rtx4090")
    profile = find("rtx4090")

    assert engine.residence.fitting._copies.up(2**20) == profile.copy_seconds(Lane.H2D, 2**20)
    assert engine.residence.fitting._copies.up(2**20) != 2**20 / 1e9


def test_an_unknown_profile_is_refused_before_anything_is_touched() -> None:
    with pytest.raises(hetero.ConfigError, match="rtx4090"):
        trained(profile="rtx409")


def test_a_log_that_is_off_keeps_nothing(tmp_path: Path) -> None:
    engine, _ = trained(steps=1)
    engine.setup.log.clear()
    engine.setup.log.enabled = False
    engine.setup.model(TOKENS, TOKENS).backward()

    assert len(engine.setup.log) == 0


def test_a_model_that_stays_does_not_show_the_traffic_of_its_first_step_for_ever() -> None:
    engine, _ = trained(steps=1, hbm="64MiB")
    first = engine.setup.stats
    assert engine.residence.name == "resident" and first.counts["miss"] and first.n_bytes[Lane.H2D]
    engine, _ = trained(steps=3, hbm="64MiB")

    assert not engine.setup.stats.counts and not engine.setup.stats.n_bytes
