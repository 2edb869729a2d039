"""Moves the homes of whole buckets between HOST and HBM, in steps and before a peak (floor 2)."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager

from hetero.device import Slab
from hetero.errors import BudgetError
from hetero.events import What
from hetero.memory.layout import Bucket
from hetero.memory.manager import PARAM, ChunkManager
from hetero.plan.placement import BucketHomes
from hetero.train.activations.meter import Meter
from hetero.train.engine.backward_updates import is_seen
from hetero.train.engine.hbm_homes import movable_homes
from hetero.train.engine.passing import Passing
from hetero.train.engine.setup import Setup
from hetero.train.engine.trained import Trained
from hetero.train.gradients.homes import GRAD, WIDE
from hetero.train.model.host_work import host_work
from hetero.train.model.lazy import handle
from hetero.train.update.optimizer import Optimizer
from hetero.types import Kind, Tier


class Rehoming:
    """Knows which buckets may have their homes on HBM, and moves them there and back.

    A bucket of which the user's code holds a tensor stays where it is.
    """

    def __init__(self, setup: Setup, manager: ChunkManager, trained: Trained, meter: Meter) -> None:
        self.optimizer: Optimizer | None = None  # set once it is prepared
        self._setup = setup
        self._manager = manager
        self._grads = trained.grads
        self._stepper = trained.stepper
        self._meter = meter
        self.passing = Passing(setup, trained)
        self._places = setup.store.places
        self._is_shared = setup.blueprint.is_shared
        self._fixed = {homes.bucket: homes.n_bytes for homes in setup.budget.on_hbm}
        self._lists = [movable(setup, sums=sums) for sums in (False, True)]
        self._sizes = [{h.bucket: h.n_bytes for h in homes} for homes in self._lists]

    @property
    def homes(self) -> list[BucketHomes]:
        """The homes that may move, the most useful on HBM first: as large as gradients are now, or
        as those that the program keeps, with copies of weights that it may write unseen."""
        store = self._setup.store
        return [
            BucketHomes(b, max(n_bytes, store.hbm_bytes[b], store.bytes_of(b)))
            for b, n_bytes in self._lists[self._grads.adds_up]
        ]

    @property
    def n_bytes(self) -> int:
        """HBM that is set aside for homes, beyond what those take that cannot move, and for the
        passage of updates."""
        sizes = self._sizes[self._grads.adds_up]
        taken, fixed = self._setup.store.hbm_bytes, self._fixed
        moved = sum(max(sizes[bucket], taken[bucket]) for bucket in self.on_hbm)
        more = sum(max(0, taken[bucket] - n_bytes) for bucket, n_bytes in fixed.items())
        return moved + more + self.passing.n_bytes

    @property
    def passage_bytes(self) -> int:
        """HBM that the passage of updates should have."""
        return self.passing.wanted_bytes

    @property
    def on_hbm(self) -> frozenset[int]:
        """The buckets whose homes are on HBM and may move down."""
        return frozenset(self._places.on_hbm - self._fixed.keys())

    def sized(self, buckets: Collection[int]) -> list[BucketHomes]:
        """Return those `homes` that are of some buckets."""
        return [homes for homes in self.homes if homes.bucket in buckets]

    def stuck(self, buckets: Collection[int]) -> frozenset[int]:
        """Return those of the buckets of which the user's code holds a tensor."""
        if self._is_shared:
            return frozenset()
        if buckets and self._stepper is not None:
            self._stepper.finish()  # its updates' references to states look like a user's
        return frozenset(b for b in buckets if self._is_held(self._setup.buckets[b]))

    def _is_held(self, bucket: Bucket) -> bool:
        """Whether the user's code holds a weight at home, or a state. Of shares it has copies."""
        if self._is_shared:
            return False
        copy = self._manager.copies[bucket.id]
        if copy.is_shown or copy.home.views.held or self.optimizer is None:
            return True
        if self._manager.is_bound_at_home(bucket.id):
            return True
        return is_seen(self._setup, bucket, self.optimizer)

    def lower(self, wanted: Collection[int]) -> None:
        """Move homes down that are not ``wanted`` on HBM."""
        for bucket in self.on_hbm - set(wanted):
            self._move(self._setup.buckets[bucket], Tier.HOST)

    def raise_to(self, wanted: Collection[int]) -> None:
        """Move the ``wanted`` homes up that are not on HBM, until the device has no such memory:
        for states, too, that are yet to be made there."""
        held: list[Slab] = []
        for number in sorted(set(wanted) - self._places.on_hbm):
            bucket = self._setup.buckets[number]
            try:
                if self._move(bucket, Tier.HBM):
                    held.append(self._hold(bucket))
            except BudgetError as error:  # fragmented, or taken by another process
                self.lower(self._places.on_hbm - {number})
                self._setup.log.now(What.DECISION, tier=Tier.HBM, bucket=number, why=str(error))
                return

    def _hold(self, bucket: Bucket) -> Slab:
        """Return memory as large as what is yet to be made of a bucket's homes on HBM."""
        size = self._sizes[self._grads.adds_up][bucket.id]
        with self._meter.changing():
            return self._setup.device.arena(max(0, size - self._setup.store.hbm_bytes[bucket.id]))

    def let_pass(self, n_bytes: int) -> None:
        """Let updates of homes on HOST pass through so many bytes of HBM; 0: through none."""
        with self._meter.changing():
            try:
                self.passing.apply(n_bytes)
            except BudgetError as error:  # as above
                self._setup.log.now(What.DECISION, tier=Tier.HBM, why=str(error))

    def growing(self) -> AbstractContextManager[None]:
        """Make a home on HBM inside: it is not counted as activations."""
        return self._meter.changing()

    def give_way(self, n_bytes: int) -> None:
        """Close the passage of updates, and move homes down, the least useful first, until
        ``n_bytes`` of HBM are freed or none is left that may move."""
        with host_work():
            if n_bytes > 0:
                n_bytes -= self.passing.close()
            for homes in reversed(self.homes):
                if n_bytes <= 0:
                    return
                if homes.bucket in self._places.on_hbm:
                    moved = self._move(self._setup.buckets[homes.bucket], Tier.HOST)
                    n_bytes -= homes.n_bytes if moved else 0

    def _move(self, bucket: Bucket, tier: Tier) -> bool:
        """Move all homes of a bucket; False, and nothing done, if the user's code holds one."""
        setup = self._setup
        if self._manager.is_bound_at_home(bucket.id):  # perhaps it asks for this room itself
            return False
        if self._stepper is not None:
            self._stepper.finish()  # its updates' references to states look like a user's
        setup.saver.wait_for(bucket.id)
        if self._is_shared:  # to write, ranks would have to meet; and they need not move alike
            self._manager.finish_update(bucket.id)
            self._manager.let_write(bucket.id)
        else:
            self._manager.flush_and_wait(bucket.id)
        if self._is_held(bucket) or not self._has_room(bucket, tier):
            return False
        with self._meter.changing():
            self._move_all(bucket, tier)
        setup.log.now(What.DECISION, tier=tier, bucket=bucket.id, why=f"homes are on {tier.name}")
        return True

    def _move_all(self, bucket: Bucket, tier: Tier) -> None:
        before = self._places.tier(Kind.PARAM, bucket.id)
        names = [name for name, _ in self._setup.store.of_bucket(bucket.id)]
        moved: list[str] = []
        self._set(bucket, tier)
        try:
            for name in names:
                self._move_one(name, bucket)
                moved.append(name)
        except BaseException:  # a bucket's homes are all on one tier
            self._set(bucket, before)
            for name in moved:
                self._move_one(name, bucket)
            raise
        if tier is Tier.HBM:
            self._grads.homes.make(bucket, wide=False)  # now: no peak of the next step counts it

    def _move_one(self, name: str, bucket: Bucket) -> None:
        if name not in (GRAD, WIDE):
            self._replace(name, bucket)
        elif (name, bucket.id) in self._setup.store.homes:  # an empty one was freed
            self._grads.rehome(name, bucket)

    def _has_room(self, bucket: Bucket, tier: Tier) -> bool:
        """Whether a tier holds a bucket's homes as they are now."""
        needed = self._setup.store.bytes_of(bucket.id)
        free = self._setup.ledger.free(tier)
        if free is None and tier is Tier.HOST:
            free = self._setup.ram()
        return free is None or needed <= free

    def _set(self, bucket: Bucket, tier: Tier) -> None:
        on_hbm = self._places.on_hbm
        on_hbm.add(bucket.id) if tier is Tier.HBM else on_hbm.discard(bucket.id)

    def _replace(self, name: str, bucket: Bucket) -> None:
        """Move one home, and let the manager and the optimizer's states show the new one."""
        store = self._setup.store
        old, new = store.move(name, bucket)
        if name == PARAM:
            self._manager.rehome(bucket.id, new)
        elif self.optimizer is not None:
            for segment in bucket.segments:
                param = self._setup.params[segment.index]
                state = self.optimizer.known_state.get(param, {})
                if name in state:
                    state[name] = handle(store, new, segment)
        old.leave(new)


def movable(setup: Setup, *, sums: bool) -> list[BucketHomes]:
    """Return the homes of a prepared model that may move to HBM; none if that saves nothing."""
    device = setup.device
    if not setup.tuning.may_rise(device) or setup.inner is None or setup.budget.hbm is None:
        return []
    if setup.comm.size > 1 and not setup.store.is_gathered:  # others read them where they lie
        return []
    fixed, places = {homes.bucket for homes in setup.budget.on_hbm}, setup.store.places
    found = movable_homes(
        setup.blueprint, is_cuda=device.is_cuda, on_disk=places.on_disk, sums=sums
    )
    return [homes for homes in found if homes.bucket not in fixed]
