"""What goes to disk in a rehearsal is what goes to disk in the run, to the byte."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import hetero
from hetero.api import engine_of
from hetero.rehearse.plan import Plan
from hetero.types import Kind, Lane, Tier
from tests.rehearse.test_identity import TOKENS, WithTargets
from tests.rehearse.test_never_short import PROFILE, loss_of

STEPS = 5
SHAPE = {"width": 64, "layers": 6}
SETTINGS = {"device": "cpu:sim", "hbm": 700_000, "chunk_bytes": 4096}


@dataclass(frozen=True)
class Seen:
    """Peaks of HOST and NVME by kind, and the traffic of the last step."""

    peaks: dict[tuple[Tier, Kind | None], int]
    read_bytes: int
    write_bytes: int


def host_bytes(share: float) -> int:
    return int(share * 16 * sum(p.numel() for p in WithTargets(**SHAPE).parameters()))


def planned(host: int, activations: str) -> Plan:
    return hetero.plan(
        WithTargets(**SHAPE),
        TOKENS,
        loss=loss_of,
        estimates=False,
        profile=PROFILE,
        **SETTINGS,
        host=host,
        nvme=Path.cwd(),
        activations=activations,
    )


def rehearsed(plan: Plan) -> Seen:
    found = plan.rehearsal
    lanes = dict(found.steps[-1].lane_bytes)
    whole = {(tier, None): found.peaks[tier] for tier in (Tier.HOST, Tier.NVME)}
    kinds = {key: n for key, n in found.kinds.items() if key[0] in (Tier.HOST, Tier.NVME)}
    return Seen({**whole, **kinds}, lanes["read"], lanes["write"])


def trained(host: int, activations: str, disk: Path) -> Seen:
    torch.manual_seed(0)
    model: Any = WithTargets(**SHAPE)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    model, optimizer = hetero.prepare(
        model, optimizer, **SETTINGS, host=host, nvme=disk, activations=activations
    )
    for _ in range(STEPS):
        model(TOKENS).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine = engine_of(model)
    engine.finish()
    peaks = {
        (tier, kind): engine.setup.ledger.peak(tier, kind)
        for tier in (Tier.HOST, Tier.NVME)
        for kind in (None, *Kind)
    }
    moved = engine.setup.stats.n_bytes
    hetero.release(model)
    return Seen(peaks, moved[Lane.READ], moved[Lane.WRITE])


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize(("share", "activations"), [(0.2, "keep"), (0.3, "offload"), (0.5, "keep")])
def test_ram_and_disk_hold_what_was_rehearsed(share: float, activations: str, disk: Path) -> None:
    host = host_bytes(share)
    plan = planned(host, activations)
    assert plan.fits

    there, here = rehearsed(plan), trained(host, activations, disk)

    assert there.peaks == here.peaks
    assert here.peaks[Tier.NVME, None] > 0
    # Which pages are in memory as a step begins, and as it ends, is the threads' timing: what is
    # read and written differs by what the pool holds at both, and by the odd page that made way
    # before its use and was read again (one of 890 once, on a busy machine).
    near = 2 * here.peaks[Tier.HOST, Kind.POOL] + here.read_bytes // 50
    assert abs(there.read_bytes - here.read_bytes) <= near < here.read_bytes
    assert abs(there.write_bytes - here.write_bytes) <= near < here.write_bytes
