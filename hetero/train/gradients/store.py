"""Gradients: flushed to HOST as they are produced, and still readable in torch (floor 2).

An accumulated gradient is flushed at the *next* hetero event, so the user's hooks that run after
ours still see ``p.grad``. Afterwards it is a `LazyGrad`: a tensor subclass whose bytes are fetched,
one tensor at a time, when an operation uses it. ``p.grad`` itself is the only truth: None means no
gradient, as in torch.

A first gradient goes down in its own dtype. The worker adds later ones on HOST, in the order in
which autograd fired, and in fp32 if the parameter has an fp32 master: its bucket's gradients are
*wide* then. Norms are torch's, of whole tensors, and taken on the device: a single gradient's as it
leaves, a sum's when it is asked for (by a job after each addition, if the device is the CPU), so
that none depends on the tier. The factors of a clip and of loss scaling pend until the update
applies them; a reader before that sees them applied.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import nn

from hetero.cores import Cores
from hetero.device import ALONE, Device, Ticket, use_count
from hetero.errors import StateError
from hetero.jobs import Job, Worker
from hetero.memory.home import Home
from hetero.memory.homestore import HomeStore, Move
from hetero.memory.layout import Bucket, Layout, Segment, row
from hetero.train.gradients.early_reads import EarlyReads
from hetero.train.gradients.homes import GRAD, GradHomes, Growing, shaped, standing
from hetero.train.gradients.references import References, storage_of
from hetero.train.gradients.refusals import assert_dense, scaled_graph, shared_graph
from hetero.train.gradients.ring import GradRing
from hetero.train.gradients.slot import (
    NONE,
    Factors,
    GradNorm,
    GradSlot,
    GradState,
    LazyGrad,
    NormWay,
    whole_norm,
)
from hetero.train.gradients.sums import GradSums
from hetero.train.model.binding import set_grad
from hetero.train.model.host_work import host_work
from hetero.train.model.parts import Parts, PlainTensors
from hetero.types import noop


class LossScaling(NamedTuple):
    """How the losses of backward passes are scaled."""

    unscale: float = 1.0
    """1 / loss scale of the running pass."""
    is_required: bool = False
    """Whether every pass has to be scaled (precision="fp16")."""
    is_under_way: bool = False
    """Whether a pass with a scaled loss is running."""


class GradStore:
    """Takes gradients to their HOST homes; `pending` ones leave at the next event."""

    leases = True
    """Whether a gradient that the user's code holds stays where it is until the step."""
    takes_graphs = True
    """Whether a gradient may have a graph (create_graph)."""
    check_exchanged: Callable[[], None] = staticmethod(noop)
    """Raises StateError if this rank alone has a part of a gradient that a step would use."""
    share_norms: Callable[[NormWay], None] = staticmethod(noop)
    """Takes norms together with other ranks, if that saves work."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        layout: Layout,
        *,
        device: Device,
        ring: GradRing,
        store: HomeStore,
        worker: Worker,
        cores: Cores,
        early: bool = False,
        growing: Growing = standing,
        before_sums: Callable[[], None] = noop,
        parts: Parts | None = None,
    ) -> None:
        self.ring = ring
        self.homes = GradHomes(store, layout, device, growing, before_sums)
        self.early = EarlyReads(enabled=early)
        self.place = device.torch_device
        self.norm_way: NormWay | None = None
        self._sums_on_host = not device.is_cuda  # are their norms taken there, by jobs
        self.scaling = LossScaling()
        self.params = params
        self.parts = parts or PlainTensors()
        self._cut: set[int] = set()  # gradients of which every rank had the whole
        self._layout = layout
        self._index = {id(p): i for i, p in enumerate(params)}
        self._sums = GradSums(self.homes, ring, worker, cores)
        self.jobs = self._sums.jobs
        self._references = References()
        self._pending: dict[int, None] = {}
        self._leased: set[int] = set()  # gradients held by the user's code
        self._slots: dict[int, weakref.ref[GradSlot]] = {}
        self._updates: dict[int, Job] = {}  # bucket -> the update that still reads its gradients
        self._has_added = False  # whether gradients were added since the last step

    @property
    def adds_up(self) -> bool:
        """Whether gradients were added in this step, or in the last one."""
        return self._has_added or self.homes.expects_sums

    @property
    def awaits_sums(self) -> bool:
        """Whether gradients add up, or one is at home that the next pass adds to."""
        return self.adds_up or any(slot() is not None for slot in self._slots.values())

    # -- on their way down -----------------------------------------------------------------------

    def arriving(self, index: int) -> None:
        """Before autograd accumulates: flush a pending gradient, to avoid a 2-byte sum.

        A parameter fires twice before an event of ours in a pass inside a pass (a reentrant
        checkpoint), or after a failed pass.
        """
        if index in self._pending:
            self.flush_pending()

    def arrived(self, param: nn.Parameter) -> None:
        """Post-accumulate hook: note the gradient; it is flushed at the next event."""
        if self.scaling.is_required and not self.scaling.is_under_way:
            raise StateError(
                "precision='fp16', and this backward pass began without loss scaling",
                advice="call hetero.backward(loss) in place of loss.backward(); it finds the model"
                " through the loss's graph, which must not hide all of it in reentrant checkpoints",
            )
        self.ring.in_order()
        index = self._index[id(param)]
        if self.parts.kinds:
            self._fit(index, param)
        self.early.arrive(*self._layout.home[index])
        self._pending[index] = None

    def assigned(self, param: nn.Parameter, *, adds: bool) -> None:
        """Note a gradient that code has set: it is flushed as one that arrived.

        Under loss scaling, and if there is a master, it stays until the step: sums that code makes
        on the device are in the gradient's own dtype, wherever the weights are.

        ``adds``: torch's own code has set it in autograd's place.
        """
        index = self._index[id(param)]
        grad, bucket = self.parts.grad(param), self._layout.buckets[self._layout.home[index][0]]
        plain = grad is not None and not isinstance(grad, LazyGrad)
        if plain and bucket.trainable and not bucket.has_master and not self.scaling.is_required:
            self._pending[index] = None

    def flush_pending(self) -> None:
        """Start to flush every gradient that has arrived."""
        if self._pending:
            self.ring.in_order()
            pending, self._pending = self._pending, {}
            indices = list(dict.fromkeys((*pending, *self._leased)))
            self._leased.clear()
            # Siblings made in one piece (halves of a concatenation) share a storage.
            storages = [storage_of(grad) for grad in self._plain_grads(indices)]
            siblings = Counter(storages)
            held = [
                storage is not None
                and self._references.is_held(self.params[index], storage, siblings[storage])
                for index, storage in zip(indices, storages, strict=True)
            ]
            with host_work():  # allocations here are on HOST
                made = self.ring.mark()  # all of them are there by now
                for index, is_held in zip(indices, held, strict=True):
                    self._flush(index, held=is_held, made=made)
        with host_work():  # a copy that has landed may be added here and now
            self.ring.poll()

    def pass_ended(self) -> None:
        """A backward pass is over, and its gradients were flushed."""

    def pass_failed(self) -> None:
        """A backward pass has raised; what it came to is as torch left it."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Keep gradients of passes inside from other ranks, of which there are none."""
        return nullcontext()

    def _plain_grads(self, indices: Sequence[int]) -> list[torch.Tensor | None]:
        grads = self._grads(indices)
        return [None if isinstance(grad, LazyGrad) else grad for grad in grads]

    def _fit(self, index: int, param: nn.Parameter) -> None:
        """Cut a gradient to the parameter's own part, if every rank has the whole of it."""
        if not isinstance(self.parts.grad(param), LazyGrad):  # else it was, and has grown
            self._cut.discard(index)
            if self.parts.fit(param, self._layout.home[index][1].spec.name):
                self._cut.add(index)

    def was_cut(self, param: nn.Parameter) -> bool:
        """Whether every rank had the whole of a gradient, of which its part is left."""
        return self._index[id(param)] in self._cut

    def is_placed(self, param: nn.Parameter) -> bool:
        """Whether autograd gave a parameter its gradient as ranks divide the parameter."""
        return not self.was_cut(param) and self.parts.is_placed(param)

    def _grads(self, indices: Sequence[int]) -> list[torch.Tensor | None]:
        return [self.parts.grad(self.params[index]) for index in indices]

    def _flush(
        self, index: int, *, held: bool, scaled: bool = True, made: Ticket | None = None
    ) -> None:
        """Take one gradient home and leave a LazyGrad in its place; None and flushed ones stay.

        ``made``: marked after the compute that made it.
        """
        param = self.params[index]
        grad = self.parts.grad(param)
        if grad is None:
            return
        if isinstance(grad, LazyGrad):
            value = grad.slot.value
            del grad  # or it counts
            if value is None or use_count(value) > ALONE:
                return
            if self._references.is_shown(param, self.parts):
                return  # what the user's code writes to it has to count
            grad, scaled, made = value, False, None
        elif grad.requires_grad or grad.layout is not torch.strided:
            if self.scaling.is_required and grad.requires_grad:
                raise scaled_graph(self._layout.home[index][1].spec.name)
            if not self.takes_graphs:
                raise shared_graph(self._layout.home[index][1].spec.name)
            return  # the step takes a copy
        elif held and self.leases and not self.scaling.is_required:
            self._leased.add(index)
            return  # [Note: gradient leases]
        elif held:  # the user keeps these numbers, and a copy goes home
            grad, made = grad.clone(), None
        self._send(index, grad, scaled=scaled, made=made)

    def _send(self, index: int, grad: torch.Tensor, *, scaled: bool, made: Ticket | None) -> None:
        """Send autograd's gradient home."""
        self._show(index, self._take(index, grad, scaled=scaled, made=made))

    def take_over(self, index: int, grad: torch.Tensor) -> None:
        """Take home the gradient that a parameter came with; it is part of the first step's sum."""
        with host_work():
            self._show(index, self._take(index, grad, scaled=False))

    def _show(self, index: int, slot: GradSlot) -> None:
        """Make ``p.grad`` a gradient at home."""
        spec = slot.segment.spec
        grad = LazyGrad(slot, spec.shape, spec.stride, spec.dtype, self.place)
        param = self.params[index]
        set_grad(param, self.parts.as_grad(param, grad))

    def take_plain(self) -> None:
        """Flush gradients set by the user: a scaled backward pass must not add to them."""
        for index, param in enumerate(self.params):
            grad = self.parts.grad(param)
            if grad is not None and not isinstance(grad, LazyGrad):
                self._flush(index, held=True, scaled=False)

    def accumulate(self, slot: GradSlot, grad: torch.Tensor) -> None:
        """Add one more gradient of autograd's, on HOST if the worker may do it."""
        segment, unscale = slot.segment, self.scaling.unscale
        master, dtype = self.homes.has_master(segment), segment.spec.dtype
        self.early.check_addend(*self._layout.home[segment.index])
        if slot.factors.clip is not None or (slot.factors != NONE and not master):
            slot.writable()
        if slot.state is GradState.TAKEN or not (master or dtype.itemsize >= 4):
            # two-byte sums are rounded as torch's own vector loops round them
            exact = slot.writable()
            addend = grad.to(exact.dtype)
            slot.store(exact.add_(addend if unscale == 1.0 else addend * unscale))
            return
        if self._references.may_change(grad):
            grad = grad.clone()
        if master:
            self.widen(segment)
        slot.land_copy()
        self._has_added = slot.summed = True
        slot.factors, slot.norm = NONE, None
        grad = shaped(segment, grad, dtype)
        if slot.home.on_device:
            self.homes.add_here(slot.home, segment, grad, first=False, unscale=unscale)
            return
        wanted = self.norm_way if self._sums_on_host else None
        way = None if wanted is None else slot.way(wanted)
        self._sums.add(slot, grad, first=False, unscale=unscale, norm_way=way)

    def _take(
        self, index: int, grad: torch.Tensor, *, scaled: bool, made: Ticket | None = None
    ) -> GradSlot:
        bucket_id, segment = self._layout.home[index]
        bucket = self._layout.buckets[bucket_id]
        assert_dense(grad, segment.spec.name)
        # 1. keep the numbers of this parameter's last gradient for its holder
        self._make_way(segment)
        # 2. bring it into the home's geometry, the parameter's own
        exact, whole = grad.dtype is torch.float32 and bucket.has_master, grad
        grad = shaped(segment, grad, torch.float32 if exact else segment.spec.dtype)
        if exact:
            self.widen(segment)
        home = self.homes.make(bucket, wide=exact)
        # 3. take its norm, and queue the way down after the compute that made it
        slot = GradSlot(self, segment, home)
        self._slots[index] = weakref.ref(slot)
        unscale = self.scaling.unscale if scaled else 1.0
        slot.factors = NONE if unscale == 1.0 else Factors(unscale)
        if self.norm_way is not None:
            way = slot.way(self.norm_way)
            slot.norm = GradNorm(way, whole_norm(grad, way, in_fp32=bucket.has_master))
        converts = home.item_dtype is not grad.dtype
        unscale = slot.factors.unscale if converts else 1.0
        if converts:
            slot.unscale_stored()
        if home.on_device:
            self.homes.add_here(slot.home, segment, grad, first=True, unscale=unscale)
        elif converts or not home.stays:  # jobs write to disk
            self._sums.add(slot, grad, first=True, unscale=unscale, norm_way=None)
        else:
            raw = row(grad).view(torch.uint8)
            target = row(home.view(segment)).view(torch.uint8)
            made = made if grad is whole else None  # else it was made just now
            slot.landing = self.ring.copy(target, raw, bucket=bucket_id, index=index, made=made)
        return slot

    def _make_way(self, segment: Segment) -> None:
        """Give up the home of a parameter's last gradient: a new one comes."""
        old = self._slot(segment)
        if old is not None:
            old.keep()
        self.ring.land([segment.index])
        job = self._updates.pop(self._layout.home[segment.index][0], None)
        if job is not None:
            job.wait()

    def widen(self, segment: Segment) -> None:
        """Make the stored gradients of a parameter's bucket fp32."""
        bucket = self._layout.bucket(segment)
        if self.homes.narrow(bucket) is None:
            return
        wide = self.homes.wide(bucket)
        narrow = self.homes.narrow(bucket)  # it may have moved to make room
        for held in self._slots_in(bucket):
            if held.home is not narrow:
                continue
            if held.state is not GradState.TAKEN:
                exact = wide.blank(held.segment)
                Factors(held.factors.unscale).apply(exact.copy_(held.stored()))
                self.homes.write(wide, held.segment, exact)
                held.unscale_stored()
            held.home = wide
        self.ring.land(segment.index for segment in bucket.segments)
        self.homes.store.drop(GRAD, bucket.id)

    def _slot(self, segment: Segment) -> GradSlot | None:
        """Return the gradient taken home last, while references to it exist."""
        found = self._slots.get(segment.index)
        return None if found is None else found()

    def _slots_in(self, bucket: Bucket) -> list[GradSlot]:
        last = self._slots
        found = [last[s.index]() for s in bucket.segments if s.index in last]
        return [slot for slot in found if slot is not None]

    # -- updates before the step (see [Note: early updates]) -------------------------------------

    def landed(self, bucket: Bucket) -> list[GradSlot] | None:
        """Return a bucket's gradients if all came in this step, home and unchanged; else None."""
        trained = [s for s in bucket.segments if self.params[s.index].requires_grad]
        slots = [slot for segment in trained if (slot := self.shown(segment)) is not None]
        ready = len(slots) == len(trained) and all(
            self.early.has_come(slot.segment) and slot.is_landed for slot in slots
        )
        if any(self.parts.is_pending(self.params[segment.index]) for segment in trained):
            return None  # ranks of a tensor sum these when the step closes
        return slots if ready else None

    def shown(self, segment: Segment) -> GradSlot | None:
        """Return the gradient that ``p.grad`` shows, if it is the one taken home last."""
        return self._taken_last(segment.index, self.parts.grad(self.params[segment.index]))

    def _taken_last(self, index: int, grad: torch.Tensor | None) -> GradSlot | None:
        """Return the slot of a gradient if it is a parameter's one that was taken home last."""
        last = self._slots.get(index)
        if last is None or not isinstance(grad, LazyGrad):
            return None
        return grad.slot if grad.slot is last() else None

    # -- at the end of a step --------------------------------------------------------------------

    def finish(self) -> None:
        """Wait for every copy home; expect sums in the next step if this one had any.

        A gradient at home that is also another parameter's (``b.grad = a.grad``) is kept: it is
        one tensor of numbers, and factors that pend would be those of its own parameter alone.
        """
        self.ring.finish()
        for index, grad in enumerate(self._grads(range(len(self.params)))):
            if isinstance(grad, LazyGrad) and self._taken_last(index, grad) is None:
                grad.slot.keep()
        self.homes.expects_sums, self._has_added = self._has_added, False

    def closed(self, indices: Sequence[int], addends: Callable[[int], bool]) -> list[GradSlot]:
        """Return the gradients there are, with their bytes at home, factors pending.

        The home is kept as long as the slot. ``addends``: of which parameters pending sums stay so.
        """
        found = []
        for index, grad in zip(indices, self._grads(indices), strict=True):
            if grad is None:
                continue
            slot = self._taken_last(index, grad)
            if slot is None or slot.state is GradState.TAKEN:
                value = grad.slot.keep() if isinstance(grad, LazyGrad) else grad.detach()
                slot = self._take(index, value, scaled=False)
                self.ring.finish()
            if self.parts.is_pending(self.params[index]) and not addends(index):
                slot = self._sum_parts(index, slot)
            slot.land()
            found.append(slot)
        return found

    def _sum_parts(self, index: int, addend: GradSlot) -> GradSlot:
        """Bring a gradient of which each rank has an addend to what the parameter is."""
        param = self.params[index]
        grad = self.parts.summed(param, addend.keep())
        set_grad(param, None)
        slot = self._take(index, grad, scaled=False)
        self._show(index, slot)
        self.ring.finish()
        return slot

    def adding(self, bucket: Bucket) -> list[Job]:
        """Return the jobs that still write a bucket's gradients home: its update waits for them."""
        found = [s for s in bucket.segments if s.index in self.jobs and self._slot(s) is not None]
        return [job for s in found if not (job := self.jobs[s.index]).done]

    def lend(self, bucket: Bucket, job: Job, written: Iterable[int]) -> None:
        """Let an update read a bucket's gradients; it applies factors to the ``written`` ones."""
        self._updates[bucket.id], written = job, frozenset(written)
        for slot in self._slots_in(bucket):
            slot.lend(job, self.jobs)
            if slot.segment.index in written:
                slot.factors, slot.norm = NONE, None

    def land(self, name: str, bucket: Bucket) -> bool:
        """Wait for gradients on their way to a home; False if none is in it then."""
        self.ring.land(segment.index for segment in bucket.segments)
        held = self._slots_at(self.homes.store.homes[name, bucket.id], bucket)
        for slot in held:
            if not slot.is_unsummed:
                slot.land()
        return not all(slot.state is GradState.TAKEN for slot in held)

    def rehome(self, move: Move, bucket: Bucket) -> None:
        """The bytes of a home have moved to another."""
        for slot in self._slots_at(move.old, bucket):
            slot.home = move.new

    def _slots_at(self, home: Home, bucket: Bucket) -> list[GradSlot]:
        return [slot for slot in self._slots_in(bucket) if slot.home is home]

    def release(self, bucket: Bucket) -> None:
        """Free a bucket's gradient home once no gradient is in it."""
        job = self._updates.get(bucket.id)
        if job is not None and not job.done:
            return
        self._updates.pop(bucket.id, None)
        if all(slot.state is GradState.TAKEN for slot in self._slots_in(bucket)):
            self.ring.land(segment.index for segment in bucket.segments)
            self.homes.drop(bucket)

    def abandon(self) -> None:
        """Stop waiting for updates that failed."""
        self._updates.clear()
        self.early.seal()
        for find in self._slots.values():
            slot = find()
            if slot is not None:
                slot.abandon()

    def reset(self) -> None:
        """Forget arrivals and finish transfers (after an error, or at the end)."""
        self._pending.clear()
        self.ring.close()
