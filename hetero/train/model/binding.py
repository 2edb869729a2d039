"""Binding parameters to frames: the only place that assigns ``param.data`` (floor 2).

A bound parameter is a view into its replica. An unbound one is a single NaN, expanded to the
parameter's shape, under a class whose ``__torch_function__`` faults the bytes in (faults.py). The
class follows the binding, not residency, so nothing outside an access reads a frame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from inspect import getattr_static

import torch
from torch import nn

from hetero.errors import StateError
from hetero.internals import version_of, without_torch_function
from hetero.memory.layout import Layout
from hetero.memory.replica import Replica

_DATA = getattr_static(torch.Tensor, "data")
read_data: Callable[[torch.Tensor], torch.Tensor] = _DATA.__get__
"""Return ``param.data``, bound or not."""
_set_data = _DATA.__set__
without_faults = without_torch_function


def placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return one poison element expanded to ``shape``, in a storage of its own."""
    if dtype.is_floating_point or dtype.is_complex:
        element = torch.full((), float("nan"), dtype=dtype, device=device)
    else:
        element = torch.full((), 1, dtype=dtype, device=device)
    return element.expand(tuple(shape))


class Binding:
    """The parameters of one model, by bucket, each bound or a placeholder."""

    version_of: Callable[[torch.Tensor], int] = staticmethod(version_of)
    """Return how often a parameter was written."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        layout: Layout,
        device: torch.device,
        paged: type[nn.Parameter],
        pinned: type[nn.Parameter],
    ) -> None:
        self.params = list(params)
        self.layout = layout
        self._classes = (paged, pinned)
        specs = [segment.spec for _, segment in layout.home]
        self._placeholders = [placeholder(s.shape, s.dtype, device) for s in specs]
        self._of_bucket = [[self.params[s.index] for s in b.segments] for b in layout.buckets]
        self._empty = [[self._placeholders[s.index] for s in b.segments] for b in layout.buckets]
        self._versions: list[list[int]] = [[] for _ in layout.buckets]
        self.bound = [0] * len(layout.buckets)
        self.index = {id(p): i for i, p in enumerate(self.params)}
        self.by_placeholder = {
            p.untyped_storage()._cdata: i for i, p in enumerate(self._placeholders)
        }

    def bind(self, replica: Replica) -> None:
        """Point a bucket's parameters at its replica; nested bindings are counted."""
        bucket = replica.bucket.id
        self.bound[bucket] += 1
        if self.bound[bucket] > 1:
            return
        paged, pinned = self._classes
        versions: list[int] = []
        for param, view in zip(self._of_bucket[bucket], replica.views, strict=True):
            if param.__class__ is not paged:
                raise self._tampered(bucket, len(versions))
            param.__class__ = pinned
            _set_data(param, view)
            versions.append(version_of(param))
        self._versions[bucket] = versions

    def unbind(self, bucket: int) -> list[int]:
        """Take parameters off the replica; return positions of those written meanwhile."""
        self.bound[bucket] -= 1
        if self.bound[bucket] > 0:
            return []
        paged = self._classes[0]
        written = self.written(bucket)
        for param, empty in zip(self._of_bucket[bucket], self._empty[bucket], strict=True):
            _set_data(param, empty)
            param.__class__ = paged
        return written

    def written(self, bucket: int) -> list[int]:
        """Return positions of parameters written since they were first bound, or this was asked."""
        found, versions = [], self._versions[bucket]
        for position, param in enumerate(self._of_bucket[bucket] if versions else ()):
            now = self.version_of(param)
            if now != versions[position]:
                found.append(position)
                versions[position] = now
        return found

    def count(self, bucket: int) -> int:
        return len(self._of_bucket[bucket])

    def _tampered(self, bucket: int, position: int) -> StateError:
        self.bound[bucket] -= 1
        self._empty_first(bucket, position)
        name = self.layout.buckets[bucket].segments[position].spec.name
        return StateError(
            f"parameter {name!r} is no longer the object that was prepared (swapped or converted)",
            advice="hetero.release the model before replacing parameters",
        )

    def _empty_first(self, bucket: int, n: int) -> None:
        """Take the first parameters of a bucket off their replica."""
        empty = self._empty[bucket]
        for param, blank in zip(self._of_bucket[bucket][:n], empty, strict=False):
            _set_data(param, blank)
            param.__class__ = self._classes[0]

    def page_all(self) -> None:
        """Make all plain parameters unbound, for the first time; homes hold their values."""
        for param, empty in zip(self.params, self._placeholders, strict=True):
            _set_data(param, empty)
            param.__class__ = self._classes[0]


class PartBinding(Binding):
    """Parameters that may be wrappers: what is inside is bound (see parts.py).

    Args:
        insides: the plain tensor of each parameter.
        classes: the unbound and the bound class of each.
        version_of: as `Binding.version_of`.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        layout: Layout,
        device: torch.device,
        *,
        insides: Sequence[torch.Tensor],
        classes: Sequence[tuple[type, type]],
        version_of: Callable[[torch.Tensor], int],
    ) -> None:
        super().__init__(params, layout, device, nn.Parameter, nn.Parameter)
        self._insides = insides
        self._class_of = classes
        self.version_of = version_of

    def bind(self, replica: Replica) -> None:
        bucket = replica.bucket.id
        self.bound[bucket] += 1
        if self.bound[bucket] > 1:
            return
        versions: list[int] = []
        for segment, view in zip(replica.bucket.segments, replica.views, strict=True):
            param, (paged, pinned) = self.params[segment.index], self._class_of[segment.index]
            if param.__class__ is not paged:
                raise self._tampered(bucket, len(versions))
            param.__class__ = pinned
            _set_data(self._insides[segment.index], view)
            versions.append(self.version_of(param))
        self._versions[bucket] = versions

    def unbind(self, bucket: int) -> list[int]:
        self.bound[bucket] -= 1
        if self.bound[bucket] > 0:
            return []
        written = self.written(bucket)
        self._empty_first(bucket, self.count(bucket))
        return written

    def _empty_first(self, bucket: int, n: int) -> None:
        for segment in self.layout.buckets[bucket].segments[:n]:
            _set_data(self._insides[segment.index], self._placeholders[segment.index])
            self.params[segment.index].__class__ = self._class_of[segment.index][0]

    def page_all(self) -> None:
        for bucket in range(len(self.layout.buckets)):
            self._empty_first(bucket, self.count(bucket))


def point(param: nn.Parameter, value: torch.Tensor) -> None:
    """Point a plain parameter at ``value``, which holds its numbers."""
    if param.is_meta:  # its data cannot change device, but the whole tensor can
        torch.utils.swap_tensors(param, nn.Parameter(value, param.requires_grad))
        return
    _set_data(param, value)


def empty(param: nn.Parameter, dtype: torch.dtype) -> None:
    """Make a parameter that came on meta plain, and put it back there."""
    param.__class__ = nn.Parameter
    if not param.is_meta:
        blank = torch.empty_like(param, dtype=dtype, device="meta")
        torch.utils.swap_tensors(param, nn.Parameter(blank, param.requires_grad))


def plain(param: nn.Parameter, value: torch.Tensor) -> None:
    """Make any parameter plain, with ``value`` as its data."""
    param.__class__ = nn.Parameter
    _set_data(param, value)


def take_data(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Let a tensor of a wrapper have the data of ``other``."""
    _set_data(tensor, other)


def version(param: torch.Tensor) -> int:
    """Return a parameter's version counter, bound or not."""
    with without_faults():
        return int(param._version)


def get_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Return ``param.grad`` without a fault."""
    with without_faults():
        return param.grad


def get_grads(params: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the ``grad`` of each parameter without a fault."""
    with without_faults():
        return [param.grad for param in params]


def set_grad(param: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Set ``param.grad`` without a fault."""
    with without_faults():
        param.grad = grad
