"""The one owner of saved-tensor hooks (floor 2).

A saved tensor that lies in a frame is packed as (parameter, offset, shape, stride, version) and
unpacked through a pin, so frames may be reused between forward and backward and transposed views
are right. Others are delegated to the enclosing pair of hooks (torch applies only the innermost
pair), or kept, with torch's own check against in-place changes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch

from hetero.errors import HeteroError, StateError
from hetero.internals import (
    SAVED_HOOKS_ENTER,
    Replacement,
    in_backward,
    is_faking,
    pop_saved_hooks,
    push_saved_hooks,
    top_saved_hooks,
)
from hetero.train.activations.held import GraphFootprint, Held, Kept
from hetero.train.activations.offload import Offload
from hetero.train.activations.proof import Digests
from hetero.train.model.binding import without_faults
from hetero.train.model.parts import Parted, Parts, PlainTensors

Pair = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""Hooks that pack and unpack what is saved."""


class SavedView(NamedTuple):
    """A saved view of a parameter; ``offset`` counts elements from the parameter's first."""

    param: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    version: int


class Delegated(NamedTuple):
    """A tensor packed by the enclosing hooks, and their unpack hook."""

    unpack: Callable[[Any], torch.Tensor]
    packed: Any
    held: Held | None
    again: Again | None
    """The unit's call that is repeated to unpack it."""


class Again(Protocol):
    """A unit's call that backward repeats."""

    def refusal(self, what: str) -> StateError:
        """Return the error that names the unit."""


class Views(Protocol):
    """The runtime's part in packing."""

    n_located: int
    """How many views of parameters were saved so far."""

    def locate(self, tensor: torch.Tensor, cdata: int) -> SavedView | None:
        """Return the position of a tensor with storage ``cdata`` in a frame; None if in none."""

    def resolve(self, saved: SavedView) -> torch.Tensor:
        """Return the saved view, its bucket pinned again."""


class Pack:
    """The pack hook; an instance knows its enclosing pair."""

    __slots__ = ("_footprint", "_offload", "_owner", "_passes_by", "_views", "outer")

    def __init__(
        self,
        owner: SavedTensors,
        outer: Pair | None,
        offload: Offload | None = None,
    ) -> None:
        self._owner = owner
        self._views = owner.views
        self._footprint = owner.footprint
        self._offload = offload
        self._passes_by = outer is None or _of_torch(outer[0])
        """Whether views of parameters need not come to the enclosing pair, which changes none."""
        self.outer = outer

    def __call__(self, tensor: torch.Tensor) -> Any:
        if tensor.layout is not torch.strided or tensor.is_nested:  # it has no strides
            if tensor.is_nested and self._owner.again is not None:  # torch's checkpoint asks shapes
                raise self._owner.again.refusal("saves a nested tensor")
            if self._owner.digests is not None:
                self._owner.digests.saw(tensor)
            return self._keep(tensor, id(tensor), 0)
        with without_faults():
            storage = tensor.untyped_storage()
            cdata = storage._cdata
            saved = self._views.locate(tensor, cdata)
        digests = self._owner.digests
        if digests is not None:
            digests.saw(tensor) if saved is None else digests.saw_view(saved)
            if not digests.keeps:
                return None
        if saved is not None and self.outer is not None and not self._passes_by:
            return self._through(tensor, saved, self.outer)
        return saved or self._keep(tensor, cdata, storage.nbytes())

    def _through(self, tensor: torch.Tensor, saved: SavedView, outer: Pair) -> Any:
        """Return what the enclosing pair makes of a view of a parameter; if it hands the view on as
        it is, that need not stay in its frame."""
        shown = tensor.detach()
        packed = outer[0](shown)
        if packed is shown:
            return Delegated(outer[1], saved, None, None)
        return Delegated(outer[1], packed, None, self._owner.again)

    def _keep(self, tensor: torch.Tensor, key: int, n_bytes: int) -> Any:
        if self.outer is None:
            offload = self._offload
            if offload is not None and offload.wants(tensor, n_bytes):
                return offload.keep(tensor, key, Held(self._footprint, key, n_bytes))
            # not the tensor itself: an output saved by its own node would never be freed (autograd
            # sets the node again when it unpacks)
            alias = tensor.detach() if tensor.grad_fn is not None else tensor
            return Kept(alias, Held(self._footprint, key, n_bytes))
        # An enclosing checkpoint drops tensors in forward and keeps them in recomputation.
        recomputed = in_backward()
        held = Held(self._footprint, key, n_bytes) if recomputed else None
        return Delegated(self.outer[1], self.outer[0](tensor), held, self._owner.again)


class PartPack(Pack):
    """The pack hook of a model with wrappers: of one, what is inside is packed."""

    __slots__ = ()

    def __call__(self, tensor: torch.Tensor) -> Any:
        parts = self._owner.parts
        local = parts.inside(tensor)
        if local is None or local.layout is not torch.strided:
            return super().__call__(tensor)
        with without_faults():
            storage = local.untyped_storage()
            cdata = storage._cdata
            saved = self._views.locate(local, cdata)
        digests = self._owner.digests
        if digests is not None:
            digests.saw(local) if saved is None else digests.saw_view(saved)
            if not digests.keeps:
                return None
        if saved is not None and self._passes_by:
            return Wrapped(saved, parts.wrapping(tensor))
        offload, n_bytes = self._offload, storage.nbytes()
        if self.outer is None and offload is not None and offload.wants(local, n_bytes):
            held = Held(self._footprint, cdata, n_bytes)
            return Wrapped(offload.keep(local, cdata, held), parts.wrapping(tensor))
        return self._keep(tensor, cdata, n_bytes)


class Wrapped(NamedTuple):
    """What a wrapper has inside, packed, and how it is wrapped."""

    packed: Any
    wrap: Parted


class NoViews:
    """`Views` of a model whose parameters stay in place."""

    n_located = 0

    def locate(self, tensor: torch.Tensor, cdata: int) -> None:
        """No tensor lies in a frame."""

    def resolve(self, saved: SavedView) -> torch.Tensor:
        """Nothing was located, so nothing is resolved."""
        raise StateError(f"parameter {saved.param} was saved as paged, and is not")


class Trial(threading.local):
    """Whether this thread makes a graph that nothing differentiates."""

    is_on = False


_trial = Trial()


class SavedTensors:
    """Pushes and pops our pair of hooks around code that differentiates parameters."""

    def __init__(
        self,
        views: Views,
        footprint: GraphFootprint | None = None,
        parts: Parts | None = None,
    ) -> None:
        self.footprint = footprint or GraphFootprint()
        self.parts = parts or PlainTensors()
        self._packs = PartPack if self.parts.kinds else Pack
        self.views = views
        self.digests: Digests | None = None
        """Digests all saved tensors, for a proof."""
        self.again: Again | None = None
        """The unit's running call, if only its inputs stay."""
        self._offload: Offload | None = None
        self._plain = self._packs(self, None)

    def lower(self, offload: Offload) -> None:
        """Let the saved tensors that ``offload`` wants go down."""
        self._offload = offload
        offload.footprint = self.footprint
        self._plain = self._packs(self, None, offload)

    @contextmanager
    def watched(self, digests: Digests | None, again: Again | None = None) -> Iterator[None]:
        """Let a block's saved tensors pass through our pair; ``digests`` records them."""
        before = self.digests, self.again, _trial.is_on
        self.digests, self.again = digests, again
        _trial.is_on = digests is not None and not digests.keeps
        pushed = self.push_where_differentiated()
        try:
            yield
        finally:
            if pushed:
                self.pop()
            self.digests, self.again, _trial.is_on = before

    def pack(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Return tensors packed as a graph keeps them: they may go down."""
        return [self._plain(tensor) for tensor in tensors]

    def unpack(self, packed: Sequence[Any]) -> list[torch.Tensor]:
        """Return packed tensors, detached; raise torch's error for a written one."""
        return [self._unpack(one).detach() for one in packed]

    def push_where_differentiated(self) -> bool:
        """Push our hooks if gradients are enabled; return whether they were pushed.

        Fake tensors (torch.export) need none. Raises StateError where torch disables such hooks.
        """
        if not torch.is_grad_enabled() or is_faking():
            return False
        try:
            self.push()
        except RuntimeError as error:
            raise StateError(
                f"saved-tensor hooks are disabled here ({error}); autograd would keep placeholders",
                advice="leave torch.autograd.graph.disable_saved_tensors_hooks around the model",
            ) from error
        return True

    def push(self) -> None:
        """Make our hooks the innermost pair, delegating to the present one."""
        push_saved_hooks(self._pack(), self._unpack)

    def pop(self) -> None:
        pop_saved_hooks()

    def _pack(self) -> Pack:
        top = top_saved_hooks(True)
        if top is None:
            return self._plain
        pack = top[0]
        if isinstance(pack, Pack) and pack._views is self.views:
            return pack
        return self._packs(self, top)

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, SavedView):
            return self.views.resolve(packed)
        if self._offload is not None:
            self._offload.awake()
        if isinstance(packed, Kept):
            return packed.get()
        if isinstance(packed, Delegated):
            if isinstance(packed.packed, SavedView):
                packed = packed._replace(packed=self.views.resolve(packed.packed))
            return self._delegated(packed)
        if isinstance(packed, Wrapped):
            return packed.wrap(self._unpack(packed.packed))
        raise StateError(f"a saved tensor came back as {type(packed).__name__}")

    @staticmethod
    def _delegated(packed: Delegated) -> torch.Tensor:
        if packed.again is None:
            return packed.unpack(packed.packed)
        try:
            return packed.unpack(packed.packed)
        except RuntimeError as error:  # torch's: inputs were written, or tensors differ
            if isinstance(error, (HeteroError, torch.OutOfMemoryError)):
                raise
            raise packed.again.refusal(f"ended in {str(error).splitlines()[0]!r}") from error


def inside_foreign_hooks() -> bool:
    """Return whether the innermost saved-tensor hooks are not ours.

    [Note: consistent counting]  A checkpoint counts the tensors its own hooks see, in forward and
    again in recomputation. A fault inside it must leave its pair alone both times; the aliases it
    keeps are leases.
    """
    top = top_saved_hooks(True)
    return top is not None and not isinstance(top[0], Pack)


def hooks_change_tensors() -> bool:
    """Whether saved-tensor hooks of the program's own are on, around ours or inside: they may give
    back other numbers than they were given."""
    top = top_saved_hooks(True)
    if top is not None and isinstance(top[0], Pack):
        top = top[0].outer
    return top is not None and not _of_torch(top[0])


def _of_torch(pack: Callable[[torch.Tensor], Any]) -> bool:
    """Whether a pack hook is torch's own, as of checkpoints, which gives back what it was given; a
    user's may round it."""
    module = getattr(pack, "hetero_guard", None) or getattr(pack, "__module__", None) or ""
    return module.partition(".")[0] == "torch"


def _for_aliases(enter: Callable[[Any], None]) -> Callable[[Any], None]:
    """Hand the user's own saved-tensor hooks an alias of a paged parameter, not the parameter.

    A pack hook may keep its argument, and the parameter is a placeholder by the time it is
    unpacked. The alias keeps its frame as a lease. A graph of a trial keeps nothing: what a node
    has saved of its own output would keep both alive, and backward never comes to free it.
    """

    def guarded(self: Any) -> None:
        pack = self.pack_hook
        if not hasattr(pack, "hetero_guard"):

            def alias(tensor: torch.Tensor) -> Any:
                paged = hasattr(type(tensor), "hetero_runtime")
                packed = pack(tensor.detach() if paged else tensor)
                return None if _trial.is_on else packed

            vars(alias)["hetero_guard"] = getattr(pack, "__module__", None) or "a user's"
            self.pack_hook = alias
        enter(self)

    return guarded


GUARDS: tuple[Replacement, ...] = (SAVED_HOOKS_ENTER.replaced(_for_aliases),)
"""Replaced functions of torch while parameters are pages."""
