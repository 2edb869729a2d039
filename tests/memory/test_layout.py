"""The layout: where tensors lie in buckets, and where chunks cut them."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.errors import ConfigError
from hetero.memory.layout import (
    ALIGN,
    MAX_CHUNK_NUMEL,
    MIN_CHUNK_NUMEL,
    WASTE,
    Layout,
    ParamSpec,
    build_layout,
    choose_chunk_numel,
    contiguous_stride,
    dense_stride,
    packed_numel,
    waste_of,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)


def spec(
    shape: tuple[int, ...],
    *,
    unit: int = 0,
    name: str = "p",
    dtype: torch.dtype = torch.float32,
    trainable: bool = True,
) -> ParamSpec:
    return ParamSpec(name, unit, shape, contiguous_stride(shape), dtype, trainable)


@st.composite
def models(draw: st.DrawFn) -> tuple[list[ParamSpec], int]:
    """Return parameters of up to three units, and a chunk size far smaller than they are."""
    specs = []
    for i in range(draw(st.integers(1, 12))):
        specs.append(
            spec(
                draw(SHAPES),
                unit=draw(st.integers(0, 2)),
                name=f"p{i}",
                dtype=draw(st.sampled_from(DTYPES)),
                trainable=draw(st.booleans()),
            )
        )
    return specs, 64 * draw(st.integers(1, 5))


def laid_out(model: tuple[list[ParamSpec], int]) -> Layout:
    specs, chunk_bytes = model
    return build_layout(specs, ["a", "b", "c"], chunk_bytes)


# -- segments ------------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None)
@given(models())
def test_every_parameter_has_exactly_one_segment(model: tuple[list[ParamSpec], int]) -> None:
    layout = laid_out(model)
    placed = [s.index for bucket in layout.buckets for s in bucket.segments]

    assert sorted(placed) == list(range(len(model[0])))
    for index, (bucket_id, segment) in enumerate(layout.home):
        assert segment.index == index
        assert segment.spec is model[0][index]
        assert layout.buckets[bucket_id].segments[segment.position] is segment


@settings(derandomize=True, deadline=None)
@given(models())
def test_segments_are_disjoint_aligned_and_inside(model: tuple[list[ParamSpec], int]) -> None:
    for bucket in laid_out(model).buckets:
        owner = [-1] * bucket.numel
        for segment in bucket.segments:
            assert segment.offset % ALIGN == 0
            assert 0 <= segment.offset <= segment.end <= bucket.numel
            assert set(owner[segment.offset : segment.end]) <= {-1}
            owner[segment.offset : segment.end] = [segment.index] * segment.spec.numel


@settings(derandomize=True, deadline=None)
@given(models())
def test_a_bucket_is_of_one_unit_one_dtype_and_one_treatment(
    model: tuple[list[ParamSpec], int],
) -> None:
    layout = laid_out(model)
    kinds = [(b.unit, b.trainable, b.dtype) for b in layout.buckets]

    assert len(set(kinds)) == len(kinds)
    for bucket, kind in zip(layout.buckets, kinds, strict=True):
        assert {(s.spec.unit, s.spec.trainable, s.spec.dtype) for s in bucket.segments} == {kind}


@settings(derandomize=True, deadline=None)
@given(models())
def test_segments_lie_back_to_back_in_model_order(model: tuple[list[ParamSpec], int]) -> None:
    for bucket in laid_out(model).buckets:
        assert [s.index for s in bucket.segments] == sorted(s.index for s in bucket.segments)
        for before, after in zip(bucket.segments, bucket.segments[1:], strict=False):
            assert 0 <= after.offset - before.end < ALIGN


# -- chunks --------------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None)
@given(models())
def test_chunk_ids_number_the_buckets_without_gaps(model: tuple[list[ParamSpec], int]) -> None:
    layout = laid_out(model)

    assert [c for b in layout.buckets for c in b.chunks] == list(range(layout.n_chunks))
    assert [b.id for b in layout.buckets] == list(range(len(layout.buckets)))


@settings(derandomize=True, deadline=None)
@given(models())
def test_only_the_last_chunk_of_a_bucket_is_part_empty(model: tuple[list[ParamSpec], int]) -> None:
    for bucket in laid_out(model).buckets:
        packed = packed_numel(s.spec for s in bucket.segments)

        assert bucket.chunk_numel == model[1] // 4
        assert bucket.n_chunks == max(1, math.ceil(packed / bucket.chunk_numel))
        assert bucket.n_bytes == bucket.numel * bucket.dtype.itemsize
        assert bucket.granules == bucket.n_chunks * bucket.dtype.itemsize


@settings(derandomize=True, deadline=None)
@given(models(), st.data())
def test_the_chunks_of_a_range_are_those_its_elements_lie_in(
    model: tuple[list[ParamSpec], int], data: st.DataObject
) -> None:
    bucket = data.draw(st.sampled_from(laid_out(model).buckets))
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, bucket.numel)] * 2)))
    touched = {bucket.first_chunk + i // bucket.chunk_numel for i in range(start, end)}

    assert set(bucket.chunks_of(start, end)) == touched


def test_a_tensor_may_straddle_chunk_borders() -> None:
    layout = build_layout([spec((40,)), spec((100,)), spec((8,))], ["a"], 64 * 4)
    (bucket,) = layout.buckets

    assert [s.offset for s in bucket.segments] == [0, 48, 160]
    assert [list(bucket.chunks_of(s.offset, s.end)) for s in bucket.segments] == [
        [0],
        [0, 1, 2],
        [2],
    ]
    assert bucket.n_chunks == 3


def test_a_bucket_of_empty_tensors_still_has_a_chunk() -> None:
    layout = build_layout([spec((0,)), spec((3, 0))], ["a"], 64)
    (bucket,) = layout.buckets

    assert bucket.n_chunks == 1
    assert [s.end - s.offset for s in bucket.segments] == [0, 0]


def test_no_parameters_make_no_buckets() -> None:
    layout = build_layout([], [])

    assert layout.buckets == ()
    assert layout.n_chunks == 0
    assert layout.waste == 0.0


@pytest.mark.parametrize("chunk_bytes", [0, -64, 32, 63, 65, 100])
def test_a_chunk_size_that_is_no_positive_multiple_of_64_is_refused(chunk_bytes: int) -> None:
    with pytest.raises(ConfigError, match="chunk_bytes"):
        build_layout([spec((8,))], ["a"], chunk_bytes)


# -- strides -------------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 4), max_size=4), st.randoms(use_true_random=False))
def test_any_dense_tensor_keeps_its_own_strides(shape: list[int], choose: random.Random) -> None:
    order = list(range(len(shape)))
    choose.shuffle(order)
    tensor = torch.empty([shape[d] for d in order]).permute(
        [order.index(d) for d in range(len(order))]
    )

    stride = dense_stride("p", tensor.shape, tensor.stride())

    assert fills_exactly(tuple(tensor.shape), stride)
    if tensor.numel():
        assert stride == tensor.stride()


@settings(derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 30)), max_size=4))
def test_whatever_the_strides_a_tensor_fills_its_segment_without_gaps(
    dims: list[tuple[int, int]],
) -> None:
    shape, stride = tuple(d[0] for d in dims), tuple(d[1] for d in dims)

    assert fills_exactly(shape, dense_stride("p", shape, stride))


def fills_exactly(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether the elements of a tensor are [0, numel), each met once."""
    numel = math.prod(shape)
    flat = torch.zeros(max(numel, 1), dtype=torch.int64)
    if numel:
        flat.as_strided(shape, stride).add_(1)
        return bool(flat.eq(1).all()) and len(stride) == len(shape)
    return len(stride) == len(shape)


def test_channels_last_is_kept() -> None:
    weight = torch.empty(8, 3, 5, 5).to(memory_format=torch.channels_last)

    assert dense_stride("w", weight.shape, weight.stride()) == weight.stride() == (75, 1, 15, 3)


def test_a_transposed_matrix_is_kept() -> None:
    weight = torch.empty(4, 6).t()

    assert dense_stride("w", weight.shape, weight.stride()) == (1, 6)


@pytest.mark.parametrize(
    "tensor",
    [torch.empty(8, 6)[:, :3], torch.empty(1).expand(4, 5), torch.empty(9)[::2]],
    ids=["slice", "expanded", "strided"],
)
def test_a_tensor_with_gaps_or_overlap_is_laid_out_contiguously(tensor: torch.Tensor) -> None:
    right = torch.empty(tensor.shape).stride()

    assert dense_stride("w", tensor.shape, tensor.stride()) == right


@settings(derandomize=True, deadline=None)
@given(SHAPES)
def test_contiguous_strides_are_torchs(shape: tuple[int, ...]) -> None:
    assert contiguous_stride(shape) == torch.empty(shape).stride()


# -- waste ---------------------------------------------------------------------------------------


def llama_3_8b(dtype: torch.dtype) -> tuple[list[ParamSpec], list[str]]:
    """Return the parameters of Llama 3 8B: units are embedding, blocks, norm and head."""
    width, hidden, kv, vocab = 4096, 14336, 1024, 128256
    block = [(width, width)] * 2 + [(kv, width)] * 2  # q, o, k, v
    block += [(hidden, width)] * 2 + [(width, hidden)] + [(width,)] * 2  # gate, up, down, norms
    names = ["embed", *(f"layers.{i}" for i in range(32)), "norm", "head"]
    specs = [spec((vocab, width), name="embed", dtype=dtype)]
    for i in range(32):
        specs += [
            spec(shape, unit=i + 1, name=f"layers.{i}.{j}", dtype=dtype)
            for j, shape in enumerate(block)
        ]
    specs += [spec((width,), unit=33, name="norm", dtype=dtype)]
    specs += [spec((vocab, width), unit=34, name="head", dtype=dtype)]
    return specs, names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_llama_3_8b_wastes_less_than_one_per_cent(dtype: torch.dtype) -> None:
    specs, names = llama_3_8b(dtype)
    layout = build_layout(specs, names)

    assert sum(s.numel for s in specs) == 8_030_261_248
    assert layout.param_bytes == 8_030_261_248 * dtype.itemsize
    assert 0 <= layout.waste < 0.01
    assert layout.chunk_numel >= 2**18  # and not by chunks too small for a link


@settings(derandomize=True, deadline=None)
@given(models())
def test_waste_is_the_share_of_bytes_that_hold_no_parameter(
    model: tuple[list[ParamSpec], int],
) -> None:
    layout = laid_out(model)
    held = sum(b.n_bytes for b in layout.buckets)
    used = sum(s.numel * s.dtype.itemsize for s in model[0])

    assert layout.waste == pytest.approx(1 - used / held)
    assert waste_of(model[0], layout.chunk_numel) <= layout.waste + 1e-12


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(1, 300_000), min_size=1, max_size=6))
def test_the_chosen_chunk_is_the_largest_that_wastes_little(sizes: list[int]) -> None:
    specs = [spec((n,), unit=i) for i, n in enumerate(sizes)]
    numel = choose_chunk_numel(specs)

    assert MIN_CHUNK_NUMEL <= numel <= MAX_CHUNK_NUMEL
    assert numel & (numel - 1) == 0
    assert numel == MIN_CHUNK_NUMEL or waste_of(specs, numel) <= WASTE
    assert numel == MAX_CHUNK_NUMEL or waste_of(specs, 2 * numel) > WASTE
