"""Closed forms of time: operations of attention, waves of tiles, rates between measured rows.

T2 and T3 are the planner's equations (floor 1, no torch).
"""

from __future__ import annotations

import math
from itertools import product

TILE = 128  # rows and columns that one multiprocessor computes at once, in libraries' matmuls
ATTENTION_BACKWARD = 2.5
"""Of fused attention, in forwards of two products: the scores again, and four more products."""
Rows = tuple[tuple[float, ...], ...]


def attention_flops(
    batch: int, heads: int, queries: int, keys: int, widths: int, *, causal: bool, backward: bool
) -> float:
    """Return the operations of a fused attention: 2·b·a·s·s'·(d + d'), times 2.5 in backward.
    ``widths`` is d + d', of a key and of a value. A causal one computes half the scores."""
    forward = 2.0 * batch * heads * queries * keys * widths
    return forward * (ATTENTION_BACKWARD if backward else 1.0) * (0.5 if causal else 1.0)


def side_of(flops: float) -> int:
    """Return the side of the square matmul of as many operations."""
    side: float = (flops / 2) ** (1 / 3)
    return max(1, round(side))


def wave_operations(m: int, n: int, k: int, sm: int) -> float:
    """Return the operations of a matmul, counting idle multiprocessors of its last wave (T2).

    Tiles are computed ``sm`` at a time. Below one wave nothing is added: libraries cut along k or
    take smaller tiles.
    """
    tiles = math.ceil(m / TILE) * math.ceil(n / TILE)
    if tiles <= sm:
        return 2.0 * m * n * k
    return max(2.0 * m * n * k, math.ceil(tiles / sm) * sm * TILE * TILE * 2.0 * k)


def curve_seconds(curve: Rows, n_bytes: float, rate: float, latency: float) -> float:
    """Return the time of a copy: latency + n/rate, or from a curve of shares (T3).

    At the curve's sizes it is n / (rate x share), in between log-log interpolated; below the curve
    it falls to the latency in a straight line, above it goes on at the full rate. It never falls
    with n, and never beats the rate.
    """
    if n_bytes <= 0:
        return 0.0
    if not curve:
        return latency + n_bytes / rate
    knots, longest = [], 0.0
    for size, share in curve:
        longest = max(longest, size / (rate * share))
        knots.append((size, longest))
    (first, at_first), (last, at_last) = knots[0], knots[-1]
    if n_bytes < first:
        start = min(latency, at_first)
        return start + (at_first - start) * n_bytes / first
    if n_bytes > last:
        return at_last + (n_bytes - last) / rate
    return interpolated(tuple(knots), n_bytes)


def interpolated(rows: Rows, x: float) -> float:
    """Return y at x between ascending rows (x, y), in log-log space, constant beyond."""
    xs = [row[0] for row in rows]
    (low, high), part = between(xs, x)
    y0, y1 = rows[low][-1], rows[high][-1]
    return y0 if part == 0 else math.exp((1 - part) * math.log(y0) + part * math.log(y1))


def between(axis: list[float], x: float) -> tuple[tuple[int, int], float]:
    """Return the places on an ascending axis around x, and its share of the way between, in logs.
    If x is on the axis or beyond it, the share is 0."""
    if x <= axis[0]:
        return (0, 0), 0.0
    if x >= axis[-1]:
        return (len(axis) - 1, len(axis) - 1), 0.0
    high = next(i for i, value in enumerate(axis) if value >= x)
    if axis[high] == x:
        return (high, high), 0.0
    low = high - 1
    return (low, high), math.log(x / axis[low]) / math.log(axis[high] / axis[low])


def axes(rows: Rows) -> list[list[float]]:
    """Return the ascending values of each column but the last."""
    return [sorted(set(column)) for column in list(zip(*rows, strict=True))[:-1]]


def grid_rate(rows: Rows, *point: float) -> float:
    """Return the rate at a point of a full grid, multilinear in logs, constant beyond borders."""
    known = {row[:-1]: row[-1] for row in rows}
    values = axes(rows)
    places = [between(axis, x) for axis, x in zip(values, point, strict=True)]
    total = 0.0
    for corner in product((0, 1), repeat=len(places)):
        weight = math.prod(
            part if side else 1 - part for side, (_, part) in zip(corner, places, strict=True)
        )
        if weight:
            chosen = zip(corner, places, values, strict=True)
            where = tuple(axis[ends[side]] for side, (ends, _), axis in chosen)
            total += weight * math.log(known[where])
    return math.exp(total)
