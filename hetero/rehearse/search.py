"""The best meshes of so many ranks for a decoder: closed forms choose some, which are rehearsed
(floor 4)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hetero.config import Config
from hetero.errors import ConfigError
from hetero.plan.candidates import Estimate, MeshCandidate, SearchWork, fitting
from hetero.plan.shape import KINDS, shape_of
from hetero.rehearse.meshes import MeshPlan, plan_mesh
from hetero.rehearse.models import POSITIONS
from hetero.rehearse.named import ModelConfig, config_of, machine

BEST = 10  # rows of the table
REHEARSED = 14  # candidates, of which the best are told
MOST_SECONDS = 480.0  # of rehearsals, after which no other begins


@dataclass(frozen=True, slots=True)
class FoundMesh:
    """A candidate and its plan."""

    candidate: MeshCandidate
    estimated_seconds: float
    plan: MeshPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSearch:
    """The best meshes, the fastest first; those that do not fit come last."""

    model: str
    profile: str
    n_ranks: int
    rows: tuple[FoundMesh, ...]
    n_candidates: int
    """That divide the model and the batch."""
    n_rehearsed: int

    @property
    def fits(self) -> bool:
        return bool(self.rows) and self.rows[0].plan.fits

    def as_json(self) -> dict[str, Any]:
        """Return it as plain data; of each plan without its stages."""
        rows = []
        for row in self.rows:
            plan = row.plan.as_json()
            del plan["stages"]
            rows.append({**row.candidate._asdict(), "estimated": row.estimated_seconds, **plan})
        return {**asdict(self), "rows": rows, "fits": self.fits}


def search(
    model: ModelConfig,
    n_ranks: int,
    batch: tuple[int, int] | None = None,
    *,
    seconds: float = MOST_SECONDS,
    clock: Callable[[], float] = time.monotonic,
    **settings: Any,
) -> MeshSearch:
    """Find the meshes, micro-batches and policies with which a step of ``batch`` takes least time.

    Args:
        model: the name of a published decoder, or its configuration.
        batch: (samples, positions) of a step, of all ranks together.
        seconds: after which no other candidate is rehearsed.
        settings: as for `hetero.prepare`; those that are searched are not among them.

    Raises ConfigError if no mesh divides the model and the batch.
    """
    samples, sequence = batch or (n_ranks, POSITIONS)
    searched = [name for name in ("mesh", "micro_batch", "activations") if name in settings]
    if searched:
        raise ConfigError(
            f"{', '.join(searched)}: a search finds that itself", advice="leave it out of a search"
        )
    mapping, name = config_of(model)
    shape, profile = shape_of(mapping), machine(Config.load(None, **settings))
    if shape is None:
        raise ConfigError(
            f"{name}: meshes are searched for a published decoder",
            advice=f"name one, or a configuration of {', '.join(KINDS)} that says no more than its"
            " sizes",
        )
    found = fitting(SearchWork(shape, samples, sequence, n_ranks, profile))
    if not found:
        raise ConfigError(
            f"no mesh of {n_ranks} ranks divides {name} and {samples} samples",
            advice="use a batch that has many divisors, and as many ranks as whole machines have",
        )
    rows = [*rehearsals(model, found[:REHEARSED], (samples, sequence), seconds, clock, settings)]
    rows.sort(key=lambda row: (not row.plan.fits, row.plan.step_seconds))
    return MeshSearch(
        model=name,
        profile=profile.name,
        n_ranks=n_ranks,
        rows=tuple(rows[:BEST]),
        n_candidates=len(found),
        n_rehearsed=len(rows),
    )


def rehearsals(
    model: ModelConfig,
    chosen: list[Estimate],
    batch: tuple[int, int],
    seconds: float,
    clock: Callable[[], float],
    settings: Mapping[str, Any],
) -> Iterator[FoundMesh]:
    """Yield the plan of each candidate, until time is over."""
    until = clock() + seconds
    for estimate in chosen:
        if clock() > until:
            return
        here = estimate.candidate
        plan = plan_mesh(
            model,
            (batch[0] // here.dp, batch[1]),
            mesh=here.mesh,
            micro_batch=here.micro_batch,
            activations=here.activations,
            **settings,
        )
        yield FoundMesh(here, estimate.seconds, plan)
