"""Buckets whose homes may be on HBM, and those that begin there (floor 2)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from hetero.memory.layout import Bucket
from hetero.plan.division import WIDEST, Hbm
from hetero.plan.placement import BucketHomes
from hetero.train.engine.blueprint import Blueprint
from hetero.types import Kind

WIDE = 2  # a unit with so many times the usual bytes goes up first: compute waits for it


def movable_homes(
    plan: Blueprint,
    *,
    is_cuda: bool,
    on_disk: Collection[tuple[Kind, int]] = (),
    sums: bool = False,
) -> list[BucketHomes]:
    """Return the buckets whose homes may be on HBM, with their bytes, the most useful first.

    Updates of parameters that keep their dtype are torch's own: on CUDA, they are not known to give
    the same bits as on the CPU, so such parameters keep their place, and so do shares of tensors
    that ranks put together for an update, and buckets with homes ``on_disk``.
    ``sums``: whether several gradients add up, which takes fp32 where there are masters.
    """
    disk = {bucket for _, bucket in on_disk}
    found = [
        BucketHomes(bucket.id, bytes_of(plan, bucket, sums=sums))
        for bucket in plan.layout.buckets
        if bucket.trainable
        and plan.element_bytes(bucket)
        and bucket.id not in disk
        and (plan.may_update_anywhere(bucket) or not is_cuda)
        and not (plan.is_shared and plan.whole_tensors(bucket))
    ]
    usual = sorted(homes.n_bytes for homes in found)[len(found) // 2] if found else 0
    return sorted(found, key=lambda homes: (homes.n_bytes <= WIDE * usual, homes.bucket))


def bytes_of(plan: Blueprint, bucket: Bucket, *, sums: bool) -> int:
    """Return the bytes of all homes of a trainable bucket."""
    return bucket.home_bytes + bucket.share_numel * sum(sizes_of(plan, bucket, sums=sums).values())


def sizes_of(plan: Blueprint, bucket: Bucket, *, sums: bool) -> dict[Kind, int]:
    """Return the bytes of an element of a trainable bucket, by the kinds of homes it has besides
    its parameters'."""
    sizes = plan.element_bytes(bucket)
    if not sums and Kind.GRAD in sizes:
        sizes[Kind.GRAD] = bucket.dtype.itemsize
    return sizes


def first_homes(
    movable: Iterable[BucketHomes], hbm: Hbm, short_bytes: int
) -> tuple[BucketHomes, ...]:
    """Return those of ``movable`` homes that are on HBM for good, so that HOST and disk have to
    hold ``short_bytes`` less: as many as fit with the frames of a few units, and one of them in
    activations."""
    room = hbm.most_bytes - (WIDEST + 1) * hbm.least_bytes
    found: list[BucketHomes] = []
    for homes in movable:
        if short_bytes <= 0:
            break
        if homes.n_bytes <= room:
            found.append(homes)
            room -= homes.n_bytes
            short_bytes -= homes.n_bytes
    return tuple(found)


def total_bytes(homes: Sequence[BucketHomes]) -> int:
    """Return the bytes of several buckets' homes."""
    return sum(each.n_bytes for each in homes)
