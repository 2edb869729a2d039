"""Codecs: what a weight becomes, how far that is from it, and where it lies meanwhile."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.device import CpuDevice
from hetero.errors import ConfigError
from hetero.memory.codec import (
    CODECS,
    EXACT,
    INT8,
    NF4,
    NF4_LEVELS,
    SCALE,
    Blocked,
    NotFinite,
    Workspace,
    slice_numel,
)
from hetero.memory.layout import ParamSpec, build_layout, contiguous_stride

BLOCKED = [INT8, NF4]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PUBLISHED = (  # of bitsandbytes, functional.py, get_4bit_type("nf4"); QLoRA, appendix E
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def coded(codec: Blocked, values: torch.Tensor) -> torch.Tensor:
    """Return what values are once they have been at home."""
    found = torch.empty_like(values)
    codec.decode(codec.encode(values, values.dtype), found)
    return found


def scales(codec: Blocked, items: torch.Tensor) -> torch.Tensor:
    return items.view(-1, codec.block_bytes)[:, codec.code_bytes :].view(SCALE).double()


def weights(numel: int, seed: int, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return numbers of all magnitudes, with zeros and equal ones among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator)
    spread = torch.randint(-6, 3, (-(-numel // 16),), generator=generator)
    values *= 10.0 ** spread.repeat_interleave(16)[:numel]
    values[torch.rand(numel, generator=generator) < 0.1] = 0.0
    return values.to(dtype)


def test_the_levels_of_nf4_are_those_that_its_authors_published() -> None:
    """Theirs come of quantiles in fp32: the last digits differ."""
    assert len(NF4_LEVELS) == 16 and list(NF4_LEVELS) == sorted(NF4_LEVELS)
    assert (NF4_LEVELS[0], NF4_LEVELS[7], NF4_LEVELS[15]) == (-1.0, 0.0, 1.0)
    assert max(abs(a - b) for a, b in zip(NF4_LEVELS, PUBLISHED, strict=True)) < 3e-7


@pytest.mark.parametrize("codec", BLOCKED, ids=lambda c: c.name)
@settings(max_examples=60, deadline=None)
@given(numel=st.integers(1, 700), seed=st.integers(0, 2**30), exponent=st.integers(-30, 30))
def test_a_weight_is_no_further_off_than_its_block_allows(
    codec: Blocked, numel: int, seed: int, exponent: int
) -> None:
    """int8: half a scale, exactly. nf4: half the gap beside it, in units of the scale, rounded."""
    values = weights(numel, seed) * 2.0**exponent
    items = codec.encode(values, torch.float32)
    off = (coded(codec, values).double() - values.double()).abs()
    scale = scales(codec, items).repeat_interleave(codec.block, 0).view(-1)[:numel]
    if codec is INT8:
        assert bool((off <= scale / 2).all())
        return
    levels = torch.tensor(NF4_LEVELS, dtype=torch.float64)
    gap = (levels[1:] - levels[:-1]).max()
    assert bool((off <= scale * gap / 2 * (1 + 1e-6)).all())
    nearest = ((values.double() / scale)[:, None] - levels).abs().min(1).values * scale
    assert bool((off <= nearest.nan_to_num(0.0) + 1e-6 * scale).all())


def test_nf4_codes_are_the_number_of_middles_below() -> None:
    """By the definition, at the middles, right beside them, and everywhere else."""
    levels = torch.tensor(NF4_LEVELS)
    middles = (levels[1:] + levels[:-1]) / 2
    beside = [middles, middles.nextafter(torch.tensor(2.0)), middles.nextafter(torch.tensor(-2.0))]
    values = torch.cat([*beside, levels, torch.linspace(-1, 1, 10_001), torch.zeros(26)])
    values = torch.cat([values, values.new_zeros(-len(values) % 63)]).view(-1, 63)
    values = torch.cat([torch.ones(len(values), 1), values], 1)  # every block has the scale 1
    items = NF4.encode(values.view(-1), torch.float32).view(-1, 34)
    codes = torch.stack([items[:, :32] >> 4, items[:, :32] & 15], 2).view(len(values), 64)
    assert torch.equal(codes.long(), torch.bucketize(values, middles))
    assert codes.unique().tolist() == list(range(16))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 126), st.integers(1, 2**16), st.integers(0, 255), st.booleans())
def test_int8_rounds_right_beside_the_middle_of_two_codes(
    code: int, ulps: int, mantissa: int, above: bool
) -> None:
    """A quotient that were rounded across the middle would be further off than half a scale."""
    scale = (1 + (mantissa % 128) / 128) * 2.0**-9
    middle = torch.tensor((code + 0.5) * scale, dtype=torch.float32)
    bits = middle.view(torch.int32) + (ulps if above else -ulps)
    values = torch.stack([torch.tensor(127 * scale), bits.view(torch.float32)])
    items = INT8.encode(values, torch.float32)
    assert scales(INT8, items).item() == scale
    off = (coded(INT8, values).double() - values.double()).abs()
    assert bool((off <= scale / 2).all())


@pytest.mark.parametrize("codec", BLOCKED, ids=lambda c: c.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_and_the_least_numbers_stay_finite_and_near(
    codec: Blocked, dtype: torch.dtype
) -> None:
    info = torch.finfo(dtype)
    values = torch.tensor([info.max, -info.max, info.tiny, 0.0, info.max / 3], dtype=dtype)
    found = coded(codec, values)
    assert bool(found.isfinite().all())
    assert torch.allclose(found[:2].double(), values[:2].double(), rtol=0.01)
    least = torch.full((5,), torch.finfo(torch.float32).smallest_normal / 4)
    assert coded(codec, least).tolist() == [0.0] * 5  # defined, whatever flushes subnormals


@pytest.mark.parametrize("codec", BLOCKED, ids=lambda c: c.name)
def test_a_block_of_zeros_is_zeros_whatever_stands_beside_it(codec: Blocked) -> None:
    values = torch.zeros(3 * codec.block)
    values[codec.block : 2 * codec.block] = -0.5
    found = coded(codec, values).view(3, -1)
    assert found[0].tolist() == found[2].tolist() == [0.0] * codec.block
    assert torch.allclose(found[1], torch.tensor(-0.5), rtol=2**-8)


@pytest.mark.parametrize("codec", BLOCKED, ids=lambda c: c.name)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_is_refused(codec: Blocked, value: float) -> None:
    values = torch.ones(5 * codec.block)
    values[2 * codec.block + 3] = value
    with pytest.raises(NotFinite):
        codec.encode(values, torch.float32)


@pytest.mark.parametrize("codec", BLOCKED, ids=lambda c: c.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_are_the_same_whatever_stands_beside_them_and_however_many_threads_there_are(
    codec: Blocked, dtype: torch.dtype
) -> None:
    values = weights(40_000 + 5, 3, dtype=dtype)
    whole = codec.encode(values, dtype)
    parts = [codec.encode(part, dtype) for part in values.split(3 * codec.block)]
    assert torch.equal(torch.cat(parts), whole)
    torch.set_num_threads(2)
    assert torch.equal(codec.encode(values, dtype), whole)


@pytest.mark.parametrize("codec", BLOCKED, ids=lambda c: c.name)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=25, deadline=None)
@given(blocks=st.integers(1, 40), at_once=st.integers(1, 9), seed=st.integers(0, 2**30))
def test_codes_at_the_end_of_their_own_frames_become_the_same_weights(
    codec: Blocked, dtype: torch.dtype, blocks: int, at_once: int, seed: int
) -> None:
    """See [Note: decoded in place]: no slice overwrites codes that are still to be read."""
    values = weights(blocks * codec.block, seed, dtype=dtype)
    items = codec.encode(values, dtype)
    frames = torch.full((values.nbytes,), 0xFF, dtype=torch.uint8)
    incoming = frames[len(frames) - len(items) :]
    incoming.copy_(items)
    workspace = Workspace.on(CpuDevice(), codec, at_once * codec.block)
    codec.decode(incoming, frames.view(dtype), workspace)
    assert torch.equal(frames.view(dtype), coded(codec, values))


def test_coding_again_what_was_decoded_gives_the_same_nf4() -> None:
    for dtype, seed in itertools.product(DTYPES, range(3)):
        once = coded(NF4, weights(1000, seed, dtype=dtype))
        assert torch.equal(coded(NF4, once), once)


def test_what_a_parameter_costs_at_home() -> None:
    assert NF4.n_bytes(2**20, torch.bfloat16) / 2**20 == 0.53125
    assert INT8.n_bytes(2**20, torch.float32) / 2**20 == 1.015625
    assert EXACT.n_bytes(2**20, torch.bfloat16) / 2**20 == 2
    assert NF4.n_bytes(1, torch.float32) == 34  # a whole block
    assert INT8.items(0) == NF4.items(0) == 0


def test_a_workspace_is_small_beside_small_buckets_and_bounded_beside_large_ones() -> None:
    assert slice_numel(NF4, 64 * 80, is_cuda=False) == 64 * 10
    assert slice_numel(NF4, 1, is_cuda=False) == 64
    assert slice_numel(INT8, 2**30, is_cuda=False) == 2**17
    assert Workspace.size_bytes(NF4, 2**22) < 27 * 2**20


def spec(name: str, shape: tuple[int, ...], codec: str, *, unit: int = 0) -> ParamSpec:
    stride = contiguous_stride(shape)
    return ParamSpec(name, unit, shape, stride, torch.bfloat16, False, CODECS[codec])


def test_tensors_begin_blocks_and_have_a_bucket_of_their_own_kind() -> None:
    specs = [
        spec("a", (3, 5), "nf4"),
        spec("norm", (7,), "keep"),
        spec("b", (9, 11), "nf4"),
        spec("c", (64, 2), "nf4"),
    ]
    layout = build_layout(specs, ["u"], chunk_bytes=256)
    first, second = layout.buckets
    assert [s.spec.name for s in first.segments] == ["a", "b", "c"]
    assert [s.offset for s in first.segments] == [0, 64, 192]
    assert (first.n_chunks, first.n_bytes, first.home_bytes) == (5, 640, 5 * 34)
    assert [s.spec.name for s in second.segments] == ["norm"]
    assert second.home_bytes == second.n_bytes


def test_a_chunk_is_of_whole_blocks() -> None:
    with pytest.raises(ConfigError, match="multiple of 512"):
        build_layout([spec("a", (300, 5), "int8")], ["u"], chunk_bytes=256)
