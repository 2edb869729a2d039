"""The one owner of saved-tensor hooks (floor 2).

A saved tensor that lies in a frame is packed as (parameter, offset, shape, stride, version) and
unpacked through a pin, so frames may be reused between forward and backward and transposed views
are right. Everything else is delegated to the enclosing pair of hooks (torch applies only the
innermost pair), or kept, with torch's own check against in-place changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from hetero.errors import StateError
from hetero.train.swizzle import plainly

_autograd = torch._C._autograd
_top = _autograd._top_saved_tensors_default_hooks
CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace"
    " operation: {what} is at version {now}; expected version {then} instead"
)


class Saved(NamedTuple):
    """A saved view of a parameter; ``offset`` counts elements from the parameter's first."""

    param: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    version: int


class Held:
    """What a graph keeps: counted in the footprint for as long as the graph holds it."""

    __slots__ = ("_footprint", "_key")

    def __init__(self, footprint: Footprint, key: int, n_bytes: int) -> None:
        self._footprint = footprint
        self._key = key
        footprint.hold(key, n_bytes)

    def __del__(self) -> None:
        self._footprint.drop(self._key)


class Kept(NamedTuple):
    """A tensor as it is, with the version it had."""

    tensor: torch.Tensor
    version: int
    held: Held


class Delegated(NamedTuple):
    """What the enclosing hooks made of a tensor, and how they read it back."""

    unpack: Callable[[Any], torch.Tensor]
    packed: Any
    held: Held | None


class Swizzled(Protocol):
    """What packing asks of the runtime."""

    def locate(self, tensor: torch.Tensor, cdata: int) -> Saved | None:
        """Return where a tensor with storage ``cdata`` lies in a frame, None for any other."""

    def resolve(self, saved: Saved) -> torch.Tensor:
        """Return the saved view, pinned in again."""


class Footprint:
    """Bytes that autograd graphs hold, by distinct storage, and their peak."""

    __slots__ = ("_uses", "largest_bytes", "live_bytes", "output_bytes", "peak_bytes")

    def __init__(self) -> None:
        self._uses: dict[int, list[int]] = {}
        self.live_bytes = 0
        self.peak_bytes = 0
        self.largest_bytes = 0
        self.output_bytes = 0

    @property
    def bound_bytes(self) -> int:
        """Bytes held at the peak, with a bound on temporaries.

        Measured: storages that graphs hold, those recomputed in backward among them, and the
        model's outputs. Bounded: two tensors of the largest size in flight in backward, and the
        loss's copy and gradient of the outputs (a head's float upcast peaks at three times its
        logits).
        """
        return self.peak_bytes + 2 * self.largest_bytes + 3 * self.output_bytes

    def hold(self, key: int, n_bytes: int) -> None:
        """A graph holds a storage once more."""
        row = self._uses.get(key)
        if row is not None:
            row[0] += 1
            return
        self._uses[key] = [1, n_bytes]
        self.live_bytes += n_bytes
        self.largest_bytes = max(self.largest_bytes, n_bytes)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def drop(self, key: int) -> None:
        """A graph lets go of a storage."""
        row = self._uses[key]
        row[0] -= 1
        if row[0] == 0:
            self.live_bytes -= row[1]
            del self._uses[key]

    def restart(self) -> None:
        """Begin a new measurement; what is held stays counted."""
        self.peak_bytes = self.live_bytes
        self.largest_bytes = self.output_bytes = 0


class Pack:
    """The pack hook; an instance knows the pair that encloses it."""

    __slots__ = ("_footprint", "_swizzled", "outer")

    def __init__(
        self,
        swizzled: Swizzled,
        footprint: Footprint,
        outer: tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None,
    ) -> None:
        self._swizzled = swizzled
        self._footprint = footprint
        self.outer = outer

    def __call__(self, tensor: torch.Tensor) -> Any:
        if tensor.layout is not torch.strided:  # a sparse activation: no storage to look at
            return self._keep(tensor, id(tensor), 0)
        with plainly():
            storage = tensor.untyped_storage()
        cdata = storage._cdata
        saved = self._swizzled.locate(tensor, cdata)
        if saved is not None:
            return saved
        return self._keep(tensor, cdata, storage.nbytes())

    def _keep(self, tensor: torch.Tensor, key: int, n_bytes: int) -> Any:
        if self.outer is None:
            # not the tensor itself: an output that its own node saves would never go (autograd puts
            # the node back when it unpacks)
            alias = tensor.detach() if tensor.grad_fn is not None else tensor
            return Kept(alias, tensor._version, Held(self._footprint, key, n_bytes))
        # An enclosing checkpoint drops what it is given in forward and keeps it in recomputation.
        recomputed = torch._C._current_graph_task_id() != -1
        held = Held(self._footprint, key, n_bytes) if recomputed else None
        return Delegated(self.outer[1], self.outer[0](tensor), held)


class SavedTensors:
    """Pushes and pops our pair of hooks around whatever differentiates parameters."""

    def __init__(self, swizzled: Swizzled) -> None:
        self.footprint = Footprint()
        self._swizzled = swizzled
        self._plain = Pack(swizzled, self.footprint, None)

    def push(self) -> None:
        """Make our hooks the innermost pair, delegating to the present one."""
        _autograd._push_saved_tensors_default_hooks(self._pack(), self._unpack)

    def pop(self) -> None:
        """Take our hooks off again."""
        _autograd._pop_saved_tensors_default_hooks()

    def _pack(self) -> Pack:
        top = _top(True)
        if top is None:
            return self._plain
        pack = top[0]
        if isinstance(pack, Pack) and pack._swizzled is self._swizzled:
            return pack
        return Pack(self._swizzled, self.footprint, top)

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, Saved):
            return self._swizzled.resolve(packed)
        if isinstance(packed, Kept):
            tensor, then, _ = packed
            if tensor._version != then:
                what = f"[{tensor.type()} {list(tensor.shape)}]"
                raise RuntimeError(CHANGED.format(what=what, now=tensor._version, then=then))
            return tensor
        if isinstance(packed, Delegated):
            return packed.unpack(packed.packed)
        raise StateError(f"a saved tensor came back as {type(packed).__name__}")


def foreign() -> bool:
    """Return whether somebody else's saved-tensor hooks are innermost.

    [Note: consistent counting]  A checkpoint counts the tensors its own hooks see, in forward and
    again in recomputation. A fault inside such a region must leave its pair alone both times; the
    aliases it keeps are leases.
    """
    top = _top(True)
    return top is not None and not isinstance(top[0], Pack)


def guard_hooks() -> None:
    """Hand the user's own saved-tensor hooks an alias of a paged parameter, not the parameter.

    A pack hook that keeps what it is given would keep the Parameter object, which is a placeholder
    by the time it is unpacked. The alias keeps its frame as a lease.
    """
    owner = torch.autograd.graph.saved_tensors_hooks
    if hasattr(owner.__enter__, "hetero_guard"):
        return
    enter = owner.__enter__

    def guarded(self: Any) -> None:
        pack = self.pack_hook
        if not hasattr(pack, "hetero_guard"):

            def alias(tensor: torch.Tensor) -> Any:
                paged = hasattr(type(tensor), "hetero_runtime")
                return pack(tensor.detach() if paged else tensor)

            alias.hetero_guard = True  # type: ignore[attr-defined]
            self.pack_hook = alias
        enter(self)

    guarded.hetero_guard = True  # type: ignore[attr-defined]
    owner.__enter__ = guarded  # type: ignore[method-assign]
