"""Codecs: the format of a bucket's parameters at home, below HBM (floor 1, mechanism).

In frames a parameter has its own dtype; at home, on the link and on disk its bucket's codec encodes
it. `EXACT`, the default, changes nothing. A `Blocked` codec cuts the index space into blocks of
``block`` elements, and keeps each as its codes and one bf16 scale: ``code_bytes + 2`` bytes. So a
run of blocks is a run of bytes, which crosses the link in one copy, and a tensor, which begins a
block, has the same bytes under every budget and chunk size.

[Note: decoded in place]  A fetch puts codes at the end of the frames that they are decoded to, and
needs no other memory than a `Workspace` for one slice, charged with the buffers. Decoding goes from
the front, slice by slice. Codes are shorter than their values, so a slice's values end before the
next slice's codes begin: after block b of n, by (n - b) times the difference. Decoding runs on the
compute stream after the copy's ticket: compute follows it there, and the next writer of the frames
waits for a mark after it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from statistics import NormalDist

import torch

from hetero.device import Device
from hetero.errors import ConfigError

SCALE = torch.bfloat16
SCALE_BYTES = 2
TINY = torch.finfo(torch.float32).tiny  # the least normal number; smaller scales become 0
CODED = (torch.float32, torch.bfloat16, torch.float16)
ENCODED_AT_ONCE = 2**16  # elements: 1 MiB of values and codes, which fit a cache
DECODED_AT_ONCE = 2**17  # elements: a slice's values stay in a processor's cache
DECODED_AT_ONCE_ON_CUDA = 2**21  # 12 MiB of workspace, and five launches
SLICES = 8  # of a small bucket, so that its workspace is small too


class NotFinite(ValueError):
    """A weight is NaN or infinite: its block has no scale."""


class Codec(ABC):
    """The format of a bucket's elements at home, which counts in *items*."""

    name: str
    block: int
    """Elements that are coded together; tensors begin at multiples of it."""
    exact: bool
    """Whether a home keeps the exact values written to it."""

    @abstractmethod
    def items(self, numel: int) -> int:
        """Return the items of the blocks that ``numel`` elements touch."""

    @abstractmethod
    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of items, for elements of ``dtype``."""

    @abstractmethod
    def encode(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return 1-D ``values`` as items, to be decoded to ``dtype``. Raises NotFinite."""

    @abstractmethod
    def decode(
        self, items: torch.Tensor, into: torch.Tensor, workspace: Workspace | None = None
    ) -> None:
        """Fill 1-D ``into`` with the values of items on the same device. Their memory may overlap:
        see [Note: decoded in place]. Without a workspace one is made."""

    def n_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the bytes of ``numel`` elements at home."""
        return self.items(numel) * self.dtype(dtype).itemsize

    def touched_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Return the bytes that decoding ``numel`` elements reads and writes."""
        return self.n_bytes(numel, dtype) + numel * dtype.itemsize


class Exact(Codec):
    """Elements at home equal those in frames."""

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

    The scale is bf16(largest magnitude of the block / ``most``), or 0 if that is no normal number:
    such a block is zeros. It is capped so that no value exceeds the dtype's largest number, which
    matters to blocks within a half per cent of that. All of it is elementwise IEEE arithmetic, so
    codes are the same on any device and with any number of threads.
    """

    exact = False
    code_bytes: int
    """Bytes of a block's codes."""
    most: float
    """The largest level."""
    scratch_bytes: int
    """Workspace bytes to decode an element."""
    passing_bytes: int
    """Bytes that decoding an element reads and writes, apart from its code and the element."""

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
        bits = torch.tensor(bound, dtype=torch.float32, device="cpu").view(torch.int32)
        cut = bits & -(2**16)  # towards zero
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
        """Return the levels of rows of codes, in the workspace."""


class Int8(Blocked):
    """Symmetric whole numbers from -127 to 127: 1.016 bytes a parameter.

    |w - w'| <= scale / 2 exactly, for w in fp32 and w' before it is rounded to a narrower dtype:
    a scale has 8 significant bits, so no quotient rounds across the middle of two codes, the
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

    |w - w'| is at most half the gap between the two levels around w, times the scale, plus fp32
    rounding; the widest gap is 0.304, from -1 to -0.696.
    """

    name = "nf4"
    block = 64
    code_bytes = 32
    most = 1.0
    scratch_bytes = 6  # a level, and half an index
    passing_bytes = 12

    def write_codes(self, rows: torch.Tensor, into: torch.Tensor) -> None:
        # 1. at most one middle of two levels lies in a cell, and cells are in order: a number in
        #    another cell than a middle is on the same side of the middle as its cell
        middles = nf4_middles(rows.device)
        of_middles = cells(middles).long()
        low = torch.bucketize(torch.arange(CELLS, device=rows.device), of_middles).to(torch.uint8)
        bound = torch.full((CELLS,), float("inf"), device=rows.device)
        bound[of_middles] = middles
        # 2. a code is the number of middles below: those of lower cells, perhaps this cell's
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

    Quantiles of the standard normal: 8 above zero at probabilities evenly spaced from
    1 - (1/30 + 1/32) / 2 down to, not including, 1/2, 7 below zero alike, and zero; all divided by
    the largest. (Dettmers, Pagnoni, Holtzman, Zettlemoyer: QLoRA, NeurIPS 2023, arXiv 2305.14314,
    section 3 and appendix E; the offset is from the authors' code.)
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
    """Return the middles between neighbouring levels, where the code changes."""
    levels = torch.tensor(NF4_LEVELS, dtype=torch.float32, device=device)
    return (levels[1:] + levels[:-1]) / 2


def cells(values: torch.Tensor) -> torch.Tensor:
    """Return the cell of each number; a larger number is never in a lower cell."""
    return values.add(1.0).mul_(CELLS // 2).to(torch.int32).clamp_(0, CELLS - 1)


class Workspace:
    """Memory to decode a slice of ``numel`` elements, allocated once. It is one slab, so that its
    bytes can be charged before it is allocated."""

    def __init__(self, codec: Blocked, numel: int, block: torch.Tensor) -> None:
        self.n_blocks = numel // codec.block
        sizes = [PAIRS_BYTES, codec.scratch_bytes * numel, 4 * self.n_blocks]
        pairs, scratch, scales = block.split(sizes)
        self.scratch: torch.Tensor = scratch
        self.pairs = pairs.view(PAIR)
        self.scales = scales.view(torch.float32).view(self.n_blocks, 1)
        levels = torch.tensor(NF4_LEVELS, dtype=torch.float32, device="cpu")
        both = torch.cartesian_prod(levels, levels)
        pairs.view(torch.float32).copy_(both.view(-1))

    @staticmethod
    def size_bytes(codec: Blocked, numel: int) -> int:
        """Return the bytes for a slice of ``numel`` elements, whole blocks."""
        return codec.scratch_bytes * numel + 4 * (numel // codec.block) + PAIRS_BYTES

    @classmethod
    def on(cls, device: Device, codec: Blocked, numel: int) -> Workspace:
        """Return a workspace in a device's memory."""
        slab = device.arena(cls.size_bytes(codec, numel))
        return cls(codec, numel, slab.carve(0, slab.n_bytes))

    @classmethod
    def beside(cls, codec: Blocked, into: torch.Tensor) -> Workspace:
        """Return a temporary workspace next to ``into``, for a single read."""
        n_blocks = max(1, -(-into.numel() // codec.block))
        numel = min(DECODED_AT_ONCE, n_blocks * codec.block)
        size = cls.size_bytes(codec, numel)
        return cls(codec, numel, torch.empty(size, dtype=torch.uint8, device=into.device))


PAIR = torch.int64  # two fp32 levels, looked up as one (measured: a fifth of the time)
PAIRS_BYTES = 256 * PAIR.itemsize  # one pair for each byte of NF4


def is_finite(values: torch.Tensor) -> bool:
    """Whether all of a tensor is finite; makes no copy."""
    if values.numel() == 0 or values.is_meta:
        return True
    return all(bool(bound.isfinite()) for bound in values.detach().aminmax())


def slice_numel(codec: Blocked, numel: int, *, is_cuda: bool) -> int:
    """Return the elements of a slice, if the largest bucket has ``numel``."""
    most = DECODED_AT_ONCE_ON_CUDA if is_cuda else DECODED_AT_ONCE
    return min(most, -(-numel // (SLICES * codec.block)) * codec.block)


EXACT, INT8, NF4 = Exact(), Int8(), Nf4()
CODECS: dict[str, Codec] = {codec.name: codec for codec in (EXACT, INT8, NF4)}


def refusal(name: str, codec: Codec) -> ConfigError:
    """Return the error for a parameter's weights that a codec cannot hold."""
    return ConfigError(
        f"parameter {name!r} has weights that are NaN or infinite, which"
        f" frozen={codec.name!r} cannot hold",
        advice="repair the weights, or name its module in keep_exact=",
    )
