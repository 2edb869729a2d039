"""The bytes of a model that stays on the device, which its engine does not count (floor 4)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hetero.events import What
from hetero.train.activations.meter import LiveBytes
from hetero.train.engine.engine import Engine
from hetero.types import Kind, Tier

BACKWARD, STEP = "backward", "step"


class Staying:
    """Counts what operations make, and logs it phase by phase, on top of the engine's ledger.

    Gradients and states of torch's own are told from activations by their sizes, which are known;
    the bytes of all three are those that were counted.
    """

    def __init__(self, engine: Engine) -> None:
        blueprint = engine.setup.blueprint
        trained = [b for b in blueprint.layout.buckets if blueprint.costs[b.id].grad]
        self.live = LiveBytes()
        self.most: dict[Kind, int] = {}
        """The most bytes of each kind."""
        self._log, self._ledger = engine.setup.log, engine.setup.ledger
        self._grads = sum(bucket.n_bytes for bucket in trained)
        self._states = sum(
            bucket.numel * blueprint.costs[bucket.id].state for bucket in blueprint.layout.buckets
        )
        self._shown = dict.fromkeys((Kind.GRAD, Kind.STATE, Kind.ACTIVATION), 0)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Log a phase's peak for as long as it lasts, and what is left after it."""
        began, self.live.recent = self._log.clock(), self.live.live
        yield
        stepped = self._log.step > 0 or phase == STEP
        self._show(began, self.live.recent, grads=phase != "forward", states=stepped)
        self._show(self._log.clock(), self.live.live, grads=phase != "forward", states=stepped)

    def _show(self, seconds: float, n_bytes: int, *, grads: bool, states: bool) -> None:
        """Log levels that add up to ``n_bytes``; what shrinks first, so that no sum is larger."""
        found: dict[Kind, int] = {}
        known = ((Kind.GRAD, self._grads * grads), (Kind.STATE, self._states * states))
        left = n_bytes
        for kind, most in known:
            found[kind] = min(left, most) if not self._ledger.used(Tier.HBM, kind) else 0
            left -= found[kind]
        found[Kind.ACTIVATION] = left
        for kind in sorted(found, key=lambda kind: found[kind] - self._shown[kind]):
            charged = self._ledger.used(Tier.HBM, kind)
            self.most[kind] = max(self.most.get(kind, 0), charged + found[kind])
            if found[kind] != self._shown[kind]:
                self._log.add(
                    *(What.LEVEL, seconds, seconds),
                    tier=Tier.HBM,
                    category=kind,
                    n_bytes=charged + found[kind],
                )
        self._shown = found
