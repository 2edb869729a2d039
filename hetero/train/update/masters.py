"""Precision: 2-byte working weights, the exact fp32 master of each, and loss scaling (floor 2).

Under "bf16" a master is kept in two halves: the working weight is the upper one, rounded to
nearest with ties away from zero, and an int16 home ("low") holds the difference, so that the two
take the master's own 4 bytes. Under "fp16", whose bits are not a part of fp32's, the home ("low")
is the fp32 master itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from typing import Protocol

import torch
from torch import nn

from hetero.errors import StateError
from hetero.memory.extent import PinUse, overlap
from hetero.memory.home import Home, memory_of
from hetero.memory.homestore import HomeStore
from hetero.memory.layout import Bucket, Layout, Segment, row
from hetero.train.model.host_work import host_work
from hetero.train.model.lazy import handle
from hetero.train.update.former import Former, FormerWeights
from hetero.train.update.kernel import join, split_
from hetero.types import Kind, noop

WORKING = {"bf16": torch.bfloat16, "fp16": torch.float16}
CONVERTED = (torch.float32, torch.bfloat16, torch.float16)
LOW = "low"


def working_dtypes(
    model: nn.Module, precision: str, keep_fp32: Sequence[str]
) -> dict[int, torch.dtype]:
    """Return the dtype of every parameter while the model computes, by the parameter's id."""
    kept = named_by(model, keep_fp32)
    working = WORKING.get(precision)
    found: dict[int, torch.dtype] = {}
    for param in model.parameters():
        found[id(param)] = param.dtype
        if working is not None and param.dtype in CONVERTED:
            found[id(param)] = torch.float32 if id(param) in kept else working
    return found


def named_by(model: nn.Module, patterns: Sequence[str]) -> set[int]:
    """Return the ids of the parameters of all modules that a pattern names."""
    return {
        id(param)
        for name, module in model.named_modules(remove_duplicate=False)
        if any(fnmatchcase(name, pattern) for pattern in patterns)
        for param in module.parameters()
    }


def low_dtype(precision: str) -> torch.dtype | None:
    """Return the dtype of ``low``; None at a precision without masters."""
    return {"bf16": torch.int16, "fp16": torch.float32}.get(precision)


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether two parts of 2-byte weights are the same; without bytes they are."""
    if ours.is_meta:
        return True
    return torch.equal(ours.view(torch.int16), theirs.to(ours.device).view(torch.int16))


def parts_of(bucket: Bucket, start: int, end: int) -> Iterator[tuple[Segment, slice]]:
    """Yield the parameters that have some of elements [start, end) of a bucket, and which."""
    for segment in bucket.segments:
        first, last = max(start, segment.offset), min(end, segment.end)
        if first < last:
            yield segment, slice(first, last)


def own_low(weights: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return the ``low`` of weights that are their own masters."""
    return weights.float() if low.dtype is torch.float32 else torch.zeros_like(low)


def write_everywhere(home: Home, segment: Segment, value: torch.Tensor) -> None:
    """Write a value to a segment of a home, in the memory of the ranks that keep it."""
    flat = row(home.empty(segment).copy_(value))
    for run, part in home.everywhere(segment.offset, segment.end):
        part.copy_(flat[segment.inside(run)])


class Masters:
    """The fp32 masters of all trainable buckets of working weights."""

    def __init__(self, precision: str, layout: Layout, store: HomeStore) -> None:
        self._dtype = low_dtype(precision)
        self._working = WORKING.get(precision)
        self._layout = layout
        self._store = store
        self._loaded: set[int] = set()  # parameters whose difference came from a state dict
        self._written: set[int] = set()  # parameters written on the device
        self._former = FormerWeights()  # see [Note: what masters follow]
        self.look: Callable[[Bucket], None] = noop
        """Calls `written` for weights of a bucket that were written through a view, if any."""

    @property
    def chunk_numel(self) -> int:
        """Elements of a chunk."""
        return self._layout.chunk_numel

    def _is_working(self, bucket: Bucket) -> bool:
        """Whether weights are rounded to the working dtype here, and not by their codec."""
        return bucket.dtype is self._working and bucket.codec.exact

    def low(self, bucket: Bucket) -> Home:
        """Return the ``low`` home of a bucket."""
        return self._store.get(Kind.MASTER, LOW, bucket, self._dtype)

    def assign(self, segment: Segment, value: torch.Tensor) -> None:
        """Make ``value`` a parameter's master, or without one its weight, rounded.

        A value of the working dtype keeps a difference that a state dict has loaded.
        """
        bucket = self._layout.bucket(segment)
        home = self._home(bucket)
        if not self._is_working(bucket):
            home.write(segment, value)
            return
        if value.dtype is self._working:
            if self._same(home, segment, value):
                return  # the same weights: their masters stay
            with home.changes.meeting(segment.spec.name):
                home.write(segment, value)
                if segment.index in self._loaded:  # the difference belongs to the weights loaded
                    self._loaded.discard(segment.index)
                    self._former.forget(segment.index, segment.offset, segment.end)
                else:
                    self.reset(segment)
            return
        exact = home.empty(segment, torch.float32).copy_(value.detach())
        with home.changes.meeting(segment.spec.name):
            self._split(segment, segment.offset, row(exact))
        self._former.forget(segment.index, segment.offset, segment.end)

    def assign_everywhere(self, segment: Segment, value: torch.Tensor) -> None:
        """As `assign`, of all elements, in the memory of the ranks that keep them; nothing else
        uses it meanwhile."""
        bucket = self._layout.bucket(segment)
        home = self._home(bucket)
        place = segment.offset, segment.end
        if not bucket.has_master:
            write_everywhere(home, segment, value)
            return
        flat = row(home.empty(segment, torch.float32).copy_(value))
        both = zip(home.everywhere(*place), self.low(bucket).everywhere(*place), strict=True)
        for (run, working), (_, low) in both:
            split_(flat[segment.inside(run)], working, low)

    def room(self, segment: Segment, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the memory for a parameter's value of a dtype; None if it must be converted."""
        bucket = self._layout.bucket(segment)
        if bucket.dtype is not dtype or bucket.dtype is self._working:
            return None
        return memory_of(self._home(bucket), segment)

    def own(self, segment: Segment) -> slice:
        """Return the elements of a parameter that this rank keeps, in memory order."""
        home = self._home(self._layout.bucket(segment))
        kept = overlap(slice(segment.offset, segment.end), home.kept)
        return segment.inside(kept)

    def assign_run(self, segment: Segment, start: int, values: torch.Tensor) -> None:
        """As `assign`, for elements in memory order from ``start`` on, without a master yet."""
        bucket = self._layout.bucket(segment)
        if self._is_working(bucket):
            self._split(segment, segment.offset + start, values.float())
        else:
            self._home(bucket).write_run(segment, start, values)

    def _split(self, segment: Segment, first: int, exact: torch.Tensor) -> None:
        """Write fp32 numbers as working weights and ``low``."""
        bucket = self._layout.bucket(segment)
        home = self._home(bucket)
        for run in self._store.runs(
            first, first + exact.numel(), *self._uses(bucket, PinUse.FRESH)
        ):
            working = home.part(run)
            if bucket.has_master:
                low = self.low(bucket).part(run)
            else:  # a frozen weight: rounded the same way, the rest dropped
                low = torch.empty_like(working, dtype=self._dtype)
            values = exact[run.start - first : run.stop - first]
            split_(values.to(working.device), working, low)
        for written, _ in self._uses(bucket, PinUse.FRESH):
            written.rewritten()

    def value(self, segment: Segment) -> torch.Tensor:
        """Return a parameter's master, or without one its weight, as an fp32 tensor of its own."""
        bucket = self._layout.bucket(segment)
        self.follow_for_now([segment])
        home = self._home(bucket)
        exact = home.empty(segment, torch.float32)
        flat = row(exact)
        for run, part in home.parts(segment.offset, segment.end, PinUse.READ):
            if not bucket.has_master:
                flat[segment.inside(run)].copy_(part)
                continue
            for inner, low in self.low(bucket).parts(run.start, run.stop, PinUse.READ):
                upper = part[inner.start - run.start : inner.stop - run.start]
                flat[segment.inside(inner)].copy_(join(upper, low))
        # weights in RAM may be read on all ranks, while others keep parts of ``low`` on disk
        last = self.low(bucket) if bucket.has_master else home
        return last.complete(segment, exact)

    def _home(self, bucket: Bucket) -> Home:
        return self._store.homes[Kind.PARAM.value, bucket.id]

    def _uses(self, bucket: Bucket, use: PinUse) -> list[tuple[Home, PinUse]]:
        """Return the homes of a bucket's masters, or of its weights that have none."""
        homes = [self._home(bucket), *([self.low(bucket)] if bucket.has_master else [])]
        return [(home, use) for home in homes]

    def _same(self, home: Home, segment: Segment, value: torch.Tensor) -> bool:
        """Whether a value has the bits that are at home."""
        if home.device.type == "meta":
            return False
        there = home.value(segment)
        # first the last row: of a new home that is enough, and nothing comes through pageable RAM
        for rows in (slice(-1, None), ...) if there.dim() else (...,):
            if not same_bits(there[rows], value[rows]):
                return False
        return True

    def reset(self, segment: Segment) -> None:
        """A working weight was written: it is its own master now."""
        bucket = self._layout.bucket(segment)
        if bucket.has_master:
            home, low = self._home(bucket), self.low(bucket)
            uses = (home, PinUse.READ), (low, PinUse.FRESH)
            with host_work():
                for run in self._store.runs(segment.offset, segment.end, *uses):
                    low.part(run).copy_(own_low(home.part(run), low.part(run)))
            low.rewritten()
            self._former.forget(segment.index, segment.offset, segment.end)

    def written(self, segment: Segment) -> None:
        """A working weight was written, perhaps as a whole; it comes home next."""
        if self._layout.bucket(segment).has_master:
            self._written.add(segment.index)

    def not_written(self, segment: Segment) -> None:
        """A write was given up before it came home."""
        self._written.discard(segment.index)

    def overwriting(self, bucket: Bucket, start: int, end: int) -> Callable[[], None]:
        """Weights [start, end) at home are about to be overwritten; call the result afterwards.

        If a disk fails in between, the next try still knows what they were.
        """
        if not bucket.has_master:
            return lambda: None
        self.look(bucket)
        with host_work():
            before = self._home(bucket).part(slice(start, end))
            for segment, run in parts_of(bucket, start, end):
                place = slice(run.start - start, run.stop - start)
                self._former.keep(segment.index, run.start, before[place])

        def landed() -> None:
            kept = self._home(bucket).kept
            for segment in bucket.segments:
                # what this rank keeps of such a weight comes home as a whole, its end last
                last = min(segment.end, kept.stop)
                if start < last <= end and segment.index in self._written:
                    self.reset(segment)
                    self._written.discard(segment.index)
            with host_work():
                for segment, run in parts_of(bucket, start, end):
                    self._came(bucket, segment, run)

        return landed

    def wrote(self, bucket: Bucket, before: torch.Tensor | None) -> None:
        """Weights were written at home; ``before``: what they were, if more than those of `written`
        may have been."""
        if not bucket.has_master:
            return
        self.look(bucket)
        for segment in bucket.segments:
            if segment.index in self._written:
                self.reset(segment)
                self._written.discard(segment.index)
            elif before is not None:
                self.was(segment, before[segment.offset : segment.end])

    def was(self, segment: Segment, before: torch.Tensor) -> None:
        """A weight at home, in memory order, may differ from ``before``."""
        bucket, place = self._layout.bucket(segment), slice(segment.offset, segment.end)
        with host_work():
            if not same_bits(self._home(bucket).part(place), before):
                self._former.keep(segment.index, place.start, before)
            self._came(bucket, segment, place)

    def _came(self, bucket: Bucket, segment: Segment, run: slice) -> None:
        """Elements of a weight, which can be read, may differ from what they were."""
        home, index = self._home(bucket), segment.index
        for former in self._former.of(index, run.start, run.stop):
            place = former.start, former.end
            is_same = same_bits(home.part(slice(*place)), former.weights)
            if former.low is not None or (self._layout.is_shared and not is_same):
                self._follow(bucket, self._with_low(bucket, segment, former))
            if is_same:
                self._former.forget(index, *place)
        self._former.to_ram(index)

    def _with_low(self, bucket: Bucket, segment: Segment, former: Former) -> Former:
        """Remember the ``low`` of former weights, too, before it follows."""
        if former.low is not None:
            return former
        low = self.low(bucket)
        runs = self._store.runs(former.start, former.end, (low, PinUse.READ))
        former = former.copy()._replace(low=torch.cat([low.part(run).clone() for run in runs]))
        self._former.forget(segment.index, former.start, former.end)
        self._former.put(segment.index, former)
        return former

    def follow(self, bucket_ids: Collection[int] | None = None) -> None:
        """An update is about to use masters, of some buckets or of all: weights that differ from
        what they were are their own from now on; see [Note: what masters follow]."""
        for index in self._former:
            bucket_id, segment = self._layout.home[index]
            if bucket_ids is None or bucket_id in bucket_ids:
                for former in self._former.of(index, segment.offset, segment.end):
                    if former.low is None:
                        self._follow(self._layout.buckets[bucket_id], former)
                    self._former.forget(index, former.start, former.end)

    def follow_for_now(self, segments: Iterable[Segment] | None = None) -> None:
        """Masters are about to be read, of some parameters or of all: those of weights that differ
        from what they were are their own until these come back."""
        if segments is None:
            segments = [self._layout.home[index][1] for index in self._former]
        for segment in segments:
            bucket = self._layout.bucket(segment)
            for former in self._former.of(segment.index, segment.offset, segment.end):
                if former.low is None:
                    self._follow(bucket, self._with_low(bucket, segment, former))
            self._former.to_ram(segment.index)

    def _follow(self, bucket: Bucket, former: Former) -> None:
        """Give weights that differ from ``former`` masters of their own, and the others theirs."""
        home, low = self._home(bucket), self.low(bucket)
        uses = (home, PinUse.READ), (low, PinUse.WRITE)
        with host_work():
            for run in self._store.runs(former.start, former.end, *uses):
                was = former.part(run.start, run.stop)
                assert was is not None
                part, now = home.part(run), low.part(run)
                changed = part.view(torch.int16) != was.weights.to(part.device).view(torch.int16)
                kept = now if was.low is None else was.low.to(now.device)
                now.copy_(torch.where(changed, own_low(part, now), kept))
        low.rewritten()

    # -- state dicts -----------------------------------------------------------------------------

    def load(self, segment: Segment, low: torch.Tensor) -> None:
        """Take a saved difference; it belongs to the weights loaded before or next.

        Raises StateError for one of another precision, whose bits mean something else.
        """
        bucket = self._layout.bucket(segment)
        if not bucket.has_master or low.dtype is not self._dtype:
            raise StateError(
                f"the state dict has masters of {low.dtype} for {segment.spec.name!r}, which is"
                f" {bucket.dtype} with {self._dtype if bucket.has_master else 'no'} masters",
                advice="resume at the precision of the checkpoint, or load the weights of"
                " hetero.release, which are fp32, and start the optimizer afresh",
            )
        self.low(bucket).write(segment, low)
        self._loaded.add(segment.index)
        self._former.forget(segment.index, segment.offset, segment.end)

    def settle(self) -> None:
        """An update uses the masters, and everything is at home: from now on a written weight is
        its own master again."""
        self._loaded.clear()
        self._written.clear()  # a write through a state dict is noted, too, and does not come home

    def forget(self) -> None:
        """Weights and masters were both replaced by ones that belong together."""
        self._loaded.clear()
        self._written.clear()
        self._former.clear()

    def saved(self, segment: Segment) -> torch.Tensor | None:
        """Return a parameter's ``low`` for a state dict, as an alias; None without a master."""
        bucket = self._layout.bucket(segment)
        if not bucket.has_master:
            return None
        self.follow_for_now([segment])
        return handle(self._store, self.low(bucket), segment).detach()


class Scaling(Protocol):
    """The scaling of losses, as `hetero.backward` asks for it."""

    @property
    def scale(self) -> float:
        """The factor of the next loss."""

    def scaled(self, scale: float) -> AbstractContextManager[None]:
        """Run the backward pass of a loss that was multiplied by ``scale`` inside."""


class LossScaler:
    """Dynamic loss scaling, with the rules and defaults of `torch.amp.GradScaler`.

    The scale is a power of two, so that unscaling is exact.
    """

    growth_factor = 2.0
    backoff_factor = 0.5

    def __init__(self, scale: float = 2.0**16, growth_interval: int = 2000) -> None:
        self.scale = scale
        self.growth_interval = growth_interval
        self.good_steps = 0

    def update(self, *, finite: bool) -> None:
        """Note whether a step's gradients were finite; grow after ``growth_interval`` that were."""
        if not finite:
            self.scale *= self.backoff_factor
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_interval:
            self.scale *= self.growth_factor
            self.good_steps = 0

    def state_dict(self) -> dict[str, float]:
        """Return the state that a resumed run needs."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue where ``state_dict`` was taken; ValueError for a scale that no step leaves."""
        scale, good_steps = float(state["scale"]), int(state["good_steps"])
        if not (0.0 < scale < math.inf and 0 <= good_steps < self.growth_interval):
            raise ValueError(f"a loss scale of {scale} after {good_steps} good steps")
        self.scale, self.good_steps = scale, good_steps
