"""Codecs: how a bucket's parameters lie at home, below HBM (floor 1, mechanism).

In frames a parameter is of its own dtype; at home, on the link and on disk it is what its bucket's
codec makes of it. `EXACT`, which all buckets have by default, makes nothing.
A `Blocked` codec cuts the index space into blocks of ``block`` elements, and keeps of each one its
codes and, right after them, one bf16 scale: ``code_bytes + 2`` bytes that mean the same wherever
they stand. So a run of blocks is a run of bytes, a chunk's codes and scales cross the link in one
copy, and a tensor, which begins a block, has the same bytes under every budget and chunk size.

[Note: decoded in place]  A fetch puts codes at the end of the very frames that they become, and
needs no other memory than a `Workspace` for a slice of them, which is charged with the buffers.
Decoding goes from the front, slice by slice. What a slice writes ends before the codes of the next
one begin, as codes are shorter than what they become: after block b of n, by (n - b) times the
difference. It runs where compute runs, after the copy's ticket: who computes with the weights is
after it in the same stream, and needs no other ticket; who overwrites the frames next waits for a
mark after it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from statistics import NormalDist

import torch

from hetero.device import Device

SCALE = torch.bfloat16
SCALE_BYTES = 2
TINY = torch.finfo(torch.float32).tiny  # the least normal number: a smaller scale is none
CODED = (torch.float32, torch.bfloat16, torch.float16)
ENCODED_AT_ONCE = 2**16  # elements: 1 MiB beside what they become, which a cache holds
DECODED_AT_ONCE = 2**17  # elements: what a slice makes stays in a processor's cache
DECODED_AT_ONCE_ON_CUDA = 2**21  # 12 MiB of workspace, and five launches
SLICES = 8  # a small bucket is decoded in so many, so that the workspace is small, too


class NotFinite(ValueError):
    """A weight is NaN or infinite: its block has no scale."""


class Codec(ABC):
    """What a bucket's elements are at home; *items* are what a home counts in."""

    name: str
    block: int
    """Elements that are coded together; tensors begin at multiples of it."""
    exact: bool
    """Whether a home keeps whatever is written to it."""

    @abstractmethod
    def items(self, numel: int) -> int:
        """Return the items of the blocks that ``numel`` elements touch."""

    @abstractmethod
    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return what the items of elements of a dtype are."""

    @abstractmethod
    def encode(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return 1-D ``values`` as items; ``dtype`` is what they will be decoded to.

        Raises NotFinite.
        """

    @abstractmethod
    def decode(
        self, items: torch.Tensor, into: torch.Tensor, workspace: Workspace | None = None
    ) -> None:
        """Fill 1-D ``into`` with what items on the same device stand for.

        Both may be one memory: see [Note: decoded in place]. Without a workspace one is made.
        """

    def n_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the bytes of so many elements at home."""
        return self.items(numel) * self.dtype(dtype).itemsize

    def touched_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return what decoding so many elements reads and writes."""
        return self.n_bytes(numel, dtype) + numel * dtype.itemsize


class Exact(Codec):
    """Elements are at home as they are in frames."""

    name = "keep"
    block = 1
    exact = True

    def items(self, numel: int) -> int:
        return numel

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def encode(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return values.to(dtype)

    def decode(
        self, items: torch.Tensor, into: torch.Tensor, workspace: Workspace | None = None
    ) -> None:
        into.copy_(items)


class Blocked(Codec):
    """Codes and one scale for each block; a value is fp32(level of its code x scale), rounded.

    The scale is bf16(largest magnitude of the block / ``most``), and 0 where that is no normal
    number: such a block is zeros. It is kept from values beyond the dtype's largest number, which
    matters to blocks within a half per cent of that. All of it is IEEE arithmetic on one element at
    a time, so that codes are the same on any device and with any number of threads.
    """

    exact = False
    code_bytes: int
    """Of a block."""
    most: float
    """The largest level."""
    scratch_bytes: int
    """What decoding an element takes beside the element."""
    passing_bytes: int
    """What decoding an element reads and writes beside its code and the element."""

    @property
    def block_bytes(self) -> int:
        return self.code_bytes + SCALE_BYTES

    def items(self, numel: int) -> int:
        return -(-numel // self.block) * self.block_bytes

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.uint8

    def touched_bytes(self, numel: int, dtype: torch.dtype) -> int:
        return super().touched_bytes(numel, dtype) + numel * self.passing_bytes

    def encode(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        rows = -(-values.numel() // self.block)
        items = torch.empty((rows, self.block_bytes), dtype=torch.uint8, device=values.device)
        if values.is_meta:
            return items.view(-1)
        exact = torch.zeros(rows * self.block, dtype=torch.float32, device=values.device)
        exact[: values.numel()].copy_(values)
        exact = exact.view(rows, self.block)
        scale = self.scale(exact, dtype)
        items[:, self.code_bytes :].view(SCALE).copy_(scale)
        exact.div_(torch.where(scale == 0, 1.0, scale.float()))
        self.write_codes(exact, items[:, : self.code_bytes])
        return items.view(-1)

    def scale(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return each row's scale, in one column of bf16."""
        absmax = rows.abs().amax(1, keepdim=True)
        if not bool(absmax.isfinite().all()):
            raise NotFinite
        scale = absmax.div_(self.most).to(SCALE).clamp_(max=self.largest_scale(dtype))
        return scale.masked_fill_(scale.float() < TINY, 0.0)

    def largest_scale(self, dtype: torch.dtype) -> float:
        """Return the largest bf16 number whose product with the largest level is finite."""
        bound = torch.finfo(dtype).max / self.most
        cut = torch.tensor(bound, dtype=torch.float32).view(torch.int32) & -(2**16)  # towards zero
        return float(cut.view(torch.float32))

    def decode(
        self, items: torch.Tensor, into: torch.Tensor, workspace: Workspace | None = None
    ) -> None:
        rows, left = items.view(-1, self.block_bytes), into.numel() % self.block
        if left and len(rows) * self.block > into.numel():
            whole, last = into.numel() - left, into.new_empty(self.block)
            self.decode(rows[-1], last, workspace)
            into[whole:].copy_(last[:left])
            rows = rows[:-1]
        work = workspace or Workspace.beside(self, into)
        with torch.no_grad():
            for first in range(0, len(rows), work.n_blocks):
                part = rows[first : first + work.n_blocks]
                levels = self.read_levels(part[:, : self.code_bytes], work)
                scale = work.scales[: len(part)]
                scale.copy_(part[:, self.code_bytes :].view(SCALE))
                here = into[first * self.block : (first + len(part)) * self.block]
                torch.mul(levels, scale, out=here.view(len(part), self.block))

    @abstractmethod
    def write_codes(self, rows: torch.Tensor, into: torch.Tensor) -> None:
        """Write the codes of numbers in units of their row's scale; ``rows`` may be overwritten."""

    @abstractmethod
    def read_levels(self, codes: torch.Tensor, work: Workspace) -> torch.Tensor:
        """Return rows of the levels that codes stand for, in the workspace."""


class Int8(Blocked):
    """Symmetric whole numbers from -127 to 127: 1.016 bytes a parameter.

    |w - w'| <= scale / 2 exactly, for w in fp32 and w' before it is rounded to a narrower dtype:
    a scale has 8 significant bits, so that no quotient rounds across the middle of two codes, the
    largest one is at most 127.25, and the product is exact.
    """

    name = "int8"
    block = code_bytes = 128
    most = 127.0
    scratch_bytes = 1
    passing_bytes = 2

    def write_codes(self, rows: torch.Tensor, into: torch.Tensor) -> None:
        into.view(torch.int8).copy_(rows.round_().clamp_(-127, 127))

    def read_levels(self, codes: torch.Tensor, work: Workspace) -> torch.Tensor:
        levels = work.scratch[: codes.numel()].view(codes.shape)
        return levels.copy_(codes).view(torch.int8)


class Nf4(Blocked):
    """The 4-bit NormalFloat of QLoRA: 0.531 bytes a parameter, two codes a byte, high nibble first.

    |w - w'| is at most half the gap of the two levels beside w, times the scale, and fp32 rounding;
    the widest gap is 0.304, from -1 to -0.696.
    """

    name = "nf4"
    block = 64
    code_bytes = 32
    most = 1.0
    scratch_bytes = 6  # a level, and half an index
    passing_bytes = 12

    def write_codes(self, rows: torch.Tensor, into: torch.Tensor) -> None:
        # 1. at most one middle of two levels lies in a cell, and cells are in order: who is in
        #    another cell than a middle is on the same side of it as the cell is
        middles = nf4_middles(rows.device)
        of_middles = cells(middles).long()
        low = torch.bucketize(torch.arange(CELLS, device=rows.device), of_middles).to(torch.uint8)
        bound = torch.full((CELLS,), float("inf"), device=rows.device)
        bound[of_middles] = middles
        # 2. the code is the number of middles below: those of lower cells, and the one of this cell
        where = cells(rows).view(-1)
        codes = low.index_select(0, where).view(rows.shape)
        above = rows > bound.index_select(0, where).view(rows.shape)
        codes.add_(above.view(torch.uint8))
        into.copy_(codes[:, 0::2] << 4 | codes[:, 1::2])

    def read_levels(self, codes: torch.Tensor, work: Workspace) -> torch.Tensor:
        n_pairs = codes.numel()
        pairs: torch.Tensor = work.scratch[: PAIR.itemsize * n_pairs].view(PAIR)
        index = work.scratch.view(torch.int32)[-n_pairs:].view(codes.shape)
        torch.index_select(work.pairs, 0, index.copy_(codes).view(-1), out=pairs)
        return pairs.view(torch.float32).view(len(codes), self.block)


def normal_levels() -> tuple[float, ...]:
    """Return the 16 levels of NF4, ascending from -1 to 1, with an exact zero.

    Quantiles of the standard normal: 8 above zero at probabilities that are evenly spaced from
    1 - (1/30 + 1/32) / 2 down to, not including, 1/2, 7 below zero alike, and zero; all divided by
    the largest. (Dettmers, Pagnoni, Holtzman, Zettlemoyer: QLoRA, NeurIPS 2023, arXiv 2305.14314,
    section 3 and appendix E; the offset is the one of the authors' own code.)
    """
    first = 1 - (1 / 30 + 1 / 32) / 2
    quantile = NormalDist().inv_cdf

    def side(n: int) -> list[float]:
        return [quantile(first + (0.5 - first) * i / n) for i in range(n)]

    most = quantile(first)
    below = [-value / most for value in side(7)]
    above = [value / most for value in reversed(side(8))]
    return (*below, 0.0, *above)


NF4_LEVELS = normal_levels()
CELLS = 129  # from -1 to 1: the middles of levels are 0.08 apart, or more


def nf4_middles(device: torch.device) -> torch.Tensor:
    """Return where the code changes from each level to the next."""
    levels = torch.tensor(NF4_LEVELS, dtype=torch.float32, device=device)
    return (levels[1:] + levels[:-1]) / 2


def cells(values: torch.Tensor) -> torch.Tensor:
    """Return the cell of each number: one that is larger is in no lower one."""
    return values.add(1.0).mul_(CELLS // 2).to(torch.int32).clamp_(0, CELLS - 1)


class Workspace:
    """Memory in which a slice of ``numel`` elements is decoded, made once.

    It is one slab of the device, so that its bytes can be charged before there are any.
    """

    def __init__(self, codec: Blocked, numel: int, block: torch.Tensor) -> None:
        self.n_blocks = numel // codec.block
        sizes = [PAIRS_BYTES, codec.scratch_bytes * numel, 4 * self.n_blocks]
        pairs, scratch, scales = block.split(sizes)
        self.scratch: torch.Tensor = scratch
        self.pairs = pairs.view(PAIR)
        self.scales = scales.view(torch.float32).view(self.n_blocks, 1)
        levels = torch.tensor(NF4_LEVELS, dtype=torch.float32)
        both = torch.cartesian_prod(levels, levels)
        pairs.view(torch.float32).copy_(both.view(-1))

    @staticmethod
    def size_bytes(codec: Blocked, numel: int) -> int:
        """Return what a slice of so many elements, whole blocks, takes."""
        return codec.scratch_bytes * numel + 4 * (numel // codec.block) + PAIRS_BYTES

    @classmethod
    def on(cls, device: Device, codec: Blocked, numel: int) -> Workspace:
        """Return one in a device's memory."""
        slab = device.arena(cls.size_bytes(codec, numel))
        return cls(codec, numel, slab.carve(0, slab.n_bytes))

    @classmethod
    def beside(cls, codec: Blocked, into: torch.Tensor) -> Workspace:
        """Return a passing one, for what is read once."""
        n_blocks = max(1, -(-into.numel() // codec.block))
        numel = min(DECODED_AT_ONCE, n_blocks * codec.block)
        size = cls.size_bytes(codec, numel)
        return cls(codec, numel, torch.empty(size, dtype=torch.uint8, device=into.device))


PAIR = torch.int64  # two fp32 levels, looked up as one (measured: a fifth of the time)
PAIRS_BYTES = 256 * PAIR.itemsize  # for every byte of NF4


def is_finite(values: torch.Tensor) -> bool:
    """Whether all of a tensor is finite; no copy of it is made."""
    if values.numel() == 0 or values.is_meta:
        return True
    return all(bool(bound.isfinite()) for bound in values.detach().aminmax())


def slice_numel(codec: Blocked, numel: int, *, is_cuda: bool) -> int:
    """Return the elements of a slice, where the largest bucket has ``numel``."""
    most = DECODED_AT_ONCE_ON_CUDA if is_cuda else DECODED_AT_ONCE
    return min(most, -(-numel // (SLICES * codec.block)) * codec.block)


EXACT, INT8, NF4 = Exact(), Int8(), Nf4()
CODECS: dict[str, Codec] = {codec.name: codec for codec in (EXACT, INT8, NF4)}
