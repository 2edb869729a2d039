"""A plan of N ranks says, to the byte, what each of them takes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from hetero import ConfigError
from hetero.api import engine_of, prepare_tuned
from hetero.config import Config
from hetero.memory.parcel import SPARE_BYTES
from hetero.plan.figures import Figure
from hetero.plan.hardware import dump, find
from hetero.plan.machine import InterNet, Net
from hetero.recipes.gpt import GPT, GPTConfig
from hetero.rehearse.rehearsal import Scene, rehearse
from hetero.testing.ranks import run_ranks
from hetero.train.engine.tuning import Tuning
from hetero.types import Kind, Tier

PROFILE = "laptop-4c-avx2-ddr4"
TOKENS = torch.zeros(2, 16, dtype=torch.long)
Peaks = dict[tuple[Tier, Kind | None], int]
TIERS = (Tier.HBM, Tier.HOST)


class WithTargets(nn.Module):
    """A GPT with its own loss."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        shape = GPTConfig(width=width, layers=6, heads=4, context=16, checkpoint_blocks=False)
        self.gpt = GPT(shape)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.gpt(tokens, tokens)
        return loss


def taken(rank: int, settings: dict[str, Any], one_sided: bool) -> Peaks:
    """Train as one of several ranks; return the peaks of the ledger."""
    torch.manual_seed(0)
    model = WithTargets()
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3)
    _, optimizer = prepare_tuned(model, plain, Config.load(**settings), Tuning(one_sided=one_sided))
    for _ in range(5):
        model(TOKENS).backward()
        optimizer.step()
        optimizer.zero_grad()
    ledger = engine_of(model).setup.ledger
    return {(tier, kind): ledger.peak(tier, kind) for tier in TIERS for kind in (None, *Kind)}


SETTINGS: dict[str, dict[str, Any]] = {
    "kept": {"hbm": 560_000, "activations": "keep"},
    "bf16": {"hbm": 560_000, "precision": "bf16"},
    "recomputed": {"hbm": 300_000, "activations": "recompute"},
    "clipped": {"hbm": 560_000, "activations": "keep", "max_grad_norm": 1.0},
}


@pytest.mark.campaign(seconds=4)
@pytest.mark.parametrize("name", list(SETTINGS))
@pytest.mark.parametrize("n_ranks", [2, 3, 4])
def test_a_rank_takes_what_was_planned(n_ranks: int, name: str) -> None:
    assert_planned(n_ranks, name, {"dp_shard": n_ranks})


@pytest.mark.campaign(seconds=3)
def test_a_rank_of_copies_takes_what_was_planned() -> None:
    assert_planned(4, "clipped", {"dp_replicate": 2, "dp_shard": 2})


@pytest.mark.campaign(seconds=3)
@pytest.mark.parametrize("name", ["clipped", "bf16"])
def test_a_rank_that_gathers_on_its_machine_takes_what_was_planned(name: str) -> None:
    assert_planned(3, name, {"dp_shard": 3}, gather_shares=True)


@pytest.mark.campaign(seconds=3)
@pytest.mark.parametrize(
    ("mesh", "sum_group"),
    [({"dp_shard": 3}, 1), ({"dp_replicate": 2, "dp_shard": 2}, 1), ({"dp_shard": 4}, 2)],
    ids=str,
)
def test_a_rank_that_gathers_from_other_machines_takes_what_was_planned(
    mesh: dict[str, int], sum_group: int, tmp_path: Path
) -> None:
    """Each of the planned machines has one device."""
    far = InterNet(bytes_per_second=Figure(1e9, "est"), devices_per_node=1)
    path = tmp_path / "cluster.toml"
    path.write_text(dump(replace(find(PROFILE), net=Net(inter=far))))

    n_ranks = math.prod(mesh.values())
    assert_planned(n_ranks, "clipped", mesh, profile=str(path), sum_group=sum_group)


def assert_planned(
    n_ranks: int, name: str, mesh: dict[str, int], profile: str = PROFILE, **own: Any
) -> None:
    base = {"device": "cpu:sim", "chunk_bytes": 1024, "mesh": mesh}
    settings = {**base, **SETTINGS[name], **own}
    found = hetero.plan(
        *(WithTargets(), TOKENS),
        **{**settings, "profile": profile, "estimates": False},
    )
    planned: Peaks = {(tier, None): found.rehearsal.peaks[tier] for tier in TIERS}
    planned.update({(t, k): found.rehearsal.kinds[t, k] for t in TIERS for k in Kind})

    for real in run_ranks(n_ranks, taken, settings, profile == PROFILE):
        assert real == planned


def test_shares_of_more_ranks_are_smaller() -> None:
    one, two, four = (planned_host(n) for n in (1, 2, 4))
    # the rest is on its way between ranks, and padding
    assert one > 1.6 * two
    assert two > 1.4 * four


def planned_host(n_ranks: int) -> int:
    found = hetero.plan(
        *(WithTargets(width=64), TOKENS),
        mesh={"dp_shard": n_ranks},
        profile=PROFILE,
        device="cpu:sim",
        hbm=2_000_000,
        chunk_bytes=1024,
    )
    assert found.what_if[1:] == () or n_ranks == 1
    return found.rehearsal.peaks[Tier.HOST]


def test_ranks_on_cuda_devices_are_planned() -> None:
    given = {"hbm": "560KB", "chunk_bytes": 1024, "profile": "h200-sxm", "activations": "keep"}
    one, two = (hetero.plan(WithTargets(), TOKENS, mesh={"dp_shard": n}, **given) for n in (1, 2))

    assert two.rehearsal.peaks[Tier.HOST] < 0.65 * one.rehearsal.peaks[Tier.HOST]
    assert two.rehearsal.locked_bytes > 0


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"mesh": "world"}, "does not say how many ranks"),
        ({"mesh": {"rows": 2}}, "an axis 'rows'"),
    ],
)
def test_what_ranks_cannot_do_is_not_planned(settings: dict[str, Any], why: str) -> None:
    given = {"profile": PROFILE, "device": "cpu:sim", "hbm": 560_000, **settings}
    with pytest.raises(ConfigError, match=why):
        hetero.plan(WithTargets(), TOKENS, **given)


def test_ranks_of_a_machine_take_a_part_of_its_ram_each_for_activations() -> None:
    machine, n_ranks = find("h200-sxm"), 8
    ram = n_ranks * (140 * 2**20 + SPARE_BYTES)
    small = replace(machine, host=replace(machine.host, ram_bytes=Figure(ram, "est")))
    shape = GPTConfig(width=64, layers=12, heads=4, context=256, checkpoint_blocks=False)
    config = Config.load(device="cuda", hbm=200 * 2**20, chunk_bytes=2**16, mesh={"dp_shard": 8})
    with torch.device("meta"):
        model = GPT(shape)
    tokens = torch.zeros(16, 256, dtype=torch.long, device="meta")
    scene = Scene(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        args=(tokens, tokens),
        kwargs={},
        loss=lambda loss: loss,
        config=config,
        profile=small,
    )

    found = rehearse(scene)

    assert found.error is None
    assert 100 * 2**20 < found.peaks[Tier.HOST] <= ram // n_ranks - SPARE_BYTES
