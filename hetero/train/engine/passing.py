"""Whether updates of homes on HOST pass through HBM, and how many (floor 2).

[Note: tried before it is kept]  A plan knows how fast HOST updates and how fast the link copies,
but not how far both slow each other down: they share RAM. So where a passage should be worth it, it
is opened, and kept if updates were faster with it than without.
"""

from __future__ import annotations

from enum import Enum

from hetero.errors import StateError
from hetero.events import What
from hetero.memory.homestore import TRAVEL
from hetero.memory.layout import Bucket
from hetero.train.engine.hbm_homes import bytes_of
from hetero.train.engine.setup import Setup
from hetero.train.engine.trained import Trained
from hetero.train.update.passage import passage_bytes, slot_numel
from hetero.types import Tier

WORTH = 0.97  # of a step's time without it, as expected
KEPT = 0.95  # of the updates' time without it, as measured: weights wait for what is carried
LEAST_SHARE = 1 / 50  # of updates; less is not worth page-locking
HBM_SHARE = 64  # of it, at most, for slots
ASKED = 4  # in place of that, in tests
PATIENCE = 4  # steps that find it open until slices have passed


class Trust(Enum):
    """What is known of a passage."""

    UNTRIED = "untried"
    TRIED = "tried"
    KEPT = "kept"
    DROPPED = "dropped"


LEGAL = {
    (Trust.UNTRIED, Trust.TRIED),
    (Trust.TRIED, Trust.KEPT),
    (Trust.TRIED, Trust.DROPPED),
}


class Passing:
    """Opens and closes the passage of updates as HBM is divided."""

    def __init__(self, setup: Setup, trained: Trained) -> None:
        self.trust = Trust.UNTRIED
        self._setup = setup
        self._passage = trained.passage
        self._passage.is_only_way = setup.worker.n_carriers == 0
        self._stepper = trained.stepper
        self._share = setup.tuning.passing or 0.0
        self.last_numel = 0
        """Parameters whose last update passed."""
        self._passed_numel = 0  # since the beginning, as the step began
        self._times_open = 0  # in a row of steps, while it is tried
        self._buckets = passing_buckets(setup)
        sizes = [-(-bytes_of(setup.blueprint, b, sums=True) // b.numel) for b in self._buckets]
        self._element_bytes = max(sizes, default=1)
        room = (setup.budget.hbm or 0) // (HBM_SHARE if setup.tuning.passing is None else ASKED)
        self._numel = slot_numel(room, self._element_bytes) if self._buckets else 0

    @property
    def may_be_chosen(self) -> bool:
        """Whether a plan may have one: nothing was said, and it was not found to be in vain."""
        said = self._setup.tuning.passing is not None
        return bool(self._numel) and not said and self.trust is not Trust.DROPPED

    @property
    def is_trying(self) -> bool:
        """Whether it is to be seen yet if it is worth it."""
        return self.may_be_chosen and bool(self._share) and self.trust is not Trust.KEPT

    @property
    def wanted_bytes(self) -> int:
        """HBM that it should have."""
        if not self._share or not self._numel:
            return 0
        return passage_bytes(self._numel, self._element_bytes)

    @property
    def n_bytes(self) -> int:
        """HBM that it has."""
        return self._passage.n_bytes

    def choose(self, share: float, gain: float) -> None:
        """Take a share of updates with which a step should take ``gain`` of its time."""
        if self.may_be_chosen:
            worth = share >= LEAST_SHARE and gain < WORTH
            self._share = share if worth else 0.0

    def judge(self) -> None:
        """Keep it, or drop it, by what updates took while it was open."""
        pace = None if self._stepper is None else self._stepper.pace
        if self.trust is not Trust.TRIED or pace is None:
            return
        alone = pace.seconds_per_numel
        if pace.passing is not None and alone is not None:
            if pace.passing < KEPT * alone:
                self._move(Trust.KEPT)
            else:
                self._drop()
            self._note(
                f"updates take {pace.passing / alone:.2f} of the time if some pass through HBM"
            )
        elif self._times_open > PATIENCE:
            self._drop()
            self._note("no update could pass through HBM")

    def _drop(self) -> None:
        self._move(Trust.DROPPED)
        self._share = 0.0
        self.close()
        self._unlock()

    def apply(self, n_bytes: int) -> None:
        """Open it if a division of HBM has ``n_bytes`` for it, else close it."""
        if not n_bytes:
            self.close()
            return
        self._passage.open(self._numel, self._element_bytes, self._share)
        self._lock()
        if self.may_be_chosen and self.trust is Trust.UNTRIED:
            self._move(Trust.TRIED)
            self._times_open = 0
        self._times_open += 1

    def count(self) -> None:
        """A step begins: note what passed since the last one."""
        before, self._passed_numel = self._passed_numel, self._passage.passed_numel
        self.last_numel = self._passed_numel - before

    def close(self) -> int:
        """Close it; returns the bytes of HBM that this freed."""
        n_bytes = self._passage.n_bytes
        self._passage.close()
        return n_bytes

    def _lock(self) -> None:
        """Page-lock homes that do not travel otherwise. They stay so if slots give way for a while:
        to lock them takes seconds."""
        for bucket in self._buckets:
            for name, home in self._setup.store.of_bucket(bucket.id):
                if name not in TRAVEL and not home.on_device:
                    home.lock(self._setup.device)

    def _unlock(self) -> None:
        for bucket in self._buckets:
            for name, home in self._setup.store.of_bucket(bucket.id):
                if name not in TRAVEL and not home.on_device:
                    home.unlock()

    def _move(self, trust: Trust) -> None:
        if (self.trust, trust) not in LEGAL:
            raise StateError(f"a passage that was {self.trust.value} became {trust.value}")
        self.trust = trust

    def _note(self, why: str) -> None:
        self._setup.log.now(What.DECISION, tier=Tier.HBM, why=why)


def passing_buckets(setup: Setup) -> list[Bucket]:
    """Return the buckets whose updates may pass: by formulas, of homes that this rank alone keeps,
    none on disk. Where HBM is RAM none gains by it: a copy reads and writes what the CPU's update
    waits for."""
    device, budget = setup.device, setup.budget
    apart = not (device.same_ram or (device.is_cuda and device.shares_ram))
    alone = setup.comm.size == 1 and apart and not budget.spills
    asked = device.is_cuda if setup.tuning.passing is None else setup.tuning.passing > 0
    if not (alone and asked) or setup.inner is None or budget.hbm is None:
        return []
    plan = setup.blueprint
    return [b for b in setup.buckets if b.trainable and plan.may_update_anywhere(b)]
