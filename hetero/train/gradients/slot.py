"""One parameter's gradient at home, as ``p.grad`` shows it (floor 2)."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch

from hetero.errors import StateError
from hetero.internals import (
    DISPATCHERS,
    ENGINE_CODE,
    GRADIENT_ADDERS,
    foreach_norm,
    in_backward,
    takes_lists_of,
)
from hetero.jobs import Job
from hetero.memory.home import Home
from hetero.memory.layout import Segment, row
from hetero.memory.transfers import Pending
from hetero.train.gradients.early_reads import EarlyReads
from hetero.train.gradients.homes import GradHomes
from hetero.train.gradients.ring import GradRing
from hetero.train.model.lazy import Lazy

_aten = torch.ops.aten
_NORM, _ADD, _MUL = _aten.linalg_vector_norm.default, _aten.add_.Tensor, _aten.mul_.Tensor
_NORMS = _aten._foreach_norm.Scalar
_FACTORS = (_aten._foreach_mul_.Scalar, _aten._foreach_mul_.Tensor)
_DISPATCHERS = (__name__, *DISPATCHERS, "hetero.train.activations.meter")  # a mode's own frames


class GradState(Enum):
    """Where the truth about a gradient is."""

    ARRIVING = "a copy, or jobs, still write it home"
    HOME = "at home"
    LENT = "at home, where an update may still read it"
    TAKEN = "a private tensor on the device, which aliases may write to"

    __hash__ = object.__hash__  # not of their names, in Python: they are keys on the hot path


LEGAL = frozenset(
    {
        (GradState.ARRIVING, GradState.HOME, "land"),
        (GradState.LENT, GradState.HOME, "land"),
        (GradState.ARRIVING, GradState.ARRIVING, "add"),
        (GradState.HOME, GradState.ARRIVING, "add"),
        (GradState.LENT, GradState.ARRIVING, "add"),  # the addition comes after the update
        (GradState.ARRIVING, GradState.LENT, "lend"),  # the update comes after the jobs
        (GradState.HOME, GradState.LENT, "lend"),
        (GradState.LENT, GradState.LENT, "lend"),  # to the next step, which did not look at it
        (GradState.HOME, GradState.TAKEN, "keep"),
        (GradState.ARRIVING, GradState.HOME, "abandon"),
        (GradState.LENT, GradState.HOME, "abandon"),
    }
)


class Factors(NamedTuple):
    """The factors still to be applied to a stored gradient, in this order."""

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


class NormWay(NamedTuple):
    """How torch takes a norm."""

    ord: float
    listed: bool = True
    """Whether by the kernel for lists, as `clip_grad_norm_` does on an accelerator: it may round
    otherwise than that for one tensor."""


class GradNorm(NamedTuple):
    """The norm of a gradient at home, before its factors."""

    way: NormWay
    value: torch.Tensor


def whole_norm(grad: torch.Tensor, way: NormWay, *, in_fp32: bool) -> torch.Tensor:
    """Return torch's norm of a whole tensor, ``in_fp32`` for a parameter with a master."""
    if way.listed and not in_fp32 and has_lists(grad.device):
        return foreach_norm(grad, way.ord)
    if in_fp32 and grad.device.type == "cpu":
        grad = grad.float()  # the same bits as dtype=, and vectorised
    norm: torch.Tensor = torch.linalg.vector_norm(
        grad, way.ord, dtype=torch.float32 if in_fp32 else None
    )
    return norm


def has_lists(place: torch.device) -> bool:
    """Whether torch has kernels for lists of tensors on a device."""
    return place.type not in ("cpu", "meta")


class Unsummed:
    """Stands for the end of a gradient's way home while other ranks' addends are missing."""

    done = False

    def __init__(self, why: str, advice: str) -> None:
        self._why = why
        self._advice = advice

    def wait(self) -> None:
        raise StateError(self._why, advice=self._advice)


class GradOwner(Protocol):
    early: EarlyReads
    homes: GradHomes
    jobs: dict[int, Job]
    """The last job that writes or reads each parameter's gradient, by index."""
    norm_way: NormWay | None
    """Of the norms in use, which are taken as gradients leave."""
    place: torch.device
    ring: GradRing

    def widen(self, segment: Segment) -> None:
        """Make the stored gradients of a parameter's bucket fp32."""

    def share_norms(self, way: NormWay, /) -> None:
        """Take norms together with other ranks, if that saves work."""

    def accumulate(self, slot: GradSlot, grad: torch.Tensor) -> None:
        """Add one more gradient of autograd's."""


class GradSlot:
    """One parameter's gradient: on HOST, or taken back by a reader that needs it whole.

    It refers to neither its store nor its job: a parameter holds its gradient where gc does not
    look, and would keep itself and its model alive through them.
    """

    __slots__ = (
        *("__weakref__", "_owner", "factors", "has_master", "home", "landing", "n_flying"),
        *("norm", "segment", "state", "summed", "value"),
    )

    def __init__(self, owner: GradOwner, segment: Segment, home: Home) -> None:
        self._owner: Callable[[], GradOwner | None] = weakref.ref(owner)
        self.segment = segment
        self.home = home
        self.has_master = owner.homes.has_master(segment)
        self.state = GradState.ARRIVING
        self.landing: Pending | None = None
        """The end of the copy that writes it home unchanged."""
        self.n_flying = 0
        """Pieces on their way to jobs."""
        self.value: torch.Tensor | None = None
        """The private tensor, while it is TAKEN."""
        self.factors = NONE
        self.norm: GradNorm | None = None
        self.summed = False
        """Whether it was summed at home; a job may have taken its norm there."""
        owner.jobs.pop(segment.index, None)

    @property
    def owner(self) -> GradOwner:
        owner = self._owner()
        if owner is None:
            raise StateError(
                f"the gradient of {self.segment.spec.name!r} went with its prepared model",
                advice="keep the model, or a copy: grad = param.grad.clone()",
            )
        return owner

    def become(self, new: GradState, why: str) -> None:
        """Move to another state because of ``why``, or raise StateError."""
        if (self.state, new, why) not in LEGAL:
            raise StateError(
                f"the gradient of {self.segment.spec.name!r}: {self.state.name} -> {new.name} by"
                f" {why} is not legal"
            )
        self.state = new

    @property
    def job(self) -> Job | None:
        """The last job that writes or reads the home."""
        return self.owner.jobs.get(self.segment.index)

    # -- the way home ----------------------------------------------------------------------------

    @property
    def is_landed(self) -> bool:
        """Whether an unchanged gradient's copies have all landed; jobs may still run."""
        if self.state is GradState.TAKEN or self.factors != NONE or self.n_flying:
            return False
        return self.landing is None or self.landing.done

    @property
    def is_unsummed(self) -> bool:
        """Whether other ranks' addends are missing."""
        return isinstance(self.landing, Unsummed)

    def land_copy(self) -> None:
        """Wait for the copy that writes it home, if there is one."""
        if self.landing is not None:
            self.landing.wait()
            self.landing = None

    def land(self) -> None:
        """Wait until all bytes are home and added; factors still pend."""
        if self.state in (GradState.HOME, GradState.TAKEN):
            return
        self.land_copy()
        owner = self.owner
        if self.n_flying:
            owner.ring.finish()
        job = owner.jobs.get(self.segment.index)
        if job is not None:
            job.wait()
            del owner.jobs[self.segment.index]
        self.become(GradState.HOME, "land")

    def lend(self, job: Job, jobs: dict[int, Job]) -> None:
        """Let an update read it; later changes wait for the update. ``jobs`` are the owner's."""
        if self.state is not GradState.TAKEN:
            jobs[self.segment.index] = job
            self.become(GradState.LENT, "lend")

    def abandon(self) -> None:
        """Stop waiting for its job, which has failed; copies on their way are still waited for."""
        self.owner.jobs.pop(self.segment.index, None)
        is_here = self.landing is None and not self.n_flying
        if is_here and self.state in (GradState.ARRIVING, GradState.LENT):
            self.become(GradState.HOME, "abandon")

    # -- its value -------------------------------------------------------------------------------

    def stored(self) -> torch.Tensor:
        """Return the bytes at home: the home's own tensor on HOST, a copy from disk."""
        self.land()
        return self.owner.homes.read(self.home, self.segment)

    def read(self) -> torch.Tensor:
        """Return the value of ``p.grad``, on the device, for one operation that does not write."""
        held = self.value
        if held is None:
            held = self.stored().to(self.owner.place)
            if self.factors != NONE:
                held = self.factors.apply(held.float().clone())
        return held.to(self.segment.spec.dtype)

    def exact(self) -> torch.Tensor:
        """Return the gradient itself, on the device, for one user's operation that writes it."""
        self.owner.early.check_write(self.segment)
        return self.writable()

    def writable(self) -> torch.Tensor:
        """Return the gradient itself, on the device; `store` takes it once written."""
        if self.value is not None:
            return self.value
        self.land()
        if self.has_master:  # the written value must not depend on history
            self.owner.widen(self.segment)
        home = self.stored()
        if self.factors != NONE:
            self.store(self.factors.apply(home))
            self.factors = NONE
        self.norm = None
        return home.to(self.owner.place)

    def store(self, written: torch.Tensor) -> None:
        """Write back the tensor of `exact` after an in-place operation."""
        if self.state is not GradState.TAKEN:
            self.owner.homes.write(self.home, self.segment, written)

    def keep(self) -> torch.Tensor:
        """Return a private tensor that may be aliased; it replaces the HOST bytes."""
        if self.value is None:
            home = self.stored()
            dtype = torch.float32 if self.has_master else home.dtype
            private = torch.empty_strided(
                home.shape, home.stride(), dtype=dtype, device=self.owner.place
            )
            self.value = self.factors.apply(private.copy_(home))
            self.factors, self.norm = NONE, None
            self.become(GradState.TAKEN, "keep")
        return self.value

    @property
    def is_changed(self) -> bool:
        """Whether the user changed the gradient since it was taken home."""
        if self.factors != NONE:
            return True
        if self.value is None:
            return False
        held = self.value.to("cpu")
        home = self.stored().to("cpu", held.dtype)
        return not torch.equal(row(held).view(torch.uint8), row(home).view(torch.uint8))

    # -- factors and norms -----------------------------------------------------------------------

    @property
    def deferrable(self) -> bool:
        """Whether a multiplication may wait for the update and round the same."""
        if self.value is not None or self.factors.clip is not None:
            return False
        return self.has_master or self.segment.spec.dtype is torch.float32

    def unscale_stored(self) -> None:
        """Note that the stored numbers were multiplied by 1 / loss scale."""
        if self.norm is not None:
            self.norm = self.norm._replace(value=self.norm.value * self.factors.unscale)
        self.factors = self.factors._replace(unscale=1.0)

    def norm_of(self, wanted: NormWay) -> torch.Tensor:
        """Return the norm that torch would take of ``p.grad``, on the device."""
        owner, unscale, way = self.owner, self.factors.unscale, self.way(wanted)
        if self.value is not None:
            owner.norm_way = wanted
            return whole_norm(self.value.to(owner.place), way, in_fp32=self.has_master)
        if self.factors.clip is not None:
            owner.norm_way = wanted
            return self.home_norm(way, self.factors)
        if self.summed:
            self.land()  # its last job may have taken the norm
        if self.norm is None or self.norm.way != way:
            owner.share_norms(wanted)
        if self.norm is None or self.norm.way != way:
            self.norm = GradNorm(way, self.home_norm(way))
            owner.norm_way = wanted
        norm = self.norm.value.to(owner.place)
        return norm if unscale == 1.0 else norm * unscale

    def way(self, wanted: NormWay) -> NormWay:
        """Return one name for ways that are the same here: a norm in fp32 is of one tensor."""
        return NormWay(wanted.ord) if self.has_master or not has_lists(self.owner.place) else wanted

    def home_norm(self, way: NormWay, factors: Factors = NONE) -> torch.Tensor:
        """Take the norm of the bytes at home, times ``factors``, on the device, as torch does of
        ``p.grad``: whichever tier they are on, its bits are the same."""
        owner, home = self.owner, self.stored()
        narrow = home.dtype.itemsize < 4

        def norm_at(there: torch.Tensor) -> torch.Tensor:
            if factors != NONE:
                there = factors.apply(there.float() if narrow else there.clone())
            return whole_norm(there, way, in_fp32=self.has_master)

        if self.home.on_device and not self.home.is_share:  # whose parts meet on HOST
            return norm_at(home)
        product = 4 * home.numel() if factors != NONE else 0
        bucket = owner.homes.layout.bucket(self.segment)
        with owner.ring.brought_up(home, owner.place, bucket=bucket.id, more_bytes=product) as up:
            return norm_at(up)

    def defer(self, factors: Factors) -> None:
        """Leave a multiplication to the update: ``factors`` are those that now pend."""
        self.owner.early.check_write(self.segment)
        self.factors = factors

    def shown(self) -> torch.Tensor:
        """Return the gradient with its factors applied, in the precision of its norm."""
        if self.value is not None:
            return self.value
        home = self.stored()
        return self.factors.apply(home.float() if home.dtype.itemsize < 4 else home.clone())


class LazyGrad(Lazy):
    """A gradient at home on HOST that computes like a tensor on the parameter's device."""

    slot: GradSlot

    @classmethod
    def shortcut(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func is _NORM and _is_whole(args[0], args, kwargs):
            return args[0].slot.norm_of(NormWay(_order(args), listed=False))
        if func is _MUL and isinstance(args[0], LazyGrad) and _mul(*args, **kwargs):
            return args[0]
        if func is _ADD and isinstance(args[0], LazyGrad) and _add(*args, **kwargs):
            return args[0]
        if func is _NORMS and _is_whole(args[0][0], args, kwargs):  # one at a time
            return [args[0][0].slot.norm_of(NormWay(_order(args)))]
        if func in _FACTORS and isinstance(args[0][0], LazyGrad) and _mul(args[0][0], args[1]):
            return None
        return NotImplemented


takes_lists_of(LazyGrad)


def _add(grad: LazyGrad, other: Any, *, alpha: Any = 1) -> bool:
    """Add autograd's addend on HOST while backward goes on; False: not this way."""
    plain = isinstance(other, torch.Tensor) and not isinstance(other, LazyGrad)
    if not plain or alpha != 1 or other.layout is not torch.strided or not _called_by_autograd():
        return False
    grad.slot.owner.accumulate(grad.slot, other)
    return True


def _called_by_autograd() -> bool:
    """Whether an operation is the engine's own, and not of a hook that it runs.

    The engine calls from C++: the nearest Python frame then started it; its own threads have none.
    torch's pipelines add weights' gradients between passes, by code of their own.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (
        frame.f_code.co_name == "__torch_dispatch__" or frame.f_globals["__name__"] in _DISPATCHERS
    ):
        frame = frame.f_back
    if frame is not None and frame.f_globals["__name__"] in GRADIENT_ADDERS:
        return True
    return in_backward() and (frame is None or frame.f_code is ENGINE_CODE)


def _mul(grad: LazyGrad, other: Any) -> bool:
    """Leave a multiplication by one number to the update; False: not this way."""
    slot = grad.slot
    if isinstance(other, torch.Tensor):
        if other.dim() > 0 or isinstance(other, LazyGrad):
            return False
    elif not isinstance(other, (int, float)):
        return False
    if not slot.deferrable:
        return False
    place = other.device if isinstance(other, torch.Tensor) else "cpu"
    clip = torch.as_tensor(other, dtype=torch.float32, device=place)
    slot.defer(Factors(slot.factors.unscale, clip.clone()))
    return True


def _is_whole(grad: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a vector norm is of one whole gradient, in its own precision."""
    return isinstance(grad, LazyGrad) and len(args) <= 2 and not kwargs


def _order(args: Sequence[Any]) -> float:
    return float(args[1]) if len(args) > 1 else 2.0
