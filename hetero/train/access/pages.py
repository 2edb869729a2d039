"""Pages: the parameters of a model, bound while pinned, and the writes to them (floor 2)."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from hetero.errors import StateError
from hetero.memory.layout import Bucket, Layout, Segment
from hetero.memory.manager import ANY, ChunkManager, Positions
from hetero.train.model.binding import Binding
from hetero.train.update.masters import Masters


class ParameterPages:
    """The parameters of one model as pages: binds them to frames and notes writes."""

    def __init__(
        self, layout: Layout, *, manager: ChunkManager, masters: Masters, binding: Binding
    ) -> None:
        self.layout = layout
        self.manager = manager
        self.masters = masters
        self.binding = binding
        self._watched: dict[int, dict[int, int]] = {}  # versions that writes are compared with
        self._sources: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        look = weakref.WeakMethod(self._look)  # graphs refer to masters, and pages to modules

        def look_if_there(bucket: Bucket) -> None:
            if (found := look()) is not None:
                found(bucket)

        masters.look = look_if_there

    def _look(self, bucket: Bucket) -> None:
        """Note parameters that were written through a view since they were bound: a view has their
        version counter. Their replica is exposed, and comes home."""
        if bucket.has_master and not self.binding.bound[bucket.id]:
            for position in self.binding.written(bucket.id):
                self.masters.written(bucket.segments[position])

    def home(self, param: nn.Parameter) -> tuple[int, Segment]:
        """Return a parameter's bucket and its segment there."""
        return self.layout.home[self.binding.index[id(param)]]

    def bind(self, buckets: Sequence[int]) -> None:
        """Bind the parameters of pinned buckets; if one cannot be bound, unbind and unpin all."""
        if self._sources:
            self._check_sources()
        done = []
        try:
            for bucket in buckets:
                self._look(self.layout.buckets[bucket])
                self.binding.bind(self.manager.replicas[bucket])
                done.append(bucket)
        except BaseException:
            for bucket in done:
                self.binding.unbind(bucket)
            self.manager.unpin(buckets)
            raise

    def unbind(self, buckets: Sequence[int], only: Positions = ANY) -> None:
        """Take parameters off their frames, note writes to them, and unpin. ``only``: see there."""
        for bucket in buckets:
            for position in self.binding.unbind(bucket):
                self.note_write(self.layout.buckets[bucket].segments[position])
        self.manager.unpin(buckets, only)

    def watch(self, buckets: Sequence[int], only: Positions = ANY) -> None:
        """Look for views that outlived the block that bound these buckets."""
        unbound = (bucket for bucket in buckets if not self.binding.bound[bucket])
        self.manager.watch(unbound, only)

    def note_write(self, segment: Segment) -> None:
        """Note that a bound parameter was written."""
        self.manager.write(self.layout.home[segment.index][0], segment.offset, segment.end)
        self.masters.written(segment)

    def stepped(self, buckets: Iterable[int]) -> None:
        """`step` bumped the version counters of parameters: do not treat that as a write."""
        for bucket in buckets:
            if self.binding.bound[bucket] or self.layout.buckets[bucket].has_master:
                self.binding.written(bucket)
        for before in self._watched.values():
            before.update(self.versions(before))

    def versions(self, indices: Iterable[int]) -> dict[int, int]:
        """Return how often each parameter was written."""
        return {i: self.binding.version_of(self.binding.params[i]) for i in indices}

    @contextmanager
    def not_stepped(self, before: dict[int, int]) -> Iterator[None]:
        """Inside a block, let `step` raise these versions with the parameters'."""
        self._watched[id(before)] = before
        try:
            yield
        finally:
            del self._watched[id(before)]

    def flush(self) -> None:
        """Bring every written parameter home; bound ones stay bound."""
        if self._sources:
            self._check_sources()
        # in one order on all ranks, which write together
        for bucket, replica in sorted(self.manager.replicas.items()):
            if replica.pins:
                for position in self.binding.written(bucket):
                    self.note_write(self.layout.buckets[bucket].segments[position])
            self.manager.flush_and_wait(bucket)
        self.manager.adopt_home_writes()

    def assigned(self, param: nn.Parameter, value: torch.Tensor) -> None:
        """Note that ``value`` was assigned to ``param.data``: torch would alias the two."""
        self._sources[self.binding.index[id(param)]] = weakref.ref(value), value._version

    def _check_sources(self) -> None:
        """Raise StateError if a tensor assigned to ``p.data`` was written afterwards."""
        for index, (source, then) in list(self._sources.items()):
            value = source()
            if value is not None and value._version == then:
                continue
            del self._sources[index]
            if value is not None:
                name = self.layout.home[index][1].spec.name
                raise StateError(
                    f"the tensor that was assigned to {name!r}.data was written afterwards; torch"
                    " would have written the parameter",
                    advice="write to the parameter: p.data.copy_(value) or hetero.gathered(p)",
                )
