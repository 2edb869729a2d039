"""Figures agree: what two surfaces show is one number, of runs and of plans."""

from __future__ import annotations

import io
import json
import random
import re
from collections import Counter
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import hetero
from hetero.dry import DryDevice
from hetero.events import EventLog
from hetero.recipes import show
from hetero.recipes.gpt import GPT, GPTConfig
from hetero.recipes.setup import Size, size_of
from hetero.rehearse.plan import Plan, plan
from hetero.report.examine import SUMMARY, examine
from hetero.report.measure import figures
from hetero.report.profile import profile
from hetero.report.views import NO_LINE, WITHOUT
from hetero.report.words import format_rate, format_seconds
from hetero.train.engine import setup as engine_setup
from hetero.types import Tier, format_bytes

KIB = 1024
OPTIMIZERS = (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
MADE = re.compile(
    r'<th scope="row">([^<]*)</th><td class=num><data value="(\d+)"[^>]*>[^<]*</data></td>'
    r'<td class=num>[^<]*</td><td class="found">([^<]*)</td>'
)
KEYED = re.compile(r'<data data-key="([^"]+)" value="([^"]+)"[^>]*>([^<]*)</data>')


@dataclass(frozen=True)
class Setting:
    """A small training, drawn by a seed."""

    layers: int
    width: int
    samples: int
    optimizer: Any
    settings: dict[str, Any]
    on_disk: bool

    @classmethod
    def drawn(cls, seed: int) -> Setting:
        dice = random.Random(seed)
        layers, width = dice.choice((2, 4, 6)), dice.choice((32, 64))
        states = 16 * (12 * layers * width * width + 2 * 256 * width)
        settings: dict[str, Any] = {"activations": dice.choice(("keep", "auto", "offload"))}
        if dice.random() < 0.8:  # else it stays
            settings["hbm"] = max(states // dice.choice((1, 2, 3)), 700 * KIB)
        on_disk = dice.random() < 0.4
        if on_disk:
            settings["host"] = max(states // 2, 2048 * KIB)
        if dice.random() < 0.3:
            settings["precision"] = "bf16"
        return cls(layers, width, dice.choice((1, 2)), dice.choice(OPTIMIZERS), settings, on_disk)

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        shape = GPTConfig(width=self.width, layers=self.layers, heads=2, context=16)
        return GPT(shape)

    def state_bytes(self) -> int:
        """Return the bytes of weights, gradients, masters and states, counted by hand."""
        kept = {torch.optim.AdamW: 8, torch.optim.SGD: 0, torch.optim.Adagrad: 4}[self.optimizer]
        numel = sum(p.numel() for p in self.model().parameters())
        weights = 6 if self.settings.get("precision") == "bf16" else 8  # two halves, a gradient
        return numel * (weights + kept)

    def given(self, folder: Path) -> dict[str, Any]:
        return {**self.settings, **({"nvme": str(folder)} if self.on_disk else {})}


def texts(draw: Any) -> str:
    """Return what a function prints on a console that is wide enough."""
    console = Console(file=io.StringIO(), width=400)
    draw(console)
    return console.file.getvalue()


def keyed(page: str) -> dict[str, tuple[float, str]]:
    """Return the figures of a page by their keys, which each have one value; and how it says it."""
    found: dict[str, tuple[float, str]] = {}
    for key, value, said in KEYED.findall(page):
        assert found.setdefault(key, (float(value), said)) == (float(value), said), key
    return found


def agree(page: str, summary: dict[str, Any], terminal: str) -> None:
    """Compare the page with the summary, and both with the terminal."""
    shown, known = keyed(page), figures(summary)
    assert {"hbm.peak_bytes", "step.mean_seconds"} <= shown.keys()
    for key, (value, said) in shown.items():
        assert value == pytest.approx(known[key], abs=1e-9), key
        if key.endswith(("peak_bytes", "budget_bytes", "mean_seconds")):
            assert said in terminal, (key, said)
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])
    for tier in data["tiers"]:
        of_tier = summary[tier["tier"].lower()]
        assert (tier["peak"], tier["budget"]) == (of_tier["peak_bytes"], of_tier["budget_bytes"])
        assert sum(of_tier["at_peak_bytes"].values()) == of_tier["peak_bytes"]
    agree_on_allocations(page, summary["allocations"], terminal)


def agree_on_allocations(page: str, made: dict[str, Any], terminal: str) -> None:
    """Compare the lines of the program on the page with the summary, and with the terminal."""
    rows = [(unescape(m), unescape(w), int(n)) for m, n, w in MADE.findall(page)]
    known = [(row["module"], row["where"], row["n_bytes"]) for row in made["rows"]]

    assert rows == [(m or "(outside of the model)", w or NO_LINE, n) for m, w, n in known]
    assert made["peak_bytes"] == sum(n for *_, n in known)
    assert made["outside_bytes"] == sum(n for module, _, n in known if not module)
    places = Counter[str]()
    for _, where, n_bytes in known:
        places[where or NO_LINE] += n_bytes
    said = [f"{where} {format_bytes(n)}" for where, n in places.most_common(1)]
    if known:
        held = f"Before backward, step {made['step']} held {format_bytes(made['peak_bytes'])}: "
        assert held + said[0] in terminal
    assert bool(known) == ("Before backward" in terminal)


def recorded(setting: Setting, folder: Path) -> tuple[hetero.Status, Size]:
    model = setting.model()
    optimizer = setting.optimizer(model.parameters(), lr=1e-3)
    given = {"device": "cpu:sim", **setting.given(folder)}
    model, optimizer = hetero.prepare(model, optimizer, **given)
    with profile(model, folder / "run"):
        for _ in range(4):
            tokens = torch.randint(0, 255, (setting.samples, 17))
            found = model(tokens[:, :-1], tokens[:, 1:])
            (found[1] if isinstance(found, tuple) else found).backward()
            optimizer.step()
            optimizer.zero_grad()
        status, size = hetero.status(model), size_of(model)
    hetero.release(model, optimizer)
    return status, size


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize("seed", range(25))
def test_terminal_page_json_and_status_of_a_run_show_the_same(seed: int, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    setting = Setting.drawn(seed)
    status, size = recorded(setting, tmp_path)
    made = examine(tmp_path / "run")
    made.write(tmp_path / "page.html")
    summary = json.loads((tmp_path / SUMMARY).read_text())
    terminal = texts(made.show)

    page = (tmp_path / "page.html").read_text()
    agree(page, summary, terminal)
    assert summary["allocations"]["rows"]
    assert size.state_bytes == setting.state_bytes()
    for said in (page, terminal):
        assert f"{format_bytes(size.state_bytes)} of states trained" in said
    assert summary == json.loads(json.dumps(made.as_json()))
    for name, row in status.tiers.items():
        if name.lower() in summary:
            of_tier = summary[name.lower()]
            assert of_tier["budget_bytes"] == row["budget"]
            assert row["used"] <= of_tier["peak_bytes"] <= row["peak"]  # which began earlier
    for lane in made.measured.lanes:
        assert summary[lane.lane]["bytes_per_second"] == lane.bytes_per_second
        if lane.bytes_per_second and lane.lane in ("h2d", "d2h", "read", "write"):
            assert format_rate(lane.bytes_per_second) in terminal


def compare_plan(found: Plan, folder: Path) -> None:
    """Compare a plan with its page, its summary, its table and the ledger of its rehearsal."""
    found.write(folder / "page.html")
    page = (folder / "page.html").read_text()
    summary = json.loads((folder / SUMMARY).read_text())
    terminal, data = texts(lambda console: show.planned(console, found)), found.as_json()

    agree(page, summary, terminal)
    assert summary["dropped_events"] == 0
    assert {row["tier"].lower() for row in data["tiers"]} == summary.keys() & {
        *("hbm", "host", "nvme")
    }
    for row in data["tiers"]:
        of_tier, tier = summary[row["tier"].lower()], Tier[row["tier"]]
        assert row["peak_bytes"] == of_tier["peak_bytes"] == found.rehearsal.peaks[tier]
        assert row["budget_bytes"] == of_tier["budget_bytes"]
        assert row["at_peak"] == of_tier["at_peak_bytes"]
        for said in (row["peak_bytes"], row["budget_bytes"] or row["peak_bytes"]):
            assert format_bytes(said) in terminal
    assert data["step_seconds"] == summary["step"]["mean_seconds"]
    assert data["step_seconds"] == pytest.approx(found.rehearsal.step_seconds, abs=2e-9)
    assert data["first_step_seconds"] == pytest.approx(found.rehearsal.steps[0].seconds, abs=2e-9)
    assert data["tokens_per_second"] == summary["step"]["tokens_per_second"]
    assert sum(data["shares"].values()) == pytest.approx(data["step_seconds"])
    written = dict(found.rehearsal.steps[-1].lane_bytes).get("write", 0)
    assert data["disk_write_bytes"] == summary["traffic"]["disk_write_bytes"]
    writes = [e.n_bytes for e in found.rehearsal.run.events if e.lane == "write"]
    # the engine counts a step to its border, the log to its end: a write may be between
    assert abs(data["disk_write_bytes"] - written) <= max(writes, default=0)
    life = re.search(r'id="drive-life" value="([^"]+)"', page)
    assert (None if life is None else float(life[1])) == data["drive_life_steps"]
    compare_rows(data, page, terminal)


def compare_rows(data: dict[str, Any], page: str, terminal: str) -> None:
    first, *rows = data["what_if"]
    assert (first["how"], first["step_seconds"]) == ("rehearsed", data["step_seconds"])
    assert first["tokens_per_second"] == data["tokens_per_second"]
    assert first["peak_bytes"] == next(r for r in data["tiers"] if r["tier"] == "HBM")["peak_bytes"]
    for row in rows:
        assert f"{row['tokens_per_second']:,.0f}" in page
        for said in (format_seconds(row["step_seconds"]), f"{row['tokens_per_second']:,.0f}"):
            assert said in terminal


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize("seed", range(25))
def test_terminal_page_and_json_of_a_plan_show_the_same(seed: int, tmp_path: Path) -> None:
    setting = Setting.drawn(100 + seed)
    machine = random.Random(seed).choice(("laptop-4c-avx2-ddr4", "rtx4090"))
    model = setting.model()
    optimizer = setting.optimizer(model.parameters(), lr=1e-3)
    tokens = torch.zeros(setting.samples, 16, dtype=torch.long)
    given = {"profile": machine, "estimates": seed % 3 == 0, **setting.given(tmp_path)}

    found = plan(model, (tokens, tokens), optimizer=optimizer, **given)
    compare_plan(found, tmp_path)
    states = f"{format_bytes(setting.state_bytes())} of states"
    assert f"{states} train" in (tmp_path / "page.html").read_text()


def small_plan(**given: Any) -> Plan:
    tokens = torch.zeros(2, 16, dtype=torch.long)
    model = GPT(GPTConfig(width=32, layers=6, heads=4, context=16, checkpoint_blocks=False))
    settings = {"profile": "rtx4090", "hbm": 560_000, "estimates": False, **given}
    return plan(model, tokens, **settings)


def test_a_plan_keeps_every_event_however_many_there_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The log of a run keeps the last ones: of a large plan on a disk they were half of a step."""

    def short(clock: Any, capacity: int | None) -> EventLog:
        return EventLog(clock, None if capacity is None else 100)

    monkeypatch.setattr(engine_setup, "EventLog", short)
    found = small_plan(host=600_000, nvme=str(tmp_path), nvme_bytes="1GiB")

    assert found.rehearsal.run.dropped == 0 and len(found.rehearsal.run.events) > 1000
    compare_plan(found, tmp_path)


def test_rows_of_what_if_are_on_the_clock_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What costs the plan more time costs its rows more: none is a bound below the plan."""
    rows = {row.label: row for row in small_plan(estimates=True).what_if}
    same = rows["8-bit states"]  # of a model whose states are not what takes time

    assert same.step_seconds == pytest.approx(rows["as planned"].step_seconds, rel=0.01)
    assert rows["recompute every unit"].step_seconds > rows["as planned"].step_seconds
    one = rows["as planned"]

    copy_seconds = DryDevice.copy_seconds

    def slower(self: DryDevice, lane: Any, n_bytes: int, *, busy: bool = False) -> float:
        return 50 * copy_seconds(self, lane, n_bytes, busy=busy)

    monkeypatch.setattr(DryDevice, "copy_seconds", slower)
    slow = {row.label: row for row in small_plan(estimates=True).what_if}
    assert slow["as planned"].step_seconds > 2 * one.step_seconds
    late = slow["8-bit states"].step_seconds
    assert late == pytest.approx(slow["as planned"].step_seconds, rel=0.5)


def test_what_rows_lack_is_measured_by_the_budget_that_the_plan_shows() -> None:
    """A GPU's memory is not all a run's: the context of CUDA is there, too."""
    with torch.device("meta"):
        model = GPT(GPTConfig(width=4096, layers=12, heads=32, context=16))
    tokens = torch.zeros(2, 16, dtype=torch.long, device="meta")
    found = plan(model, tokens, profile="rtx4090")
    budget = next(row.budget_bytes for row in found.tiers if row.tier == "HBM")
    without = next(row for row in found.what_if if row.label == WITHOUT)

    assert budget is not None and budget < 23 * 2**30 and not without.fits
    assert f"HBM is {format_bytes(without.peak_bytes - budget)} short" in without.change
    fitting = [row.peak_bytes for row in found.what_if if row.fits]
    assert fitting and max(fitting) <= budget


def test_a_drive_lives_as_many_steps_as_the_profile_says_on_every_surface(tmp_path: Path) -> None:
    spill = {"host": 600_000, "nvme": str(tmp_path), "nvme_bytes": "1GiB"}
    found = small_plan(**spill)
    rated = found.rehearsal.run.meta.rated_write_bytes

    assert rated == 1200e12  # of the profile
    assert found.drive_life_steps == rated / found.disk_write_bytes
    found.write(tmp_path / "page.html")
    assert f'value="{found.drive_life_steps}"' in (tmp_path / "page.html").read_text()
