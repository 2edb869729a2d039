"""Rehearsals until one fits: budgets are raised, and ways are tried (floor 4)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from hetero.config import Config
from hetero.errors import BudgetError, ConfigError
from hetero.rehearse.mirror import ranks_of
from hetero.rehearse.raises import Raises
from hetero.rehearse.rehearsal import Rehearsal, Scene, rehearse
from hetero.rehearse.stand_in import device_for
from hetero.train.engine.blueprint import Blueprint
from hetero.train.engine.budget import paging_bytes
from hetero.types import Tier, format_bytes

MOST_RAISES = 24  # of budgets, until everything fits
BUDGETS = {"HBM": "hbm", "HOST": "host", "NVME": "nvme_bytes"}


@dataclass(frozen=True, slots=True)
class Shortfall:
    """A tier that is too small."""

    tier: str
    have_bytes: int | None
    needed_bytes: int
    """With so much, and as much of other tiers as their shortfalls say, it runs."""
    why: str

    @property
    def short_bytes(self) -> int:
        return self.needed_bytes - (self.have_bytes or 0)


def in_words(shortfalls: Iterable[Shortfall]) -> str:
    """Return what is too small; "" if nothing is."""
    return "; ".join(f"{row.tier} is {format_bytes(row.short_bytes)} short" for row in shortfalls)


class Fitted(NamedTuple):
    """A rehearsal that fits, its settings, and the budgets that had to be raised."""

    found: Rehearsal
    config: Config
    shortfalls: tuple[Shortfall, ...]


class Stayed(NamedTuple):
    """A rehearsal of a model that stays on its device, which has too little memory for that."""

    scene: Scene
    short: dict[str, Shortfall]
    """What lacked before."""
    hbm_bytes: int
    """What it takes there."""


def until_it_fits(scene: Scene) -> Fitted:
    """Rehearse with budgets raised until all fits.

    A model that stays on its device, and finds no room there for what units leave, is rehearsed in
    other ways, of which the fastest that fits is taken. If none fits, no budget helps but one with
    which it stays.
    """
    short: dict[str, Shortfall] = {}
    raises = Raises()
    stayed: Stayed | None = None
    others: Iterator[Scene] = iter(())
    for _ in range(MOST_RAISES):
        try:
            found = rehearse(scene)
            error = found.error
        except BudgetError as raised:
            found, error = None, raised
        if error is None and found is not None:
            if not overflows(scene, found):
                fitted = Fitted(found, scene.config, tuple(short.values()))
                lacked = {} if stayed is None else stayed.short
                return best([fitted, *as_they_are(others, tuple(lacked.values()))])
            if stayed is None:
                others = ways(scene, found.blueprint)
            stayed = Stayed(scene, dict(short), found.peaks[Tier.HBM])
        if stayed is not None and (error is None or error.tier == "HBM"):
            scene, short = next(others, stayed.scene), dict(stayed.short)
            if scene is not stayed.scene:
                continue
            error = too_small_to_stay(stayed)
        if error is None or error.tier not in BUDGETS or not error.needed_bytes:
            break
        tier, needed = raises.asked(error, budget(scene, "hbm"), budget(scene, "host"))
        field = BUDGETS[tier]
        now = budget(scene, field)
        have = short[tier].have_bytes if tier in short else now
        needed = raises.raised(tier, now or 0, needed)
        why = short[tier].why if tier != error.tier else str(error.args[0])
        short[tier] = Shortfall(tier, have, needed, why)
        scene = with_budget(scene, field, needed)
    raise ConfigError(
        f"no budgets were found that hold this model: {error}",
        advice="lower the batch, or split the largest unit with units=",
    )


def as_they_are(scenes: Iterable[Scene], lacked: tuple[Shortfall, ...]) -> Iterator[Fitted]:
    """Yield the rehearsals of those scenes that fit without a further raise."""
    for scene in scenes:
        try:
            found = rehearse(scene)
        except BudgetError:
            continue
        if found.error is None and not overflows(scene, found):
            yield Fitted(found, scene.config, lacked)


def best(fitting: Iterable[Fitted]) -> Fitted:
    """Return the first of those that lack least, and among them are fastest."""

    def lacks(fitted: Fitted) -> int:
        return sum(row.short_bytes for row in fitted.shortfalls)

    return min(fitting, key=lambda fitted: (lacks(fitted), fitted.found.step_seconds))


def ways(scene: Scene, blueprint: Blueprint) -> Iterator[Scene]:
    """Yield ways to train a model that takes too much where it stays.

    What its units leave may be computed again, all of it: "auto" keeps what finds room as it comes,
    and does not know what comes last (a loss over many words). Or its weights may be paged, under
    the largest budget that does so.
    """
    if scene.config.activations == "auto":
        yield replace(scene, config=Config.load(scene.config, activations="recompute"))
    yield with_budget(scene, "hbm", paging_bytes(blueprint))


def with_budget(scene: Scene, field: str, n_bytes: int) -> Scene:
    return replace(scene, config=Config.load(scene.config, **{field: n_bytes}))


def too_small_to_stay(stayed: Stayed) -> BudgetError:
    """Return the error of a device that is too small, both for a model that stays and for pages."""
    return BudgetError(
        f"weights and what a step leaves take {format_bytes(stayed.hbm_bytes)} of the device",
        advice="lower the batch, or take a larger device",
        tier="HBM",
        needed_bytes=stayed.hbm_bytes,
    )


def overflows(scene: Scene, found: Rehearsal) -> bool:
    """Whether a model that stays on the device leaves its activations no room there."""
    limit = device_for(scene.config, scene.profile).memory.total_bytes()
    return not found.units and limit is not None and found.peaks[Tier.HBM] > limit


def budget(scene: Scene, field: str) -> int | None:
    """Return a budget in bytes: as set, or as the machine has."""
    value: int | None = getattr(scene.config, field)
    if value is None and field == "host":
        return ram_beside(scene, scene.config.hbm)
    if value is None and field == "hbm" and scene.profile.gpu is not None:
        return int(scene.profile.gpu.hbm_bytes.value)
    return value


def ram_beside(scene: Scene, hbm: int | None) -> int:
    """Return the RAM of a rank, less ``hbm`` bytes where a device's memory is a part of it."""
    host, n_here = scene.profile.host, ranks_of(scene.config.mesh, scene.profile).n_here
    taken = hbm if hbm is not None and has_one_ram(scene) else 0
    return int((host.limit_bytes or host.ram_bytes).value) // n_here - taken


def has_one_ram(scene: Scene) -> bool:
    """Whether the device that is planned for has its memory in RAM, and a budget of it."""
    return scene.profile.has_one_ram and scene.config.device in (None, "cuda")
