"""Offloads a unit's saved tensors after its forward, and fetches them for its backward (floor 2).

[Note: ours alone]  A storage goes down once only our graphs refer to it: then no other code can
write to it, its bytes are final, and copying them needs no further order. A storage that other code
still holds (the unit's output, a tensor kept by the user) stays, and is checked again at the next
border of units.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import NamedTuple

import torch

from hetero.device import ALONE, Device, Ticket, use_count
from hetero.errors import BudgetError, StateError
from hetero.internals import NO_TASK, graph_task, in_backward
from hetero.memory.parcel import Parcel, ParcelStore
from hetero.modes import refuse_backward
from hetero.train.activations.held import GraphFootprint, Held, Kept

MIN_BYTES = 16 * 2**10  # smaller storages stay: a transfer's launch would cost more
PATIENCE = 4  # borders after which a storage held elsewhere stays for good
NOBODY = -1


class OffloadedGroup:
    """A parcel, and its storages while they are on the device."""

    __slots__ = (
        *("__weakref__", "_orphans", "claims", "number", "parcel", "storages", "ticket", "uses"),
    )

    def __init__(self, number: int, n_storages: int, orphans: deque[Orphan]) -> None:
        self.number = number
        self.parcel: Parcel | None = None
        self.storages: list[torch.Tensor | None] = [None] * n_storages
        self.claims: list[Held | None] = [None] * n_storages
        self.uses = [0] * n_storages  # references from graphs
        self.ticket: Ticket | None = None  # of a fetch not waited for yet
        self._orphans = orphans

    @property
    def is_up(self) -> bool:
        """Whether it was fetched, and not released since."""
        return any(storage is not None for storage in self.storages)

    def release(self, position: int) -> None:
        """Drop one reference. At zero the storage is freed, unless its fetch is still in flight.

        Called on any thread, at any time.
        """
        self.uses[position] -= 1
        if not self.uses[position] and self.ticket is None:
            self.storages[position] = self.claims[position] = None

    def __del__(self) -> None:
        # on any thread, at any time: the next call of `Offload` gives the memory back
        if self.parcel is not None:
            self._orphans.append(Orphan(self.parcel, self.storages, self.ticket))


class Orphan(NamedTuple):
    """The memory of a group that no graph needs any more."""

    parcel: Parcel
    storages: list[torch.Tensor | None]
    ticket: Ticket | None


class StorageRef:
    """The position of a tensor in a group."""

    __slots__ = ("_geometry", "_group", "_offload", "_position")

    def __init__(
        self, offload: Offload, group: OffloadedGroup, position: int, tensor: torch.Tensor
    ) -> None:
        self._offload = offload
        self._group = group
        self._position = position
        group.uses[position] += 1
        size, stride = tuple(tensor.shape), tuple(tensor.stride())
        self._geometry = tensor.dtype, int(tensor.storage_offset()), size, stride

    def up(self) -> torch.Tensor:
        storage = self._offload.storage(self._group, self._position)
        dtype, offset, size, stride = self._geometry
        empty = torch.empty(0, dtype=dtype, device=storage.device)
        return empty.set_(storage.untyped_storage(), offset, size, stride)

    def __del__(self) -> None:
        self._group.release(self._position)


class Candidate:
    """A storage that other code may hold, too: the tensors kept in it, and the borders passed."""

    __slots__ = ("borders", "inside", "kept")

    def __init__(self, inside: bool) -> None:
        self.borders = 0
        self.inside = inside  # whether a unit saved it
        self.kept: list[weakref.ref[Kept]] = []


class FlushCandidate(NamedTuple):
    """A storage (1-D, uint8) that goes down, and the tensors that graphs keep in it."""

    storage: torch.Tensor
    kept: list[tuple[Kept, torch.Tensor]]
    inside: bool


class Offload:
    """Sends saved tensors down, and fetches them before backward needs them.

    Apart from storages that never go down, the device holds those of two groups at most: in forward
    one on its way and one being made, in backward one in use and the next.

    Args:
        required: whether lack of room below is an error.
        min_bytes: smaller storages stay.
    """

    def __init__(
        self,
        store: ParcelStore,
        device: Device,
        *,
        required: bool,
        min_bytes: int = MIN_BYTES,
    ) -> None:
        self.store = store
        self.footprint = GraphFootprint()
        """Counts fetched storages."""
        self.active = False
        """Whether tensors saved now may go down."""
        self.inside = False
        """Whether a unit is saving them."""
        self.overlaps = True
        """Whether one unit's transfers overlap with the next one's compute; if not, the device
        holds the storages of one group at most."""
        self.required = required
        self._device = device
        self._min_bytes = min_bytes
        self._kept: dict[int, Candidate] = {}  # by storage
        self._groups: dict[int, weakref.ref[OffloadedGroup]] = {}  # by number, oldest first
        self._n_groups = 0
        self._orphans: deque[Orphan] = deque()
        self._in_use = NOBODY  # number of the group that backward has reached
        self._pass = NO_TASK  # the latest backward pass

    def wants(self, tensor: torch.Tensor, n_bytes: int) -> bool:
        """Whether a tensor being saved may go down."""
        return (
            self.active
            and n_bytes >= self._min_bytes
            and tensor.device == self._device.torch_device
            and type(tensor) in (torch.Tensor, torch.nn.Parameter)
            and not (tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor())
            and not in_backward()
        )

    def keep(self, tensor: torch.Tensor, key: int, held: Held) -> Kept:
        """Return a graph's handle on a tensor; ``key`` is its storage's."""
        self._device.in_order()
        kept = Kept(tensor.detach(), held)
        candidate = self._kept.setdefault(key, Candidate(self.inside))
        candidate.kept.append(weakref.ref(kept))
        return kept

    # -- down ------------------------------------------------------------------------------------

    def border(self) -> None:
        """Between two units of a forward: send down the storages held only by our graphs."""
        if not (self._kept or self._orphans) or in_backward():
            return
        self._device.in_order()
        self._discard_orphans()
        candidates = [found for key in list(self._kept) if (found := self._final(key)) is not None]
        if not candidates:
            return
        try:
            self._send(candidates)
        except BudgetError:
            if self.required:
                raise
            # there is no room below: the storages stay on the device
            self.footprint.stayed_bytes += sum(one.storage.nbytes for one in candidates)
        if not self.overlaps:
            self.store.transfers.finish()

    def _final(self, key: int) -> FlushCandidate | None:
        """Return a storage held only by our graphs, as a candidate, and forget it; else None."""
        candidate = self._kept[key]
        found = [(k, k.tensor) for ref in candidate.kept if (k := ref()) is not None]
        kept = [(k, tensor) for k, tensor in found if tensor is not None]
        candidate.borders += 1
        if not kept:  # another storage may get this key
            del self._kept[key]
            return None
        if use_count(kept[0][1]) > ALONE - 1 + len(kept):  # [Note: ours alone]
            if candidate.borders == PATIENCE:  # a parameter, or a tensor kept by the user
                del self._kept[key]
            return None
        del self._kept[key]
        if any(tensor._version != k.version for k, tensor in kept):
            return None  # backward, if it gets there, raises as torch does
        flat = torch.empty(0, dtype=torch.uint8, device=self._device.torch_device)
        return FlushCandidate(flat.set_(kept[0][1].untyped_storage()), kept, candidate.inside)

    def _send(self, candidates: list[FlushCandidate]) -> None:
        claims: list[Held | None] = []
        # 1. queue the copies; without room, nothing has happened
        group = OffloadedGroup(self._n_groups, len(candidates), self._orphans)
        group.parcel = self.store.flush([one.storage for one in candidates], claims)
        # 2. let graphs refer to the group; their claims end when the copies have landed
        for position, one in enumerate(candidates):
            for kept, tensor in one.kept:
                claims.append(kept.sink(StorageRef(self, group, position, tensor)))
        self._groups[group.number] = weakref.ref(group)
        self._n_groups += 1
        self.footprint.between_bytes += sum(o.storage.nbytes for o in candidates if not o.inside)

    def room_bytes(self) -> int:
        """Return the bytes that may still go down."""
        self.give_way()
        return self.store.room_bytes()

    # -- up --------------------------------------------------------------------------------------

    def awake(self) -> None:
        """A tensor is being unpacked; if a pass begins with it, fetch the latest group."""
        task = graph_task()
        if task in (NO_TASK, self._pass):
            return
        self._device.refuse_capture()
        refuse_backward()
        self._device.in_order()
        self._pass = task
        self._discard_orphans()
        self.store.transfers.finish()  # a group still on its way down would be the third
        last = next(reversed(self._groups.values()), None)
        group = None if last is None else last()
        if group is not None and self.overlaps:
            self._fetch(group)

    def storage(self, group: OffloadedGroup, position: int) -> torch.Tensor:
        """Return a group's storage on the device, and begin to fetch the next group."""
        self._device.in_order()
        if self._in_use != group.number:
            self._discard_orphans()
            self._turn_to(group)
        if group.ticket is not None:
            self.store.wait(group.ticket)
            group.ticket = None
        storage = group.storages[position]
        if storage is None:
            raise StateError(f"storage {position} of group {group.number} was let go while in use")
        return storage

    def _turn_to(self, group: OffloadedGroup) -> None:
        """Backward reaches a group: free the others, and begin to fetch the one before it."""
        before = [n for n in self._groups if n < group.number]
        following = [self._groups[n]() for n in sorted(before, reverse=True)[:2]]
        near = [found for found in following if found is not None and self.overlaps]
        for ref in self._groups.values():
            other = ref()
            if other is not None and other is not group and other not in near[:1]:
                self._free(other)
        self._in_use = NOBODY  # if a fetch fails, the next request begins anew
        self._fetch(group)
        for other in near[:1]:
            self._fetch(other)
        for other in near[1:]:
            self._announce(other)
        self._in_use = group.number

    def _fetch(self, group: OffloadedGroup) -> None:
        if group.is_up or group.parcel is None:
            return
        needed = [position for position, uses in enumerate(group.uses) if uses]
        found, group.ticket = self.store.fetch(group.parcel, needed)
        for position, flat in found.items():
            group.storages[position] = flat
            key = flat.untyped_storage()._cdata
            group.claims[position] = Held(self.footprint, key, flat.numel())

    def _announce(self, group: OffloadedGroup) -> None:
        if group.parcel is not None and not group.is_up:
            self.store.announce(group.parcel)

    def _free(self, group: OffloadedGroup) -> None:
        """Free a group's storages on the device; its parcel keeps the bytes for later passes."""
        if group.ticket is not None:
            self.store.wait(group.ticket)  # torch may reuse the memory only after its last writer
            group.ticket = None
        for position in range(len(group.uses)):
            group.storages[position] = group.claims[position] = None

    def _discard_orphans(self) -> None:
        """Free the memory of groups that no graph needs."""
        while self._orphans:
            orphan = self._orphans.popleft()
            if orphan.ticket is not None:
                self.store.wait(orphan.ticket)
            self.store.discard(orphan.parcel)
        self._groups = {n: ref for n, ref in self._groups.items() if ref() is not None}

    def give_way(self) -> None:
        """Give free memory back to HOST if homes to come need it."""
        self._discard_orphans()
        self.store.give_way()

    def shrink(self) -> None:
        """Give free memory back to HOST: nothing goes down any more."""
        self._discard_orphans()
        self.store.shrink()

    def close(self) -> None:
        """Give everything back; live graphs lose their offloaded tensors."""
        self._discard_orphans()
        self.store.close()
