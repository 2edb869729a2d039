"""Gradients: flushed to HOST as they are produced, and still torch's to look at (floor 2).

A gradient that autograd has accumulated is flushed at the *next* hetero event, so hooks of the
user's that run after ours still see ``p.grad``. What they see later is a `LazyGrad`: a tensor
subclass whose bytes are fetched, one tensor at a time, when an operation uses it. ``p.grad``
itself is the only truth: None means no gradient, as in torch.

A first gradient goes down in its own dtype. Later ones are added to it on HOST by the worker, in
the order in which autograd fired, and in fp32 where the parameter has an fp32 master: its bucket's
gradients are *wide* then. Norms are torch's, of whole tensors: a single gradient's is taken on the
device as it leaves, a sum's on HOST after the last addition. What a clip multiplies, and what loss
scaling owes, is pending until the update applies it; a reader before that sees it applied.

[Note: gradient leases]  A gradient that the user's code holds, as an object or through a view (a
preset flat buffer), stays where it is, so that writes through the alias count; the step copies it.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

from hetero.device import ALONE, Device, Ticket, use_count
from hetero.errors import ConfigError, StateError, too_early
from hetero.internals import DISPATCHERS, ENGINE_CODE, in_backward, make_wrapper, storage_uses
from hetero.jobs import Job, Worker
from hetero.memory.extent import Use
from hetero.memory.home import Home
from hetero.memory.homestore import HomeStore
from hetero.memory.layout import Bucket, Layout, Segment, row
from hetero.train.gradients.flight import Flight
from hetero.train.model.binding import get_grad, set_grad
from hetero.train.model.host_work import host_work
from hetero.train.model.lazy import Lazy, call
from hetero.types import Kind

_aten = torch.ops.aten
_UNSCALE = _aten._amp_foreach_non_finite_check_and_unscale_.default
_DISPATCHERS = (__name__, *DISPATCHERS, "hetero.train.activations.meter")  # a mode's own frames
GRAD, WIDE = Kind.GRAD.value, "grad32"
Norm = tuple[float, torch.Tensor]


class Factors(NamedTuple):
    """What a stored gradient is still to be multiplied by, in this order."""

    unscale: float = 1.0
    """1 / loss scale: a power of two."""
    clip: torch.Tensor | None = None
    """A 0-dim tensor, as `clip_grad_norm_` makes it."""

    def apply(self, grad: torch.Tensor) -> torch.Tensor:
        """Multiply a tensor in place, each product rounded by itself."""
        if self.unscale != 1.0:
            grad.mul_(self.unscale)
        return grad if self.clip is None else grad.mul_(self.clip.to(grad.device))


NONE = Factors()


class GradSlot:
    """One parameter's flushed gradient: on HOST, or taken back by a reader who needs it whole.

    ``value`` is a private device tensor once an alias of the gradient was handed out; it is then
    the truth until it is flushed again. ``flying`` pieces are on their way to the worker, and
    ``job`` is the last one that writes or reads ``home``.

    It keeps neither its store nor its job: a parameter holds its gradient where gc does not look,
    and would keep itself, and its model with files and threads, through them.
    """

    __slots__ = (
        *("__weakref__", "_owner", "segment", "home", "ticket", "flying"),
        *("value", "factors", "norm", "summed"),
    )

    def __init__(self, store: GradStore, segment: Segment, home: Home) -> None:
        self._owner = weakref.ref(store)
        self.segment = segment
        self.home = home
        self.ticket: Ticket | None = None
        self.flying = 0
        store.jobs.pop(segment.index, None)
        self.value: torch.Tensor | None = None
        self.factors = NONE
        self.norm: Norm | None = None
        self.summed = False

    @property
    def _store(self) -> GradStore:
        store = self._owner()
        if store is None:
            raise StateError(
                f"the gradient of {self.segment.spec.name!r} went with its prepared model",
                advice="keep the model, or a copy: grad = param.grad.clone()",
            )
        return store

    @property
    def job(self) -> Job | None:
        """The last job that writes or reads the home."""
        return self._store.jobs.get(self.segment.index)

    @job.setter
    def job(self, job: Job | None) -> None:
        if job is None:
            self._store.jobs.pop(self.segment.index, None)
        else:
            self._store.jobs[self.segment.index] = job

    def land(self) -> None:
        """Return when the bytes have arrived at home and everything is added; factors pend."""
        if self.ticket is not None:
            self._store.land(self.ticket)
            self.ticket = None
        if self.flying:
            self._store.flight.finish()
        if self.job is not None:
            self.job.wait()
            self.job = None

    def stored(self) -> torch.Tensor:
        """Return what is at home: the home's own tensor on HOST, a copy from disk."""
        self.land()
        return self.home.value(self.segment)

    @property
    def deferrable(self) -> bool:
        """Whether a multiplication may wait for the update and round as it would now."""
        fp32 = self.segment.spec.dtype is torch.float32 or self._store.has_master(self.segment)
        return fp32 and self.value is None and self.factors.clip is None

    def read(self) -> torch.Tensor:
        """Return what ``p.grad`` shows, on the device, for one operation that does not write."""
        held = self.value
        if held is None:
            held = self.stored().to(self._store.place)
            if self.factors != NONE:
                held = self.factors.apply(held.float().clone())
        return held.to(self.segment.spec.dtype)

    def exact(self) -> torch.Tensor:
        """Return the gradient itself, on the device, for one operation of a user that writes it."""
        self._store.refuse_write(self.segment)
        return self.writable()

    def writable(self) -> torch.Tensor:
        """Return the gradient itself, on the device; what is written to it goes to `store`."""
        if self.value is not None:
            return self.value
        self.land()
        if self._store.has_master(self.segment):  # what is written must not depend on history
            self._store.widen(self.segment)
        home = self.stored()
        if self.factors != NONE:
            self.home.write(self.segment, self.factors.apply(home))
            self.factors = NONE
        self.norm = None
        return home.to(self._store.place)

    def keep(self) -> torch.Tensor:
        """Return a private tensor that aliases may refer to; it replaces the HOST bytes."""
        if self.value is None:
            home = self.stored()
            dtype = torch.float32 if self._store.has_master(self.segment) else home.dtype
            private = torch.empty_strided(
                home.shape, home.stride(), dtype=dtype, device=self._store.place
            )
            self.value = self.factors.apply(private.copy_(home))
            self.factors, self.norm = NONE, None
        return self.value

    @property
    def is_landed(self) -> bool:
        """Whether all copies of a gradient that nothing changed have landed; jobs may go on."""
        if self.value is not None or self.factors != NONE or self.flying:
            return False
        return self.ticket is None or self._store.has_landed(self.ticket)

    @property
    def is_changed(self) -> bool:
        """Whether the user wrote to the gradient through an alias, since it was taken home."""
        if self.factors != NONE:
            return True
        if self.value is None:
            return False
        held = self.value.to("cpu")
        home = self.stored().to("cpu", held.dtype)
        return not torch.equal(row(held).view(torch.uint8), row(home).view(torch.uint8))

    def store(self, written: torch.Tensor) -> None:
        """Write back what an in-place operation left in the tensor that `exact` gave."""
        if self.value is None:
            self.home.write(self.segment, written)

    def norm_of(self, ord: float) -> torch.Tensor:
        """Return the tensor's norm as torch would have it from ``p.grad``, on the device."""
        if self.value is not None or self.factors.clip is not None:
            self._store.norm_ord = ord
            exact = self.value if self.value is not None else self.factors.apply(self.home_copy())
            return self._store.measure(exact, ord, self.segment)
        home = self.stored()
        if self.norm is None or self.norm[0] != ord:
            single = home if self.summed else home.to(self._store.place)
            self.norm = (ord, self._store.measure(single, ord, self.segment))
            self._store.norm_ord = ord
        norm = self.norm[1].to(self._store.place)
        return norm if self.factors.unscale == 1.0 else norm * self.factors.unscale

    def home_copy(self) -> torch.Tensor:
        """Return a copy of the HOST bytes, as fp32 where there is a master."""
        home = self.stored()
        return home.float() if home.dtype.itemsize < 4 else home.clone()


class LazyGrad(Lazy):
    """A gradient at home on HOST that computes like a tensor on the parameter's device."""

    slot: GradSlot

    @classmethod
    def shortcut(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func is _UNSCALE:  # a list of all gradients: one tensor on the device at a time
            for grad in args[0]:
                call(func, ([grad], *args[1:]), kwargs)
            return None
        short = _SHORT.get(func)
        if short is not None and isinstance(args[0], LazyGrad) and short(*args, **kwargs):
            return args[0]
        if func is _aten.linalg_vector_norm.default and _is_whole(args, kwargs):
            return args[0].slot.norm_of(float(args[1]) if len(args) > 1 else 2.0)
        return NotImplemented


def _add(grad: LazyGrad, other: Any, *, alpha: Any = 1) -> bool:
    """Add what autograd accumulates on HOST, while backward goes on; False: not this way."""
    plain = isinstance(other, torch.Tensor) and not isinstance(other, LazyGrad)
    if not plain or alpha != 1 or other.layout is not torch.strided or not _called_by_autograd():
        return False
    grad.slot._store.accumulate(grad.slot, other)
    return True


def _called_by_autograd() -> bool:
    """Whether an operation is the engine's own, and not one of a hook that it runs.

    The engine calls from C++: the nearest Python frame is then the one that started it, or none in
    a thread of its own.
    """
    if not in_backward():
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        frame.f_code.co_name == "__torch_dispatch__" or frame.f_globals["__name__"] in _DISPATCHERS
    ):
        frame = frame.f_back
    return frame is None or frame.f_code is ENGINE_CODE


def _mul(grad: LazyGrad, other: Any) -> bool:
    """Leave a multiplication by one number to the update; False: not this way."""
    tensor = isinstance(other, torch.Tensor)
    if isinstance(other, LazyGrad) or (tensor and other.dim() > 0) or not grad.slot.deferrable:
        return False
    if not isinstance(other, (int, float, torch.Tensor)):
        return False
    grad.slot._store.refuse_write(grad.slot.segment)
    clip = torch.as_tensor(other, dtype=torch.float32)
    grad.slot.factors = grad.slot.factors._replace(clip=clip.clone())
    return True


_SHORT: dict[Any, Callable[..., bool]] = {_aten.add_.Tensor: _add, _aten.mul_.Tensor: _mul}


def _is_whole(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a vector norm is of one whole gradient, in its own precision."""
    return isinstance(args[0], LazyGrad) and len(args) <= 2 and not kwargs


class GradStore:
    """Takes gradients to their HOST homes; `pending` ones leave at the next event."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        layout: Layout,
        *,
        device: Device,
        flight: Flight,
        store: HomeStore,
        worker: Worker,
        early: bool = False,
    ) -> None:
        self._params = params
        self._layout = layout
        self._device = device
        self.flight = flight
        self._store = store
        self._worker = worker
        self._index = {id(p): i for i, p in enumerate(params)}
        probe = torch.zeros(())
        probe.grad = torch.zeros(())
        self._alone = holders(probe)  # differs between releases of torch
        self._pending: dict[int, None] = {}
        self.jobs: dict[int, Job] = {}  # by parameter: of its last gradient
        self._slots: dict[int, weakref.ref[GradSlot]] = {}
        self._updates: dict[int, Job] = {}  # bucket -> the update that still reads its gradients
        self._early = early  # whether updates may begin before the step
        self._fired: set[int] = set()  # parameters whose gradients came since the last step
        self._begun: set[int] = set()  # buckets whose update belongs to a step not made yet
        self._summed = self._sums = False  # whether the last step, and this one, added gradients
        self.place = device.torch_device
        self.norm_ord: float | None = None  # what is asked for every step is taken as they leave
        self.unscale = 1.0
        self.scaling: bool | None = None  # under loss scaling: whether the loss was scaled
        self._leased: set[int] = set()  # gradients that the user's code holds
        self._lone_uses = lone_uses()
        self.on_arrival: Callable[[], None] = lambda: None

    # -- on their way down -----------------------------------------------------------------------

    def arriving(self, index: int) -> None:
        """Before autograd accumulates: what it adds to must not be a 2-byte sum.

        A parameter fires twice before an event of ours in a pass inside a pass (a reentrant
        checkpoint), or where the pass before failed.
        """
        if index in self._pending:
            self.flush_pending()

    def arrived(self, param: nn.Parameter) -> None:
        """Post-accumulate hook: note the gradient; it is flushed at the next event."""
        if self.scaling is False:
            raise StateError(
                "precision='fp16', and this backward pass began without loss scaling",
                advice="call hetero.backward(loss) in place of loss.backward(); it finds the model"
                " through the loss's graph, which must not hide all of it in reentrant checkpoints",
            )
        index = self._index[id(param)]
        if self._early:
            self._refuse_another(index)
            self._fired.add(index)
        self._pending[index] = None
        self.on_arrival()

    def flush_pending(self) -> None:
        """Start the way home of every gradient that has arrived."""
        if self._pending:
            pending, self._pending = self._pending, {}
            indices = list(dict.fromkeys((*pending, *self._leased)))
            self._leased.clear()
            # Siblings made in one piece (the halves of a concatenation) hold each other's storage.
            storages = [self._storage(index) for index in indices]
            siblings = Counter(storages)
            seen = [
                storage is not None and self._is_held(index, storage, siblings[storage])
                for index, storage in zip(indices, storages, strict=True)
            ]
            with host_work():  # what is made here is made on HOST
                for index, held in zip(indices, seen, strict=True):
                    self.flush(index, held=held)
        self.flight.poll()

    def flush(self, index: int, *, held: bool, scaled: bool = True) -> None:
        """Take one gradient home and leave a LazyGrad behind; None and flushed ones stay."""
        param = self._params[index]
        grad = get_grad(param)
        if grad is None:
            return
        if isinstance(grad, LazyGrad):
            if grad.slot.value is None or use_count(grad.slot.value) > ALONE:
                return
            grad, scaled = grad.slot.value, False
        elif grad.requires_grad or grad.layout is not torch.strided:
            self._refuse_scaled(index, grad)
            return  # a graph hangs on it (create_graph): the step takes a copy
        elif held and self.scaling is None:
            self._leased.add(index)
            return  # [Note: gradient leases]
        elif held:  # under loss scaling nobody else's numbers are ours: they keep theirs
            grad = grad.clone()
        slot = self._take(index, grad, scaled=scaled)
        spec = slot.segment.spec
        set_grad(param, LazyGrad(slot, spec.shape, spec.stride, spec.dtype, self.place))

    def take_plain(self) -> None:
        """Take the gradients that a user put there: a scaled backward pass must not add to them."""
        for index, param in enumerate(self._params):
            grad = get_grad(param)
            if grad is not None and not isinstance(grad, LazyGrad):
                self.flush(index, held=True, scaled=False)

    def _storage(self, index: int) -> int | None:
        grad = get_grad(self._params[index])
        if grad is None or isinstance(grad, LazyGrad) or grad.layout is not torch.strided:
            return None
        return int(grad.untyped_storage()._cdata)

    def _is_held(self, index: int, storage: int, n_siblings: int) -> bool:
        """Whether the user's code refers to a gradient, or to bytes of its storage."""
        uses = storage_uses(storage)
        return holders(self._params[index]) > self._alone or uses > ALONE - 1 + n_siblings

    def _refuse_scaled(self, index: int, grad: torch.Tensor) -> None:
        if self.scaling is not None and grad.requires_grad:
            name = self._layout.home[index][1].spec.name
            raise StateError(
                f"the gradient of {name!r} has a graph (create_graph=True), which loss scaling"
                " would leave scaled",
                advice="use torch.autograd.grad for the inner gradient, or precision='bf16'",
            )

    def accumulate(self, slot: GradSlot, grad: torch.Tensor) -> None:
        """Add one more gradient of autograd's, on HOST where the worker may do it."""
        self._refuse_another(slot.segment.index)
        spec, master = slot.segment.spec, self.has_master(slot.segment)
        if slot.factors.clip is not None or (slot.factors != NONE and not master):
            slot.writable()
        if slot.value is not None or not (master or spec.dtype.itemsize >= 4):
            # two-byte sums are rounded as torch's own vector loops round them
            exact = slot.writable()
            addend = grad.to(exact.dtype)
            slot.store(exact.add_(addend if self.unscale == 1.0 else addend * self.unscale))
            return
        if references(grad) > self._lone_uses or use_count(grad) > ALONE:
            grad = grad.clone()  # autograd, or a user, may write to it before it is added
        if master:
            self.widen(slot.segment)
        if slot.ticket is not None:
            self.land(slot.ticket)
            slot.ticket = None
        self._sums = slot.summed = True
        grad = self._shaped(slot.segment, grad, spec.dtype)
        self._hand(slot, grad, self.unscale, first=False)
        slot.factors = NONE

    def _take(self, index: int, grad: torch.Tensor, *, scaled: bool) -> GradSlot:
        bucket_id, segment = self._layout.home[index]
        assert_dense(grad, segment.spec.name)
        # 1. a holder of the last gradient of this parameter keeps its numbers
        old = self._slots.get(index, _gone)()
        if old is not None and old.value is None:
            old.keep()
        if bucket_id in self._updates:
            self._updates[bucket_id].wait()
            del self._updates[bucket_id]
        # 2. bring it into the home's geometry, which is the parameter's own
        bucket = self._layout.buckets[bucket_id]
        exact = grad.dtype is torch.float32 and bucket.has_master
        grad = self._shaped(segment, grad, torch.float32 if exact else segment.spec.dtype)
        home = self._home_for(bucket, wide=exact)
        # 3. queue the way down after the compute that made it, and its norm
        slot = GradSlot(self, segment, home)
        self._slots[index] = weakref.ref(slot)
        slot.factors = Factors(self.unscale if scaled else 1.0)
        if self.norm_ord is not None:
            slot.norm = (self.norm_ord, self.measure(grad, self.norm_ord, segment))
        if home.item_dtype is not grad.dtype:
            self._hand(slot, grad, slot.factors.unscale, first=True)
            slot.factors = NONE
        elif not home.stays:  # what lies on disk is written by jobs
            self._hand(slot, grad, 1.0, first=True)
        else:
            raw = row(grad).view(torch.uint8)
            target = row(home.view(segment)).view(torch.uint8)
            slot.ticket = self.flight.copy(target, raw, bucket=bucket_id)
        return slot

    def _hand(self, slot: GradSlot, grad: torch.Tensor, unscale: float, *, first: bool) -> None:
        """Let the worker add a gradient to its home, or begin the sum with it."""
        home, segment, n_threads = slot.home, slot.segment, torch.get_num_threads()
        ord, use = self.norm_ord, Use.FRESH if first else Use.WRITE
        if slot.norm is not None and first:
            slot.norm = (slot.norm[0], slot.norm[1] * unscale)
        elif not first:
            slot.norm = None

        def consume(piece: torch.Tensor, start: int) -> Job:
            end = start + piece.numel()
            done = start  # a disk may fail between two runs, and the rest is tried again later

            def work() -> None:
                nonlocal done
                same_threads(n_threads)
                exact = piece if unscale == 1.0 else piece.float() * unscale
                whole = segment.offset + done, segment.offset + end
                for run in home.runs(*whole, use):
                    here = segment.inside(run)
                    part, addend = home.part(run), exact[here.start - start : here.stop - start]
                    part.copy_(addend) if first else part.add_(addend)
                    done = here.stop
                if end == segment.spec.numel and not first and ord is not None:
                    slot.norm = (ord, self.measure(home.value(segment), ord, segment))

            slot.flying -= 1
            before = slot.job
            after = () if before is None or before.done else (before,)
            slot.job = self._worker.job([work], piece.numel(), after=after)
            return self._worker.submit(slot.job)

        slot.flying += self.flight.n_pieces(grad)
        self.flight.hand(row(grad), consume, bucket=self._bucket(segment).id)

    def widen(self, segment: Segment) -> None:
        """Make the stored gradients of a parameter's bucket fp32."""
        bucket = self._bucket(segment)
        narrow = self._store.homes.get((GRAD, bucket.id))
        if narrow is None:
            return
        wide = self._store.get(Kind.GRAD, WIDE, bucket, torch.float32)
        for other in bucket.segments:
            held = self._slots.get(other.index, _gone)()
            if held is None or held.home is not narrow:
                continue
            if held.value is None:
                exact = wide.blank(other)
                Factors(held.factors.unscale).apply(exact.copy_(held.stored()))
                wide.write(other, exact)
                if held.norm is not None:
                    held.norm = (held.norm[0], held.norm[1] * held.factors.unscale)
                held.factors = held.factors._replace(unscale=1.0)
            held.home = wide
        self._store.drop(GRAD, bucket.id)

    def _home_for(self, bucket: Bucket, *, wide: bool) -> Home:
        """Return the home for a bucket's gradients, wide where they are, or must be, or will be."""
        if not bucket.has_master:
            return self._store.get(Kind.GRAD, GRAD, bucket)
        narrow = self._store.homes.get((GRAD, bucket.id))
        there = self._store.homes.get((WIDE, bucket.id))
        if there is None and narrow is None and (wide or self._summed):
            return self._store.get(Kind.GRAD, WIDE, bucket, torch.float32)
        if narrow is not None and wide:
            self.widen(bucket.segments[0])
            return self._store.homes[WIDE, bucket.id]
        return there or self._store.get(Kind.GRAD, GRAD, bucket)

    def _shaped(self, segment: Segment, grad: Any, dtype: torch.dtype) -> torch.Tensor:
        """Return a gradient in the parameter's own strides, and in ``dtype``."""
        spec = segment.spec
        grad = grad.resolve_conj().resolve_neg()
        if tuple(grad.stride()) != spec.stride or grad.dtype != dtype:
            same = torch.empty_strided(spec.shape, spec.stride, dtype=dtype, device=grad.device)
            return same.copy_(grad)
        plain: torch.Tensor = grad
        return plain

    # -- norms -----------------------------------------------------------------------------------

    def measure(self, grad: torch.Tensor, ord: float, segment: Segment) -> torch.Tensor:
        """Return the norm torch takes of a whole tensor: of fp32 numbers where a master is."""
        dtype = torch.float32 if self.has_master(segment) else None
        if dtype is not None and grad.device.type == "cpu":
            grad = grad.float()  # the same bits as dtype=, and vectorised
        norm: torch.Tensor = torch.linalg.vector_norm(grad, ord, dtype=dtype)
        return norm

    def has_master(self, segment: Segment) -> bool:
        """Whether a parameter's gradients add up in fp32."""
        return self._bucket(segment).has_master

    # -- updates before the step (see [Note: early updates]) -------------------------------------

    def landed(self, bucket: Bucket) -> list[GradSlot] | None:
        """Return all gradients of a bucket, where each came in this step and is at home as it came;
        None where one is missing, is under way or was changed."""
        slots = []
        for segment in bucket.segments:
            param = self._params[segment.index]
            if not param.requires_grad:
                continue
            slot = self._slots.get(segment.index, _gone)()
            grad = get_grad(param)
            mine = slot is not None and isinstance(grad, LazyGrad) and grad.slot is slot
            if slot is None or not mine or segment.index not in self._fired or not slot.is_landed:
                return None
            slots.append(slot)
        return slots

    def has_landed(self, ticket: Ticket) -> bool:
        """Whether a copy has landed."""
        return self._device.query(ticket)

    def lend_early(self, bucket: Bucket, job: Job) -> None:
        """The update of a step that is not made yet reads a bucket's gradients."""
        self.lend(bucket, job, ())
        self._begun.add(bucket.id)

    def is_as_lent(self, slot: GradSlot) -> bool:
        """Whether ``p.grad`` is still the gradient that an update was lent, and unchanged."""
        grad = get_grad(self._params[slot.segment.index])
        return isinstance(grad, LazyGrad) and grad.slot is slot and not slot.is_changed

    def seal(self) -> None:
        """The step of early updates is made: gradients are the user's again."""
        self._begun.clear()
        self._fired.clear()

    def refuse_write(self, segment: Segment) -> None:
        """Raise StateError for a write to a gradient that an update may have read."""
        if self._early and segment.index in self._fired:
            raise StateError(
                f"updates='backward': the gradient of {segment.spec.name!r} is written between"
                " backward and optimizer.step(), and its update may have begun",
                advice="leave updates= at 'step' to clip, scale or average gradients",
            )

    def _refuse_another(self, index: int) -> None:
        bucket, segment = self._layout.home[index]
        if bucket in self._begun:
            raise too_early(f"another gradient of {segment.spec.name!r} comes")

    # -- at the end of a step --------------------------------------------------------------------

    def finish(self) -> None:
        """Bring every gradient home: what is held outside is copied, what is added has been."""
        self.flight.finish()
        self._summed, self._sums = self._sums, False

    def closed(self, index: int) -> GradSlot | None:
        """Return a gradient with its bytes at home, factors pending; None when there is none.

        The home is kept for as long as the slot is.
        """
        grad = get_grad(self._params[index])
        if grad is None:
            return None
        slot = grad.slot if isinstance(grad, LazyGrad) else None
        mine = slot is not None and self._slots.get(index, _gone)() is slot
        if slot is None or not mine or slot.value is not None:
            value = slot.keep() if slot is not None else grad.detach()
            assert_dense(value, self._layout.home[index][1].spec.name)
            slot = self._take(index, value, scaled=False)
            self.flight.finish()
        slot.land()
        return slot

    def norms(self) -> list[float]:
        """Return the 2-norm of every gradient there is; waits for the device once."""
        grads = [g for g in map(get_grad, self._params) if g is not None]
        wide = (g if isinstance(g, LazyGrad) else g.float() for g in grads)
        norms = [torch.linalg.vector_norm(grad, 2.0) for grad in wide]
        found: list[float] = torch.stack(norms).tolist() if norms else []
        return found

    def home(self, bucket: Bucket) -> Home:
        """Return the home of a bucket's gradients; `closed` says which are there."""
        wide = self._store.homes.get((WIDE, bucket.id))
        return wide or self._store.homes[GRAD, bucket.id]

    def lend(self, bucket: Bucket, job: Job, written: Iterable[int]) -> None:
        """An update reads a bucket's gradients; to the ``written`` ones it applies the factors."""
        self._updates[bucket.id] = job
        for segment in bucket.segments:
            slot = self._slots.get(segment.index, _gone)()
            if slot is not None and slot.value is None:
                slot.job = job
        for index in written:
            slot = self._slots.get(index, _gone)()
            if slot is not None:
                slot.factors, slot.norm = NONE, None

    def let_go(self, bucket: Bucket) -> None:
        """Give a bucket's gradient home back when no gradient is in it any more."""
        job = self._updates.get(bucket.id)
        if job is not None and not job.done:
            return
        self._updates.pop(bucket.id, None)
        for segment in bucket.segments:
            slot = self._slots.get(segment.index, _gone)()
            if slot is not None and slot.value is None:
                return
        for name in (GRAD, WIDE):
            home = self._store.homes.get((name, bucket.id))
            if home is not None and (self._device.cheap_slabs or not home.stays):
                self._store.drop(name, bucket.id)

    def abandon(self) -> None:
        """Stop waiting for updates that failed."""
        self._updates.clear()
        self.seal()
        for slot in filter(None, (find() for find in self._slots.values())):
            slot.job = None

    def land(self, ticket: Ticket) -> None:
        """Block until a copy has landed."""
        self.flight.land(ticket)

    def reset(self) -> None:
        """Forget arrivals and finish what is under way (after an error, or at the end)."""
        self._pending.clear()
        self.flight.close()

    def _bucket(self, segment: Segment) -> Bucket:
        return self._layout.buckets[self._layout.home[segment.index][0]]


def same_threads(n_threads: int) -> None:
    """Let torch use as many threads here as it does there: a norm's bits depend on it."""
    if torch.get_num_threads() != n_threads:
        torch.set_num_threads(n_threads)


class _Counting(torch.Tensor):
    """A gradient that tells how many refer to what autograd adds to it."""

    uses = 0

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares no signature
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is _aten.add_.Tensor:
            args[0].uses = references(args[1])
            return args[0]
        return make_wrapper(cls, args[0].shape)  # detach: as good as any


def lone_uses() -> int:
    """Return the references to an addend that autograd alone refers to (it differs by release)."""
    with torch.inference_mode(False), torch.enable_grad():
        probe = torch.zeros(2, requires_grad=True)
        grad = make_wrapper(_Counting, probe.shape)
        probe.grad = grad
        (probe * 2).sum().backward()
    return int(grad.uses)


def references(tensor: torch.Tensor) -> int:
    """Return the references to a tensor from C++ and its Python object; many where torch is too
    old to tell."""
    count = getattr(tensor, "_use_count", None)
    return 2**31 if count is None else int(count())


def holders(param: torch.Tensor) -> int:
    """Return how many references there are to the object ``param.grad``."""
    grad = get_grad(param)
    return sys.getrefcount(grad)


def _gone() -> None:
    return None


def assert_dense(grad: Any, name: str) -> None:
    """Refuse gradients that are not plain strided tensors, by name."""
    if isinstance(grad, torch.Tensor) and grad.layout is not torch.strided:
        raise ConfigError(
            f"the gradient of {name!r} is {grad.layout}",
            advice="build the module with sparse=False; hetero trains dense gradients",
        )
