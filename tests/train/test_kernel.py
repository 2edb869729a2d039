"""Masters are stored without loss, and the compiled kernel computes what torch's operations do.

So do the kernels of update.c for a CUDA device, compiled for the host (tests/nvrtc).
"""

from __future__ import annotations

import itertools
import math
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hetero
from hetero.errors import StateError
from hetero.optim import Lion
from hetero.train.update import kernel
from hetero.train.update.arithmetic import MOST_RULE_NUMEL, RULE_NUMEL, rule_numel
from hetero.train.update.kernel import join, split_
from tests.nvrtc import host
from tests.train.test_formulas import CASES, STEPS, cases, rule

O = torch.optim
SIZES = (1, 3, 17, 1000, 4097, 100_003)
GRADS = (torch.bfloat16, torch.float16, torch.float32)
FACTORS: tuple[tuple[float, ...], ...] = ((), (1 / 1024,), (1 / 3, 0.7))
SOURCE = Path(hetero.__file__).parent / "csrc" / "update.c"
Array = np.ndarray[Any, np.dtype[np.float32]]


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def native(request: pytest.FixtureRequest) -> Iterator[kernel.Native | None]:
    """The CPU's kernel, or a CUDA device's on the host."""
    if request.param == "cpu":
        yield library()
        return
    device = host.library()
    yield device
    assert device.condition == "compiled"  # nothing was left to torch's operations


def library() -> kernel.Library | None:
    """Return the CPU's kernel; missing only on a machine that could not compile it."""
    found = kernel.load()
    if found is None and any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        pytest.fail("a C compiler is here, but no kernel: python hatch_build.py")
    return found


def masters(value: torch.Tensor, layout: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (param, low) of an fp32 master in the layout of a working dtype."""
    low = torch.int16 if layout is torch.bfloat16 else torch.float32
    pair = torch.empty_like(value, dtype=layout), torch.empty_like(value, dtype=low)
    split_(value, *pair)
    return pair


def bits(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bits, every NaN as one."""
    if x.is_floating_point():
        x = torch.where(x.isnan(), math.nan, x)
        return x.view(torch.int32 if x.dtype is torch.float32 else torch.int16)
    return x


def train(
    kind: type[torch.optim.Optimizer],
    flags: dict[str, Any],
    value: torch.Tensor,
    grads: Sequence[torch.Tensor],
    *,
    layout: torch.dtype,
    factors: Sequence[float],
    native: kernel.Native | None,
) -> list[torch.Tensor]:
    """Return (param, low, states...) after one update a gradient."""
    formula, group = rule(kind, flags)
    param, low = masters(value, layout)
    states = [torch.full_like(value, fill) for fill in formula.arrays(group).values()]
    scalars, fresh = formula.scalars(group), True
    for grad in grads:
        c, scalars = formula.coefficients(group, scalars, fresh)
        fresh = False
        tensors = {"param": param, "low": low, "grad": grad, "states": states}
        kernel.update(formula, c, **tensors, factors=factors, native=native)
    return [param, low, *states]


def assert_same(
    ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], *, where: object = ""
) -> None:
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(bits(a), bits(b)), (where, i, a, b)


# -- the two paths -------------------------------------------------------------------------------


@pytest.mark.campaign(seconds=3)
@cases
def test_the_kernel_gives_the_bits_of_torchs_operations(
    kind: type[torch.optim.Optimizer], flags: dict[str, Any], native: kernel.Native | None
) -> None:
    """Every layout, gradient and factors at one length; they take turns at the others."""
    everything = list(itertools.product((torch.bfloat16, torch.float16), GRADS, FACTORS))
    turn = 5 * CASES.index((kind, flags))
    for n, size in enumerate(SIZES):
        chosen = everything if size == 17 else [everything[(turn + 7 * n) % len(everything)]]
        for layout, dtype, factors in chosen:
            generator = torch.Generator().manual_seed(n)
            value = torch.randn(size, generator=generator)
            grads = [
                (torch.randn(size, generator=generator) * 10.0 ** (i % 4 - 2)).to(dtype)
                for i in range(STEPS)
            ]
            given: dict[str, Any] = {"layout": layout, "factors": factors}
            slow = train(kind, flags, value, grads, **given, native=None)
            fast = train(kind, flags, value, grads, **given, native=native)
            assert_same(fast, slow, where=(size, layout, dtype, factors))
            assert not torch.equal(join(slow[0], slow[1]), value)


@pytest.mark.campaign(seconds=1)
@cases
@pytest.mark.parametrize("layout", [torch.bfloat16, torch.float16])
def test_they_agree_on_tiny_huge_and_broken_values(
    kind: type[torch.optim.Optimizer],
    flags: dict[str, Any],
    layout: torch.dtype,
    native: kernel.Native | None,
) -> None:
    odd = [0.0, -0.0, 1e-45, -1e-40, 1.2e-38, 6e-8, 3.4e38, -3.4e38, 65519.0, 65520.0, -1e5, 1.0]
    odd += [math.inf, -math.inf, math.nan]
    value = torch.tensor(odd).repeat_interleave(len(odd))
    for dtype in GRADS:
        grads = [torch.tensor(odd).roll(i).repeat(len(odd)).to(dtype) for i in range(STEPS)]
        given = {"layout": layout, "factors": (0.5,)}
        slow = train(kind, flags, value, grads, **given, native=None)
        fast = train(kind, flags, value, grads, **given, native=native)
        assert_same(fast, slow, where=dtype)
        if layout is torch.bfloat16:
            param, low = slow[:2]
            broken = param.isnan()
            assert broken.any()
            assert set(param.view(torch.int16)[broken].tolist()) == {0x7FC0}
            assert set(low[broken].tolist()) == {0}


def test_all_loops_of_the_kernel_are_compared() -> None:
    """Every rule that update.c has belongs to a case."""
    written = {w.split(")")[0] for w in SOURCE.read_text().split("\nLOOPS(")[1:]}
    used = set()
    for kind, flags in CASES:
        formula, group = rule(kind, flags)
        used.add(formula.coefficients(group, formula.scalars(group), False)[0].rule)
    assert used == written


def test_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch, native: kernel.Native | None) -> None:
    generator = torch.Generator().manual_seed(3)
    value = torch.randn(5003, generator=generator)
    grads = [torch.randn(5003, generator=generator) for _ in range(STEPS)]
    given: dict[str, Any] = {"layout": torch.bfloat16, "factors": ()}
    whole = train(O.AdamW, {}, value, grads, **given, native=None)
    monkeypatch.setattr(kernel, "CPU_BLOCK_NUMEL", 512)
    assert_same(train(O.AdamW, {}, value, grads, **given, native=None), whole)
    cut = [
        train(O.AdamW, {}, value[s], [g[s] for g in grads], **given, native=native)
        for s in (slice(0, 1001), slice(1001, 5003))
    ]
    assert_same([torch.cat(parts) for parts in zip(*cut, strict=True)], whole)


@pytest.mark.parametrize("layout", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", GRADS)
def test_a_run_may_begin_and_end_anywhere(
    layout: torch.dtype, dtype: torch.dtype, native: kernel.Native | None
) -> None:
    """A device takes four elements at once where all tensors of a run allow it."""
    generator = torch.Generator().manual_seed(4)
    value = torch.randn(2100, generator=generator)
    grad = torch.randn(2100, generator=generator).to(dtype)
    formula, group = rule(O.AdamW, {})
    c, _ = formula.coefficients(group, formula.scalars(group), True)
    whole = train(O.AdamW, {}, value, [grad], layout=layout, factors=(0.7,), native=None)
    for start, end in ((0, 2100), (1, 2100), (2, 5), (4, 2051), (8, 9), (16, 16), (1027, 2099)):
        for shifted in range(4):  # which of the tensors begins elsewhere than the others
            param, low = masters(value, layout)
            tensors = [param, low, grad.clone(), torch.zeros(2100), torch.zeros(2100)]
            pad = [torch.zeros(1, dtype=t.dtype) for t in tensors]
            moved = [torch.cat((p, t))[1:] for p, t in zip(pad, tensors, strict=True)]
            given = list(tensors)
            given[shifted] = moved[shifted]
            before = [t.clone() for t in given]
            p, l, g, *states = (t[start:end] for t in given)
            run: dict[str, Any] = {"param": p, "low": l, "grad": g, "states": states}
            kernel.update(formula, c, **run, factors=(0.7,), native=native)
            for i, (after, expected) in enumerate(zip([p, l, *states], whole, strict=True)):
                assert torch.equal(bits(after), bits(expected[start:end])), (start, end, shifted, i)
            for after, same in zip(given, before, strict=True):
                assert torch.equal(after[:start], same[:start])
                assert torch.equal(after[end:], same[end:])


def test_what_the_kernel_cannot_address_is_refused(native: kernel.Native | None) -> None:
    formula, group = rule(O.SGD, {})
    c, _ = formula.coefficients(group, {}, True)
    param, low = masters(torch.ones(8), torch.bfloat16)
    for wrong in (
        {"grad": torch.ones(7)},
        {"grad": torch.ones(16)[::2]},
        {"grad": torch.ones(8, dtype=torch.float64)},
        {"low": torch.ones(8)},
        {"states": [torch.ones(8).bfloat16()]},
        {"factors": (1.0, 1.0, 1.0)},
    ):
        right = {"param": param, "low": low, "grad": torch.ones(8), "states": [], "factors": ()}
        with pytest.raises(StateError, match="one length"):
            kernel.update(formula, c, **{**right, **wrong}, native=native)


def test_a_library_of_another_kind_is_none(tmp_path: Path) -> None:
    assert kernel.load(tmp_path / "missing.so") is None
    (tmp_path / "no.so").write_bytes(b"not a library")
    assert kernel.load(tmp_path / "no.so") is None


def test_the_library_was_compiled_from_this_source() -> None:
    found = library()
    if found is not None:
        advice = "the source is newer than the library: python hatch_build.py"
        assert found.source_crc == zlib.crc32(SOURCE.read_bytes()), advice


# -- an independent reference --------------------------------------------------------------------


def f32(x: float) -> np.float32:
    return np.float32(x)


def sgd(p: Array, grads: Sequence[Array]) -> Array:
    """lr 0.1, momentum 0.9, weight decay 0.01."""
    buffer = np.zeros_like(p)
    for step, grad in enumerate(grads):
        d = grad + f32(0.01) * p
        buffer = d if step == 0 else buffer * f32(0.9) + f32(1.0) * d
        p = p + f32(-0.1) * buffer
    return p


def adam(p: Array, grads: Sequence[Array], *, decoupled: bool, amsgrad: bool) -> Array:
    """lr 0.01, weight decay 0.1."""
    m, v, largest = np.zeros_like(p), np.zeros_like(p), np.zeros_like(p)
    for step, g in enumerate(grads, 1):
        if decoupled:
            p = p * f32(1 - 0.01 * 0.1)
        else:
            g = g + f32(0.1) * p
        m = m + f32(1 - 0.9) * (g - m)
        v = v * f32(0.999) + (f32(1 - 0.999) * g) * g
        largest = np.where(largest > v, largest, v)
        root = np.sqrt(largest if amsgrad else v) / f32((1 - 0.999**step) ** 0.5)
        p = p + (f32(-(0.01 / (1 - 0.9**step))) * m) / (root + f32(1e-8))
    return p


def lion(p: Array, grads: Sequence[Array]) -> Array:
    """lr 0.01, weight decay 0.1."""
    m = np.zeros_like(p)
    for g in grads:
        p = p * f32(1 - 0.01 * 0.1)
        p = p + f32(-0.01) * np.sign(m + f32(1 - 0.9) * (g - m))
        m = m + f32(1 - 0.99) * (g - m)
    return p


WRITTEN_OUT: list[tuple[Any, dict[str, Any], Callable[..., Array], dict[str, Any]]] = [
    (O.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}, sgd, {}),
    (O.Adam, {"lr": 0.01, "weight_decay": 0.1}, adam, {"decoupled": False, "amsgrad": False}),
    (O.AdamW, {"lr": 0.01, "weight_decay": 0.1}, adam, {"decoupled": True, "amsgrad": False}),
    (
        O.AdamW,
        {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True},
        adam,
        {"decoupled": True, "amsgrad": True},
    ),
    (Lion, {"lr": 0.01, "weight_decay": 0.1}, lion, {}),
]


@pytest.mark.parametrize(("kind", "flags", "reference", "choice"), WRITTEN_OUT)
@pytest.mark.parametrize("layout", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("path", ["kernel", "torch"])
def test_both_are_the_formula_in_numpy_operation_by_operation(
    kind: Any,
    flags: dict[str, Any],
    reference: Callable[..., Array],
    choice: dict[str, Any],
    layout: torch.dtype,
    path: str,
    native: kernel.Native | None,
) -> None:
    generator = torch.Generator().manual_seed(7)
    value = torch.randn(4097, generator=generator)
    grads = [torch.randn(4097, generator=generator).bfloat16() for _ in range(STEPS)]
    scaled = [g.float().numpy() * f32(1 / 3) * f32(0.7) for g in grads]
    expected = torch.from_numpy(reference(value.numpy(), scaled, **choice))

    param, low, *_ = train(
        kind,
        flags,
        value,
        grads,
        layout=layout,
        factors=(1 / 3, 0.7),
        native=native if path == "kernel" else None,
    )

    assert_same([join(param, low)], [expected])
    assert_same([param, low], masters(expected, layout))


# -- storage -------------------------------------------------------------------------------------


def test_every_high_half_splits_and_joins_without_loss() -> None:
    high = np.arange(65536, dtype=np.uint32)[:, None] << 16
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    assert_split(torch.from_numpy((high | low).reshape(-1).view(np.float32)))


def test_random_bits_split_and_join_without_loss() -> None:
    words = np.random.default_rng(0).integers(0, 2**32, 10**6, dtype=np.uint32)
    assert_split(torch.from_numpy(words.view(np.float32)))


def assert_split(value: torch.Tensor) -> None:
    before = value.clone().view(torch.int32)
    param, low = masters(value, torch.bfloat16)
    assert torch.equal(value.view(torch.int32), before)

    words, nan = value.numpy().view(np.uint32), value.isnan()
    nearest = (words.astype(np.uint64) + 0x8000) >> 16  # ties go away from zero
    high = torch.where(nan, 0x7FC0, torch.from_numpy(nearest.astype(np.int64)))
    assert torch.equal(param.view(torch.int16).int() & 0xFFFF, high.int())
    assert not low[nan].any()

    joined = join(param, low)
    assert torch.equal(joined.view(torch.int32)[~nan], before[~nan])
    assert joined[nan].isnan().all()
    out = torch.empty_like(value)
    assert join(param, low, out) is out
    assert_same([out], [joined])


def test_an_fp16_master_is_its_low_part() -> None:
    value = torch.tensor([1.0, 1 + 2**-11, 1 + 3 * 2**-11, 65519.9, 65520.0, 2.0**-25, -1e-8])
    param, low = masters(value, torch.float16)

    assert torch.equal(low, value)
    assert low.data_ptr() != value.data_ptr()
    assert join(param, low) is low
    assert torch.equal(param, value.half())


def test_the_kernel_rounds_every_fp16_as_torch_does(native: kernel.Native | None) -> None:
    """All fp16 values, as gradients and as masters with their neighbours and midpoints."""
    half = torch.arange(-32768, 32768, dtype=torch.int32).short().view(torch.float16)
    words = half.float().view(torch.int32)
    near = torch.cat([words + d for d in (-4097, -4096, -4095, -1, 0, 1, 4095, 4096, 4097)])
    value = near.view(torch.float32)
    given: dict[str, Any] = {"layout": torch.float16, "factors": ()}
    for grad in (torch.zeros_like(value), half.repeat(9)):
        slow = train(O.SGD, {"lr": 1.0}, value, [grad], **given, native=None)
        fast = train(O.SGD, {"lr": 1.0}, value, [grad], **given, native=native)
        assert_same(fast, slow)


@pytest.mark.campaign(seconds=0.5)
@cases
def test_threads_that_share_an_update_do_each_element_once(
    kind: type[torch.optim.Optimizer], flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = library()
    assert found is not None
    monkeypatch.setattr(kernel, "SHARED_NUMEL", 61)
    formula, group = rule(kind, flags)
    n = 4001
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(n, generator=generator)
    layouts = (torch.bfloat16, torch.float16)
    for layout, dtype, factors in itertools.product(layouts, GRADS, FACTORS):
        grad = torch.randn(n, generator=generator).to(dtype)
        numbers, _ = formula.coefficients(group, formula.scalars(group), True)
        both = []
        for shares in (False, True):
            param, low = masters(value, layout)
            states = [torch.full_like(value, fill) for fill in formula.arrays(group).values()]
            run = kernel.Operands(param, low, grad, states, factors)
            if shares:
                update = kernel.SharedUpdate(found, partial(tuple, (numbers, run)))
                threads = [threading.Thread(target=update) for _ in range(4)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            else:
                found.update(numbers, run)
            both.append([param, low, *states])
        assert_same(*both, where=(layout, dtype, factors))


def test_slices_are_longer_where_more_threads_need_the_interpreter() -> None:
    """Each holds it for a while, and so does the thread that launches the next forward."""
    assert rule_numel(1) == rule_numel(7) == RULE_NUMEL
    assert RULE_NUMEL < rule_numel(15) <= rule_numel(95) == MOST_RULE_NUMEL
