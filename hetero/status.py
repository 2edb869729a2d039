"""What is where, and what the last step moved, as users are shown it (floor 4)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from torch import nn

from hetero.api import engine_of
from hetero.parallel.mesh import along_axes
from hetero.train.engine.budget import Budget
from hetero.train.engine.engine import Engine
from hetero.train.engine.hbm_homes import total_bytes
from hetero.train.engine.paged import Paged
from hetero.train.update.device_kernel import conditions
from hetero.types import Kind, Lane, Tier, format_bytes


@dataclass(frozen=True, slots=True)
class Status:
    """Where everything is, and what the last whole step moved; sizes in bytes.

    Without an optimizer every forward of the whole model is a step.
    """

    device: str
    ranks: dict[str, int]
    """Along each axis of the mesh; empty for one rank."""
    mode: str
    update_place: str
    update_kernels: dict[str, str]
    """Per kind of device, how fp32 masters are updated there: "compiled", or by torch's operations,
    with the same bits, and why."""
    chunk_bytes: int
    steps: int
    activation_bytes: int
    division: dict[str, int]
    """Of HBM since the last border, in bytes: ``buffers``, ``activations``, ``ring`` (gradients on
    their way down) and ``frames``. Empty until it is measured, and if parameters stay on HBM."""
    policies: dict[str, str]
    """Per unit, the policy of its activations: "keep", "recompute", "offload" or both."""
    tiers: dict[str, dict[str, int | None]]
    """Per tier: ``budget``, ``used``, ``peak`` and one entry per kind."""
    locked_bytes: int
    """Of HOST, page-locked; copies of other memory go through stages."""
    units: dict[str, str]
    """Per unit, "resident" or "home"."""
    h2d_bytes: int
    d2h_bytes: int
    read_bytes: int
    """From disk, in the last step."""
    write_bytes: int
    """To disk, in the last step."""
    written_bytes: int
    """To disk since prepare: it wears the drives."""
    hits: int
    misses: int
    fetches: int
    evictions: int
    schedule: str

    def __str__(self) -> str:
        return "\n".join((self._where(), *map(" ".join, self._rows()), self._moved()))

    def _repr_html_(self) -> str:
        """Return a table for notebooks."""
        cells = (
            "".join(f"<td>{escape(cell.strip())}</td>" for cell in row) for row in self._rows()
        )
        table = "".join(f"<tr>{row}</tr>" for row in cells)
        return f"<p>{escape(self._where())}</p><table>{table}</table><p>{self._moved()}</p>"

    def _where(self) -> str:
        resident = sum(where == "resident" for where in self.units.values())
        steps = f"{self.steps} step{'s' * (self.steps != 1)}"
        units = f"{resident} of {len(self.units)} units resident"
        return f"{self.device}, {self.mode}; {steps}; {units}"

    def _rows(self) -> Iterator[tuple[str, str]]:
        """Yield each tier with what it holds."""
        for tier, row in self.tiers.items():
            limit = f" of {format_bytes(row['budget'])}" if row["budget"] is not None else ""
            kinds = [(kind.value, n) for kind in Kind if (n := row[kind.value])]
            held = ", ".join(f"{name} {format_bytes(n)}" for name, n in kinds)
            said = f"{format_bytes(row['used'] or 0)}{limit}, peak {format_bytes(row['peak'] or 0)}"
            yield f"{tier:<5}", said + (f": {held}" if held else "")

    def _moved(self) -> str:
        disk = ""
        if self.written_bytes:
            read, wrote = format_bytes(self.read_bytes), format_bytes(self.write_bytes)
            disk = f"; {read} read from disk, {wrote} written"
        return (
            f"last step: {format_bytes(self.h2d_bytes)} up, {format_bytes(self.d2h_bytes)} down,"
            f" {self.hits} hits, {self.misses} misses, {self.evictions} evictions{disk}"
        )


def axes_of(engine: Engine) -> dict[str, int]:
    """Return the ranks of a model along each axis; empty for one that is alone."""
    setup = engine.setup
    return along_axes(setup.comm, max(1, len(setup.parts.ranks)), setup.everyone.size)


def update_place(engine: Engine) -> str:
    if engine.residence.updates_in_place:
        return "in place"
    if engine.setup.tuning.update_on_device:
        return "device"
    residence = engine.residence
    passed = residence.hbm.rehoming.passing.last_numel if isinstance(residence, Paged) else 0
    trained = (bucket for bucket in engine.setup.buckets if bucket.trainable)
    whole = sum(segment.spec.numel for bucket in trained for segment in bucket.segments)
    return f"home, {passed / whole:.0%} through HBM" if passed else "home"


def status(model: nn.Module) -> Status:
    """Return residency, bytes per tier and kind, traffic and misses of the last step.

    Example:
        >>> import torch, hetero
        >>> model = hetero.prepare(torch.nn.Linear(64, 64), device="cpu:sim", hbm="128KiB")
        >>> print(hetero.status(model))
        cpu:sim, paged; 0 steps; 0 of 1 units resident
        HBM   0 B of 128 KiB, peak 0 B
        HOST  20 KiB, peak 20 KiB: param 20 KiB
        last step: 0 B up, 0 B down, 0 hits, 0 misses, 0 evictions
    """
    engine = engine_of(model)
    setup, residence = engine.setup, engine.residence
    plan, stats, ledger, pool = setup.blueprint, setup.stats, setup.ledger, setup.store.pool
    tiers: dict[str, dict[str, int | None]] = {}
    for tier in (Tier.HBM, Tier.HOST, *((Tier.NVME,) if pool.spills else ())):
        row: dict[str, int | None] = {
            "budget": ledger.budgets.get(tier),
            "used": ledger.used(tier),
            "peak": ledger.peak(tier),
        }
        row.update({kind.value: ledger.used(tier, kind) for kind in Kind})
        tiers[tier.name] = row
    here, schedule, names = residence.here(), residence.schedule(), plan.layout.unit_names
    return Status(
        device=setup.device.name,
        ranks=axes_of(engine),
        mode=residence.name,
        update_place=update_place(engine),
        update_kernels=conditions(setup.device.torch_device),
        chunk_bytes=4 * plan.layout.chunk_numel,
        steps=setup.steps,
        activation_bytes=setup.budget.activation_bytes,
        division=division_of(setup.budget),
        policies={names[u]: str(p) for u, p in residence.activations.policies.items()},
        tiers=tiers,
        locked_bytes=setup.device.locked_bytes(),
        units={
            names[i]: "resident" if all(b in here for b in needs) else "home"
            for i, needs in enumerate(plan.needs)
        },
        h2d_bytes=stats.n_bytes[Lane.H2D],
        d2h_bytes=stats.n_bytes[Lane.D2H],
        read_bytes=stats.n_bytes[Lane.READ],
        write_bytes=stats.n_bytes[Lane.WRITE],
        written_bytes=pool.written_bytes,
        hits=stats.counts["hit"],
        misses=stats.counts["miss"],
        fetches=stats.counts["fetch"],
        evictions=stats.counts["evict"],
        schedule=schedule.show(names) if schedule else "",
    )


def division_of(budget: Budget) -> dict[str, int]:
    """Return the division of HBM, by use."""
    division = budget.division
    if division is None:
        return {}
    return {
        "buffers": division.buffer_bytes,
        "activations": division.activation_bytes,
        "ring": division.ring_bytes,
        "homes": division.home_bytes + total_bytes(budget.on_hbm),
        "frames": division.frames * budget.divisible.granule_bytes,
    }
