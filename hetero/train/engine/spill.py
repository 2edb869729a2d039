"""The homes on disk of a model that HOST does not hold, and the pool's size (floor 2)."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from hetero.errors import BudgetError
from hetero.io import ALIGN
from hetero.memory.layout import Bucket
from hetero.plan.placement import HomePart, place
from hetero.train.engine.blueprint import Blueprint
from hetero.train.engine.hbm_homes import sizes_of
from hetero.train.gradients.ring import ring_bytes
from hetero.types import Kind, format_bytes

MAX_EXTENT_NUMEL = 2**21  # 8 MiB of 4-byte elements: past the knee of every drive measured
EXTENTS = 256  # a model is cut into about so many, or more
HUGE_NUMEL = 2**19  # a huge page of 4-byte elements: halves a transfer's memory cost (measured)
POOL_SHARE = 8  # 1/8 of HOST is memory through which homes on disk pass
MAX_POOL_BYTES = 2**30  # more of it makes no drive faster; homes on HOST do
AT_ONCE = 2  # slices of updates that are under way together
DEPTH = 8  # extents that are read or written meanwhile


@dataclass(frozen=True, slots=True)
class Spill:
    """Which homes lie on disk, and the sizes that follow from it."""

    on_disk: frozenset[tuple[Kind, int]]
    pool_bytes: int
    disk_bytes: int
    extent_numel: int
    host_bytes: int
    """The most that homes on HOST, the pool and transfers take there."""


def draw_spill(
    plan: Blueprint,
    host_bytes: int,
    nvme_bytes: int | None,
    extent_numel: int | None = None,
    *,
    pool: bool = False,
    on_hbm: Collection[int] = (),
) -> Spill | None:
    """Return the homes that go to disk under budgets in bytes; None if HOST holds everything.

    Buckets ``on_hbm`` take neither. With ``pool`` there is a way to disk in any case, for
    activations. Raises BudgetError if HOST does not hold the bytes that must be in memory at once,
    or NVME the rest.
    """
    parts = [part for part in parts_of(plan) if part.bucket not in on_hbm]
    ring = passing_bytes(plan)
    if sum(part.n_bytes for part in parts) + ring <= host_bytes and not pool:
        return None
    spare = min(host_bytes // POOL_SHARE, MAX_POOL_BYTES)
    size = extent_numel or extent_of(plan, spare)
    # 1. the most that can be needed at once is as with everything on disk
    least = ring + least_pool(plan, size)
    if least > host_bytes:
        raise BudgetError(
            f"homes on disk pass through memory: {format_bytes(least)} of HOST are needed for the"
            f" largest update and what is on its way; {format_bytes(host_bytes)} are there,"
            f" {least - host_bytes} bytes short",
            advice=f"raise host= to at least {least} bytes",
            tier="HOST",
            needed_bytes=least,
        )
    # 2. a part of HOST is the pool; homes take the rest
    pool_bytes = max(least - ring, spare)
    on_disk = place(parts, host_bytes - ring - pool_bytes)
    n_bytes = sum(disk_bytes(plan, kind, plan.layout.buckets[b]) for kind, b in on_disk)
    if nvme_bytes is not None and n_bytes > nvme_bytes:
        raise BudgetError(
            f"{format_bytes(n_bytes)} go to disk; nvme_bytes is {format_bytes(nvme_bytes)},"
            f" {n_bytes - nvme_bytes} bytes short",
            advice=f"raise nvme_bytes= to at least {n_bytes} bytes, or raise host=",
            tier="NVME",
            needed_bytes=n_bytes,
        )
    here = sum(part.n_bytes for part in parts if (part.kind, part.bucket) not in on_disk)
    return Spill(on_disk, pool_bytes, n_bytes, size, here + ring + pool_bytes)


def draw_way(plan: Blueprint, host_bytes: int, extent_numel: int | None = None) -> Spill:
    """Return a way to disk for activations of a model whose homes are all in memory."""
    spare = min(host_bytes // POOL_SHARE, MAX_POOL_BYTES)
    size = extent_numel or extent_of(plan, spare)
    n_bytes = max(spare, DEPTH * 4 * max(size, plan.layout.chunk_numel))
    return Spill(frozenset(), n_bytes, 0, size, plan.home_bytes + n_bytes)


def passing_bytes(plan: Blueprint) -> int:
    """Return the most HOST bytes of transfers between device and homes."""
    return ring_bytes(plan.grad_sizes) + widening(plan) + plan.stages_bytes + plan.crossing_bytes


def parts_of(plan: Blueprint, *, sums: bool = True) -> Iterator[HomePart]:
    """Yield every home there can be, with the most bytes it can take. ``sums``: whether several
    gradients add up, which takes fp32 where there are masters."""
    for bucket in plan.layout.buckets:
        yield HomePart(Kind.PARAM, bucket.id, bucket.home_bytes)
        if bucket.trainable:
            for kind, size in sizes_of(plan, bucket, sums=sums).items():
                yield HomePart(kind, bucket.id, bucket.share_numel * size)


def widening(plan: Blueprint) -> int:
    """Return the bytes of a bucket's 2-byte gradients, which stay while they become fp32."""
    narrow = [b.n_bytes for b in plan.layout.buckets if b.trainable and plan.has_master(b)]
    return max(narrow, default=0)


def disk_bytes(plan: Blueprint, kind: Kind, bucket: Bucket) -> int:
    """Return the bytes that a home's slots take; gradients have a narrow home and a wide one."""
    ends = ALIGN * (1 + (bucket.n_shares > 1))
    if kind is Kind.PARAM:
        return bucket.home_bytes + ends
    size = plan.element_bytes(bucket)[kind]
    if kind is Kind.GRAD and size != bucket.dtype.itemsize:
        size += bucket.dtype.itemsize
    homes = 1 if kind is Kind.MASTER else 1 + size
    return bucket.share_numel * size + homes * ends


def extent_of(plan: Blueprint, spare_bytes: int) -> int:
    """Return the elements of an extent: a power of two, smaller for small models.

    It is at least a huge page if a pool of ``spare_bytes`` has room for such ones.
    """
    numel = sum(bucket.share_numel for bucket in plan.layout.buckets)
    size = min(MAX_EXTENT_NUMEL, max(ALIGN, 1 << max(0, (numel // EXTENTS).bit_length() - 1)))
    while size < HUGE_NUMEL and least_pool(plan, 2 * size) <= spare_bytes:
        size *= 2
    return size


def least_pool(plan: Blueprint, extent_numel: int) -> int:
    """Return the memory in which every update can be carried out, with a little to spare."""
    most = 0
    for bucket in plan.layout.buckets:
        whole = max((s.spec.numel for s in bucket.segments), default=0)
        numel = min(bucket.codec.items(bucket.share_numel), extent_numel)
        if bucket.trainable and plan.whole_tensors(bucket):
            numel = min(bucket.numel, (whole // extent_numel + 2) * extent_numel)
        size = bucket.codec.dtype(bucket.dtype).itemsize
        if bucket.trainable:
            size += sum(plan.element_bytes(bucket).values())
        most = max(most, numel * size + 16 * ALIGN)
    return AT_ONCE * most + DEPTH * 4 * extent_numel
