"""The layout: units -> buckets -> fixed-size chunks; tensors may straddle (floor 1, mechanism).

A bucket is one flat index space, shared by every kind (PARAM, GRAD, the optimizer's STATE). Its
tensors lie back to back, each aligned as its `ParamSpec` says and to blocks of its codec. Chunks
cut the space every ``chunk_numel`` elements, so only the last chunk of a bucket carries waste.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from hetero.errors import ConfigError
from hetero.memory.codec import EXACT, Codec

ALIGN = 16  # elements
SHARE_ALIGN = 64  # the same, if homes are shared: updates may be cut at multiples of it
MAX_CHUNK_NUMEL = 16 * 2**20  # 64 MiB of 4-byte elements: past the knee of every link measured
MIN_CHUNK_NUMEL = 1024
WASTE = 0.005


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """A parameter as the layout sees it: ``shape``, dense ``stride``, ``dtype``; it begins at a
    multiple of ``align`` elements."""

    name: str
    unit: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    codec: Codec = EXACT
    align: int = ALIGN
    numel: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "numel", math.prod(self.shape))


@dataclass(frozen=True, slots=True)
class Segment:
    """One tensor's place: elements ``[offset, offset + numel)`` of its bucket. ``index`` is the
    parameter's in its model, ``position`` the segment's in its bucket."""

    index: int
    position: int
    spec: ParamSpec
    offset: int
    end: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "end", self.offset + self.spec.numel)

    def inside(self, run: slice) -> slice:
        """Return a run of the bucket's elements as a run of the segment's own."""
        return slice(run.start - self.offset, run.stop - self.offset)


@dataclass(frozen=True, slots=True)
class Bucket:
    """The state of one unit's parameters of one treatment and dtype, as one flat index space."""

    id: int
    unit: int
    dtype: torch.dtype
    trainable: bool
    segments: tuple[Segment, ...]
    n_chunks: int
    chunk_numel: int
    first_chunk: int
    codec: Codec = EXACT
    has_master: bool = False
    """Whether each of its weights has an fp32 master."""
    n_shares: int = 1
    """Equal shares that its homes are cut in, one a rank."""
    n_copies: int = 1
    """Ranks that keep the same share."""
    granules: int = field(init=False)
    """Frames of the 1-byte class that the bucket's PARAM chunks fill."""
    chunks: range = field(init=False)
    """Ids of its chunks."""
    numel: int = field(init=False)
    """Elements of the index space, the tail of the last chunk included."""
    n_bytes: int = field(init=False)
    """Bytes of the PARAM chunks in frames."""
    share_numel: int = field(init=False)
    """Elements that a rank keeps at home, of every kind."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "granules", self.n_chunks * self.dtype.itemsize)
        chunks = range(self.first_chunk, self.first_chunk + self.n_chunks)
        object.__setattr__(self, "chunks", chunks)
        object.__setattr__(self, "numel", self.n_chunks * self.chunk_numel)
        object.__setattr__(self, "n_bytes", self.numel * self.dtype.itemsize)
        share = self.numel
        if self.n_shares > 1:
            share = share_numel(self.segments[-1].end, self.codec, self.n_shares)
        object.__setattr__(self, "share_numel", share)

    @property
    def whole_bytes(self) -> int:
        """Bytes of the PARAM chunks as they lie at home, on all ranks."""
        return self.codec.n_bytes(self.numel, self.dtype)

    @property
    def home_bytes(self) -> int:
        """Bytes of the PARAM chunks at home on one rank, on the link and on disk."""
        return self.codec.n_bytes(self.share_numel, self.dtype)

    def share(self, rank: int) -> slice:
        """Return the elements that a rank keeps at home."""
        first = rank % self.n_shares * self.share_numel
        return slice(first, first + self.share_numel)

    def saved(self, rank: int) -> slice:
        """Return the elements that a rank saves: those that keep the same share divide it."""
        share, unit = self.share(rank), share_unit(self.codec)
        step = -(-self.share_numel // (self.n_copies * unit)) * unit
        first = min(share.start + rank // self.n_shares * step, share.stop)
        return slice(first, min(first + step, share.stop))

    def chunks_of(self, start: int, end: int) -> range:
        """Return the chunk ids that elements [start, end) of the index space touch."""
        if end <= start:
            return range(0)
        first = self.first_chunk + start // self.chunk_numel
        return range(first, self.first_chunk + (end - 1) // self.chunk_numel + 1)


@dataclass(frozen=True, slots=True)
class Layout:
    """All buckets of a model; ``home[i]`` is the (bucket, segment) of parameter ``i``."""

    chunk_numel: int
    buckets: tuple[Bucket, ...]
    home: tuple[tuple[int, Segment], ...]
    unit_names: tuple[str, ...]

    def bucket(self, segment: Segment) -> Bucket:
        return self.buckets[self.home[segment.index][0]]

    @property
    def is_shared(self) -> bool:
        """Whether several ranks share the homes."""
        return any(bucket.n_shares > 1 for bucket in self.buckets)

    @property
    def n_chunks(self) -> int:
        return sum(bucket.n_chunks for bucket in self.buckets)

    @property
    def param_bytes(self) -> int:
        """Bytes of the parameters themselves, without waste."""
        return sum(s.spec.numel * s.spec.dtype.itemsize for b in self.buckets for s in b.segments)

    @property
    def waste(self) -> float:
        """Share of the PARAM chunks at home that holds no parameter."""
        held = sum(bucket.whole_bytes for bucket in self.buckets)
        used = sum(home_bytes(s.spec) for b in self.buckets for s in b.segments)
        return 1 - used / held if held else 0.0


def dense_stride(name: str, shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Return the strides under which a tensor fills its segment without gaps.

    A dense non-overlapping tensor (contiguous, channels_last, transposed) keeps its own strides;
    any other is laid out contiguously.
    """
    order = sorted(range(len(shape)), key=lambda d: (stride[d], shape[d]))
    expected = 1
    for dim in order:
        if shape[dim] == 1:
            continue
        if stride[dim] != expected:
            return contiguous_stride(shape)
        expected *= shape[dim]
    return tuple(stride)


def row(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor's elements in the order of memory, as one dimension."""
    return torch.as_strided(tensor, (tensor.numel(),), (1,))


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def home_bytes(spec: ParamSpec) -> int:
    return spec.codec.n_bytes(spec.numel, spec.dtype)


def padded_numel(spec: ParamSpec) -> int:
    """Return the elements up to where the next tensor may begin."""
    align = max(spec.align, spec.codec.block)
    return -(-spec.numel // align) * align


def packed_numel(specs: Iterable[ParamSpec]) -> int:
    """Return the elements that tensors fill back to back, each aligned."""
    return sum(padded_numel(spec) for spec in specs)


def share_numel(used: int, codec: Codec, n_shares: int) -> int:
    """Return the elements of a share: equal for all, and of whole blocks."""
    unit = share_unit(codec)
    return -(-used // (n_shares * unit)) * unit


def share_unit(codec: Codec) -> int:
    """Return of how many elements a share is a multiple."""
    return math.lcm(SHARE_ALIGN, codec.block)


def groups_of(specs: Sequence[ParamSpec]) -> list[list[int]]:
    """Return parameter indices per (unit, treatment, dtype), in the order of first appearance."""
    groups: dict[tuple[int, bool, Codec, torch.dtype], list[int]] = {}
    for index, spec in enumerate(specs):
        groups.setdefault((spec.unit, spec.trainable, spec.codec, spec.dtype), []).append(index)
    return [groups[key] for key in sorted(groups, key=lambda k: (k[0], groups[k][0]))]


def waste_of(specs: Sequence[ParamSpec], chunk_numel: int) -> float:
    """Return the share of chunk bytes that a chunk size would leave unused."""
    held = used = 0
    for group in groups_of(specs):
        first = specs[group[0]]
        numel = -(-packed_numel(specs[i] for i in group) // chunk_numel) * chunk_numel
        used += sum(home_bytes(specs[i]) for i in group)
        held += first.codec.n_bytes(numel, first.dtype)
    return 1 - used / held if held else 0.0


def choose_chunk_numel(specs: Sequence[ParamSpec]) -> int:
    """Return the largest power of two whose waste, as chunk size, is at most half a per cent."""
    numel = MAX_CHUNK_NUMEL
    while numel > MIN_CHUNK_NUMEL and waste_of(specs, numel) > WASTE:
        numel //= 2
    return numel


def build_layout(
    specs: Sequence[ParamSpec],
    unit_names: Sequence[str],
    chunk_bytes: int | None = None,
    working: torch.dtype | None = None,
    n_shares: int = 1,
    n_copies: int = 1,
) -> Layout:
    """Lay the parameters out; ``chunk_bytes`` is the size of a chunk of 4-byte elements. Weights of
    the ``working`` dtype that train have masters. With several shares, tensors begin at multiples
    of `SHARE_ALIGN`."""
    align = 4 * max([ALIGN, *(spec.codec.block for spec in specs)])  # a chunk is of whole blocks
    if chunk_bytes is not None and (chunk_bytes < align or chunk_bytes % align):
        raise ConfigError(
            f"chunk_bytes={chunk_bytes}", advice=f"use a positive multiple of {align}"
        )
    chunk_numel = chunk_bytes // 4 if chunk_bytes else choose_chunk_numel(specs)
    buckets: list[Bucket] = []
    home: dict[int, tuple[int, Segment]] = {}
    first_chunk = 0
    for group in groups_of(specs):
        offset = 0
        segments: list[Segment] = []
        for index in group:
            segments.append(Segment(index, len(segments), specs[index], offset))
            offset += padded_numel(specs[index])
        first = specs[group[0]]
        whole = offset
        if n_shares > 1:
            whole = n_shares * share_numel(segments[-1].end, first.codec, n_shares)
        n_chunks = max(1, -(-whole // chunk_numel))
        bucket = Bucket(
            id=len(buckets),
            unit=first.unit,
            dtype=first.dtype,
            trainable=first.trainable,
            segments=tuple(segments),
            n_chunks=n_chunks,
            chunk_numel=chunk_numel,
            first_chunk=first_chunk,
            codec=first.codec,
            has_master=first.trainable and first.dtype is working,
            n_shares=n_shares,
            n_copies=n_copies,
        )
        first_chunk += n_chunks
        home.update({s.index: (bucket.id, s) for s in segments})
        buckets.append(bucket)
    ordered = tuple(home[i] for i in range(len(specs)))
    return Layout(chunk_numel, tuple(buckets), ordered, tuple(unit_names))
