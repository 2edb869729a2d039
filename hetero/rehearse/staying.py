"""The bytes of a model that stays on the device, which its engine does not count (floor 4)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hetero.events import What
from hetero.train.activations.meter import LiveBytes
from hetero.train.engine.engine import Engine
from hetero.types import Kind, Tier

BACKWARD, STEP = "backward", "step"


class DryBytes:
    """Counts what is on a device without bytes, as torch's allocator counts it on CUDA.

    Args:
        most: the size of the device; None: without a limit.
    """

    def __init__(self, most: int | None) -> None:
        self.live = LiveBytes()
        self.charged: Callable[[], int] = lambda: 0
        """Returns what the engine's ledger counts there."""
        self._most = most
        self._before = 0  # the peak up to the last phase

    def fold(self) -> None:
        """Begin a phase: the peak of the last one counts on."""
        self._before = max(self._before, self.live.recent)
        self.live.recent = self.live.live

    def now_bytes(self) -> int:
        return self.charged() + self.live.live

    def peak_bytes(self) -> int:
        return self.charged() + max(self._before, self.live.recent)

    def most_bytes(self) -> int:
        return sys.maxsize if self._most is None else self._most

    def restart(self) -> None:
        self._before, self.live.recent = 0, self.live.live


class Staying:
    """Counts what operations make, and logs it phase by phase, on top of the engine's ledger.

    Gradients and states of torch's own are told from activations by their sizes, which are known;
    the bytes of all three are those that were counted.
    """

    def __init__(self, engine: Engine, counted: DryBytes) -> None:
        blueprint = engine.setup.blueprint
        trained = [b for b in blueprint.layout.buckets if blueprint.costs[b.id].grad]
        self.live, self._counted = counted.live, counted
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
        began = self._log.clock()
        self._counted.fold()
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
