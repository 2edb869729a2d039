"""Moves the homes of whole buckets between HBM and below, in steps and before a peak (floor 2).

RAM that they leave for HBM holds homes that are on disk, until they come down again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from contextlib import AbstractContextManager

from hetero.device import Slab
from hetero.errors import BudgetError, StorageError
from hetero.events import What
from hetero.memory.homestore import Move, kept_bytes
from hetero.memory.layout import Bucket
from hetero.memory.manager import PARAM, ChunkManager
from hetero.plan.placement import PRIORITY, BucketHomes, lift
from hetero.train.activations.meter import Meter
from hetero.train.engine.backward_updates import is_seen
from hetero.train.engine.hbm_homes import movable_homes
from hetero.train.engine.passing import Passing
from hetero.train.engine.setup import Setup
from hetero.train.engine.spill import parts_of
from hetero.train.engine.trained import Trained
from hetero.train.gradients.homes import GRAD, WIDE
from hetero.train.model.host_work import host_work
from hetero.train.model.lazy import handle
from hetero.train.update.optimizer import Optimizer
from hetero.types import Kind, Tier

Part = tuple[Kind, int]
"""The homes of one kind of one bucket."""


class Rehoming:
    """Knows which buckets may have their homes on HBM, and moves them there and back.

    A bucket of which the user's code holds a tensor stays where it is, unless homes are shown by
    copies on every tier, as those of a model with some on disk are.
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
        self._n_calm = 0  # steps in a row without gradients that add up
        self._patience = 0  # how many of them there have to be before RAM for sums is used
        self._fixed = {homes.bucket: homes.n_bytes for homes in setup.budget.on_hbm}
        self._lists = [movable(setup, sums=sums) for sums in (False, True)]
        self._sizes = [{h.bucket: h.n_bytes for h in homes} for homes in self._lists]
        every = [parts_of(setup.blueprint, sums=sums) for sums in (False, True)]
        self._parts = [[p for p in parts if p.bucket not in self._fixed] for parts in every]

    @property
    def homes(self) -> list[BucketHomes]:
        """The homes that may move, the most useful on HBM first: as large as gradients are now, or
        as those that the program keeps, with copies of weights that it may write unseen."""
        store, buckets = self._setup.store, self._setup.buckets
        return [
            BucketHomes(b, max(n_bytes, store.hbm_bytes[b], store.bytes_of(buckets[b])))
            for b, n_bytes in self._lists[self._grads.adds_up]
        ]

    @property
    def n_bytes(self) -> int:
        """HBM that is set aside for homes, beyond what those take that cannot move, and for the
        passage of updates."""
        sizes, taken = self._sizes[self._grads.adds_up], self._setup.store.hbm_bytes
        moved = sum(max(sizes[bucket], taken[bucket]) for bucket in self.on_hbm)
        return moved + self.passing.n_bytes

    @property
    def grown_bytes(self) -> int:
        """HBM that homes which cannot move take beyond what `prepare` set aside for them: sums of
        gradients, and copies of weights."""
        taken = self._setup.store.hbm_bytes
        return sum(max(0, taken[bucket] - n_bytes) for bucket, n_bytes in self._fixed.items())

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
        """Whether the user's code holds memory of a weight's home, or of a state's. Of shares it
        has copies."""
        if self._is_shared:
            return False
        copy = self._manager.copies[bucket.id]
        if copy.home.views.held or self.optimizer is None:
            return True
        if self._manager.is_bound_at_home(bucket.id):
            return True
        if self._places.on_disk:
            return False
        return copy.is_shown or is_seen(self._setup, bucket, self.optimizer)

    def come_down(self) -> None:
        """Move all homes to where they lie if there is nothing on HBM, as far as they may."""
        self.lower(())
        self._sink(())

    def lower(self, wanted: Collection[int]) -> None:
        """Move homes down that are not ``wanted`` on HBM."""
        for bucket in self.on_hbm - set(wanted):
            self._lower(self._setup.buckets[bucket])

    def _lower(self, bucket: Bucket) -> bool:
        """Move a bucket's homes down, once homes that lie in their RAM are on disk again; False if
        the user's code holds one."""
        self._sink(self._to_lift(self.on_hbm - {bucket.id}, sums=self._has_sums))
        return self._move(bucket, Tier.HOST, on_hbm=self._places.on_hbm - {bucket.id})

    def raise_to(self, wanted: Collection[int]) -> None:
        """Move the ``wanted`` homes up that are not on HBM, until the device has no such memory:
        for states, too, that are yet to be made there. RAM that they leave holds homes from disk.
        """
        self._n_calm = 0 if self._has_sums else self._n_calm + 1
        try:
            self._raise(wanted)
            lifted = self._to_lift(self.on_hbm, sums=self._n_calm <= self._patience)
            self._sink(lifted)
            self._lift(lifted)
        except StorageError as error:  # who needs these bytes is told
            self._setup.log.now(What.DECISION, tier=Tier.NVME, why=str(error))

    def _raise(self, wanted: Collection[int]) -> None:
        places = self._places
        held: list[Slab] = []
        for number in sorted(set(wanted) - places.on_hbm):
            bucket = self._setup.buckets[number]
            lifted = {part for part in places.lifted if part[1] != number}
            try:
                if self._move(bucket, Tier.HBM, on_hbm=places.on_hbm | {number}, lifted=lifted):
                    held.append(self._hold(bucket))
            except BudgetError as error:  # fragmented, or taken by another process
                self.lower(places.on_hbm - {number})
                self._setup.log.now(What.DECISION, tier=Tier.HBM, bucket=number, why=str(error))
                return

    def make_way(self) -> None:
        """Gradients in RAM become fp32: homes that lie there in the meantime go back to disk, for
        longer each time."""
        lifted = self._to_lift(self.on_hbm, sums=True)
        if self._places.lifted - lifted:
            if self._n_calm:  # the first gradient of a step that does
                self._n_calm, self._patience = 0, 2 * self._patience + 1
            with host_work():
                self._sink(lifted)

    @property
    def _has_sums(self) -> bool:
        """Whether gradients add up, or have done so and their homes are kept."""
        return self._grads.adds_up or any(name == WIDE for name, _ in self._setup.store.homes)

    def disk_bytes(self) -> int:
        """Return the bytes of homes on disk if none were on HBM."""
        sums = self._has_sums
        left = self._places.on_disk - self._to_lift((), sums=sums)
        return sum(p.n_bytes for p in self._parts[sums] if (p.kind, p.bucket) in left)

    def _to_lift(self, on_hbm: Collection[int], *, sums: bool) -> frozenset[Part]:
        """Return the homes on disk for which there is RAM while these buckets' homes are on HBM.

        RAM for all homes without a place on disk was set aside, with gradients that add up; there
        is as much as they take less now. ``sums``: whether gradients add up.
        """
        on_disk = self._places.on_disk
        if not on_disk or self._setup.comm.size > 1:
            return frozenset()
        below = [part for part in self._parts[sums] if part.bucket not in on_hbm]
        there = [part for part in below if (part.kind, part.bucket) in on_disk]
        set_aside, taken = (
            sum(part.n_bytes for part in parts if (part.kind, part.bucket) not in on_disk)
            for parts in (self._parts[True], below)
        )
        return lift(there, set_aside - taken)

    def _sink(self, wanted: Collection[Part]) -> None:
        """Move homes in RAM back to disk that are not ``wanted`` there."""
        for part in sorted(self._places.lifted - set(wanted), key=by_use, reverse=True):
            kind, bucket = part[0], self._setup.buckets[part[1]]
            self._move(bucket, Tier.NVME, lifted=self._places.lifted - {part}, kind=kind)

    def _lift(self, wanted: Collection[Part]) -> None:
        """Move those of the ``wanted`` homes to RAM that are on disk."""
        for part in sorted(set(wanted) - self._places.lifted, key=by_use):
            kind, bucket = part[0], self._setup.buckets[part[1]]
            self._move(bucket, Tier.HOST, lifted=self._places.lifted | {part}, kind=kind)

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
                    moved = self._lower(self._setup.buckets[homes.bucket])
                    n_bytes -= homes.n_bytes if moved else 0

    def _move(
        self,
        bucket: Bucket,
        tier: Tier,
        *,
        on_hbm: set[int] | None = None,
        lifted: set[Part] | None = None,
        kind: Kind | None = None,
    ) -> bool:
        """Move a bucket's homes to where they lie with other places; False, and nothing done, if
        the user's code holds one, or there is no room.

        Args:
            tier: where they go, but for those with a place on disk.
            on_hbm, lifted: the places; None: as they are.
            kind: of those that move, between disk and RAM; None: all.
        """
        setup, has_weights = self._setup, kind is None or kind is Kind.PARAM
        if has_weights and self._manager.is_bound_at_home(bucket.id):
            return False  # perhaps it asks for this room itself
        if self._stepper is not None:
            self._stepper.finish()  # its updates' references to states look like a user's
        setup.saver.wait_for(bucket.id)
        if has_weights and not self._is_free(bucket):
            return False
        before = self._places.on_hbm, self._places.lifted
        self._set(on_hbm, lifted)
        if not self._has_room(bucket):
            self._set(*before)
            return False
        with self._meter.changing():
            try:
                self._move_all(bucket)
            except BaseException:  # none of them has moved
                self._set(*before)
                raise
            if tier is Tier.HBM:  # now: no peak of the next step counts it
                self._grads.homes.make(bucket, wide=False)
        setup.log.now(What.DECISION, tier=tier, bucket=bucket.id, why=f"homes are on {tier.name}")
        return True

    def _set(self, on_hbm: set[int] | None, lifted: set[Part] | None) -> None:
        places = self._places
        places.on_hbm = places.on_hbm if on_hbm is None else on_hbm
        places.lifted = places.lifted if lifted is None else lifted

    def _is_free(self, bucket: Bucket) -> bool:
        """Whether the user's code holds none of a bucket's homes, to which what was written to its
        weights is brought."""
        if self._is_shared:  # to write, ranks would have to meet; and they need not move alike
            self._manager.finish_update(bucket.id)
            self._manager.let_write(bucket.id)
        else:
            self._manager.flush_and_wait(bucket.id)
        return not self._is_held(bucket)

    def _move_all(self, bucket: Bucket) -> None:
        """Move a bucket's homes to where places say, or none of them: all are copied before the
        first copy is used. Homes of gradients that have none are dropped."""
        store, empty = self._setup.store, list[str]()
        moves: list[Move] = []
        try:
            for name in store.misplaced(bucket):
                if name in (GRAD, WIDE) and not self._grads.land(name, bucket):
                    empty.append(name)
                else:
                    moves.append(store.copy(name, bucket))
        except BaseException:
            for move in moves:
                store.forget(move)
            raise
        for name in empty:
            store.drop(name, bucket.id)
        for move in moves:
            store.switch(move)
            self._show(move, bucket)
            move.old.leave(move.new)

    def _has_room(self, bucket: Bucket) -> bool:
        """Whether HBM and HOST hold those of a bucket's homes that are to move there, as they are
        now; and HOST the gradients that are to come, which no step could do without."""
        setup = self._setup
        needed = Counter[Tier]()
        for name, tier in setup.store.misplaced(bucket).items():
            needed[tier] += kept_bytes(setup.store.homes[name, bucket.id], bucket)
        if needed[Tier.HOST]:
            needed[Tier.HOST] += self._gradients_to_come()
        free = {tier: setup.ledger.free(tier) for tier in (Tier.HBM, Tier.HOST)}
        if free[Tier.HOST] is None:
            free[Tier.HOST] = setup.ram()
        return all(room is None or needed[tier] <= room for tier, room in free.items())

    def _gradients_to_come(self) -> int:
        """Return the bytes of RAM that gradients will take beyond those they have, in fp32 if they
        add up."""
        gradients = [p for p in self._parts[self._grads.adds_up] if p.kind is Kind.GRAD]
        here = {
            part.bucket: part.n_bytes
            for part in gradients
            if part.bucket not in self._places.on_hbm
            and (part.kind, part.bucket) not in self._places.on_disk
        }
        return sum(max(0, n - self._gradient_bytes(bucket)) for bucket, n in here.items())

    def _gradient_bytes(self, number: int) -> int:
        """Return the bytes that a bucket's gradients have now."""
        homes, bucket = self._setup.store.homes, self._setup.buckets[number]
        there = (homes.get((name, number)) for name in (GRAD, WIDE))
        return sum(kept_bytes(home, bucket) for home in there if home is not None)

    def _show(self, move: Move, bucket: Bucket) -> None:
        """Let those who know a home that has moved know the new one."""
        name, _ = move.key
        if name in (GRAD, WIDE):
            self._grads.rehome(move, bucket)
        elif name == PARAM:
            self._manager.rehome(bucket.id, move.new)
        elif self.optimizer is not None:
            for segment in bucket.segments:
                param = self._setup.params[segment.index]
                state = self.optimizer.known_state.get(param, {})
                if name in state:
                    state[name] = handle(self._setup.store, move.new, segment)


def by_use(part: Part) -> tuple[int, int]:
    """Return the place of homes in the order in which RAM is given to them."""
    return PRIORITY.index(part[0]), part[1]


def movable(setup: Setup, *, sums: bool) -> list[BucketHomes]:
    """Return the homes of a prepared model that may move to HBM; none if that saves nothing."""
    device = setup.device
    if not setup.tuning.may_rise(device) or setup.inner is None or setup.budget.hbm is None:
        return []
    if setup.comm.size > 1 and not setup.store.is_gathered:  # others read them where they lie
        return []
    fixed, places = {homes.bucket for homes in setup.budget.on_hbm}, setup.store.places
    on_disk = places.on_disk if setup.comm.size > 1 else ()
    found = movable_homes(setup.blueprint, is_cuda=device.is_cuda, on_disk=on_disk, sums=sums)
    return [homes for homes in found if homes.bucket not in fixed]
