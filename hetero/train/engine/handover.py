"""Parameters on their way into their homes, and out of them to where they came from (floor 2)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from hetero.device import trim_heap
from hetero.memory.homestore import HomeStore
from hetero.memory.layout import Layout
from hetero.memory.manager import PARAM
from hetero.train.engine.check import tables
from hetero.train.engine.source import Promises, Source
from hetero.train.gradients.slot import LazyGrad
from hetero.train.model import binding
from hetero.train.model.lazy import handle
from hetero.train.model.parts import Parts
from hetero.train.model.units import PART
from hetero.train.update.masters import Masters
from hetero.types import Kind

TRIM_BYTES = 16 * 2**20  # of freed originals, before the heap is asked to shrink


class Handover:
    """Where a model's parameters lay before `prepare`, in what dtype, and with what gradients."""

    def __init__(
        self, model: nn.Module, params: Sequence[nn.Parameter], layout: Layout, parts: Parts
    ) -> None:
        self.model = model
        self._parts = parts
        self.params = params
        self._was_empty = [p.is_meta for p in params]  # of `empty_init`, or of `from_pretrained`
        self.device = torch.device("cpu") if any(self._was_empty) else params[0].device
        self._source: Source | Promises | None = None
        self._layout = layout
        self._dtypes = [p.dtype for p in params]
        self._grads: dict[int, torch.Tensor] = {}
        self._fetched: dict[int, torch.Tensor] = {}
        self._moved: set[int] = set()  # those whose values are at home

    def move_in(
        self, store: HomeStore, masters: Masters, place: torch.device, weights: str | None
    ) -> None:
        """Copy every parameter to its home and point it there; the originals are freed.

        Args:
            place: of the buffers, and of gradients that parameters come with.
            weights: a file or directory with values that replace the model's own.
        """
        if weights is not None:
            self._source = from_files = Source(self.model, weights, self._parts)
            from_files.read_buffers()
        elif any(self._was_empty):
            self._source = Promises(self.params)
        source = self._source
        if place.type == "meta":  # of a plan: what has no bytes cannot come back
            self.device = place
        move_buffers(self.model.modules(), place)
        move_tables(self.model, place)
        freed = 0
        for bucket in self._layout.buckets:
            home = store.get(Kind.PARAM, PARAM, bucket)
            for segment in bucket.segments:
                param = self.params[segment.index]
                grad, param.grad = param.grad, None
                own = self._parts.local(param)
                freed += own.nbytes
                if source is not None and source.keeps(segment.index):
                    source.into(masters, segment)
                else:
                    masters.assign(segment, own.detach())
                self._parts.point(param, home.view(segment))
                self._moved.add(segment.index)
                if grad is not None:
                    self._grads[segment.index] = grad.to(place)
            if freed > TRIM_BYTES or bucket.id == self._layout.buckets[-1].id:
                freed = 0
                trim_heap()
        if source is not None:
            source.close()

    def give_back_grads(self, take: Callable[[int, torch.Tensor], None] | None = None) -> None:
        """Give parameters the gradients that they came with.

        ``take`` takes those of weights with masters home, in their own precision: torch lets no
        parameter have a gradient of another dtype.
        """
        for index, grad in list(self._grads.items()):
            param, (bucket, _) = self.params[index], self._layout.home[index]
            if grad.dtype == param.dtype or take is None:
                binding.set_grad(param, grad)
            elif self._layout.buckets[bucket].has_master:
                take(index, self._parts.value(param, grad))
            else:  # frozen: no step reads it
                binding.set_grad(param, grad.to(param.dtype))
            del self._grads[index]

    def fetch(self, store: HomeStore, masters: Masters) -> None:
        """Read from disk the values that `move_out` needs; raises StorageError."""
        for index, (bucket_id, segment) in enumerate(self._layout.home):
            grad = self._parts.grad(self.params[index])
            if isinstance(grad, LazyGrad):
                grad.slot.keep()
            bucket, home = self._layout.buckets[bucket_id], store.homes.get((PARAM, bucket_id))
            if home is None or index not in self._moved:
                continue
            if bucket.has_master:
                if not (home.stays and masters.low(bucket).stays):
                    self._fetched[index] = masters.value(segment)
            elif not home.stays:
                self._fetched[index] = home.read(segment)

    def give_up(self) -> None:
        """Make every parameter plain again, with NaN as its values."""
        for index, param in enumerate(self.params):
            dtype = self._dtypes[index]
            nan = torch.full((), math.nan, dtype=dtype, device=self.device)
            binding.set_grad(param, None)
            self._parts.plain(param, nan.expand(self._parts.local(param).shape))
        self._fetched.clear()
        move_buffers((m for m in self.model.modules() if PART not in m.__dict__), self.device)

    def move_out(
        self, store: HomeStore, masters: Masters, *, resident: bool, failed: bool = False
    ) -> None:
        """Make every parameter plain again, bucket by bucket, on the device it came from.

        If ``failed``, one that was empty is empty again: there may be no room for its value. A
        coded one comes back decoded: its original is freed. Disks were read before, by `fetch`.
        """
        for index, (bucket_id, segment) in enumerate(self._layout.home):
            bucket = self._layout.buckets[bucket_id]
            home = store.homes.get((PARAM, bucket_id))
            param, dtype = self.params[index], self._dtypes[index]
            grad = self._grads.pop(index, None)
            grad = kept(param, self._parts) if grad is None else grad
            binding.set_grad(param, None)
            if failed and self._was_empty[index]:
                self._parts.empty(param, dtype)
            elif home is not None and index in self._moved:
                if index in self._fetched:
                    value = self._fetched.pop(index)
                elif bucket.has_master:
                    value = masters.value(segment)
                else:
                    own = self._parts.local(param)
                    value = own.detach() if resident else handle(store, home, segment)
                self._parts.plain(param, value.to(dtype).to(self.device, copy=True))
            param.grad = None if grad is None else grad.to(self.device, param.dtype)
            if segment.position == len(bucket.segments) - 1:
                store.drop(PARAM, bucket_id)
        if failed and self._source is not None:
            self._source.close()
            self._source.renew(self.params)
        # parts of another prepared model stay where that one computes
        move_buffers((m for m in self.model.modules() if PART not in m.__dict__), self.device)
        move_tables(self.model, self.device)


def kept(param: nn.Parameter, parts: Parts) -> torch.Tensor | None:
    """Return a parameter's gradient, out of its home."""
    grad = parts.grad(param)
    if isinstance(grad, LazyGrad):
        return parts.as_grad(param, grad.slot.keep())
    return binding.get_grad(param)


def move_buffers(modules: Iterable[nn.Module], place: torch.device) -> None:
    """Put modules' own buffers on a device; without bytes, as in a plan, they stay."""
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != place and not buffer.is_meta:
                module._buffers[name] = buffer.to(place)


def move_tables(model: nn.Module, place: torch.device) -> None:
    """Put parameters that are not paged on a device."""
    for _, param in tables(model):
        if param.device != place:
            binding.point(param, param.detach().to(place))
