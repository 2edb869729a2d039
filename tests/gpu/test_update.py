"""Updates on a CUDA device have the CPU's bits. Every test skips by name without a device."""

from __future__ import annotations

import itertools
import math
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero.device.nvrtc import Nvrtc, open_nvrtc
from hetero.train.update import kernel
from hetero.train.update.device_kernel import SOURCE, DeviceLibrary, load_device
from tests.nvrtc import host
from tests.train.test_formulas import STEPS, cases
from tests.train.test_kernel import FACTORS, GRADS, assert_same, train

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
LAYOUTS = (torch.bfloat16, torch.float16)
ODD = [0.0, -0.0, 1e-45, -1e-40, 1.2e-38, 6e-8, 3.4e38, -3.4e38, 65519.0, 65520.0, -1e5, 1.0]
ODD += [math.inf, -math.inf, math.nan]
AdamW = torch.optim.AdamW


@pytest.fixture(scope="module")
def device() -> DeviceLibrary:
    found = load_device()
    assert found.try_out(torch.device("cuda", 0)) == ""
    return found


def by_both(
    kind: type[torch.optim.Optimizer],
    flags: dict[str, Any],
    value: torch.Tensor,
    grads: Sequence[torch.Tensor],
    device: DeviceLibrary,
    **given: Any,
) -> None:
    """Compare the CPU's updates with the device's, by kernels and by torch's operations."""
    expected = train(kind, flags, value, grads, native=kernel.load(), **given)
    there = [grad.cuda() for grad in grads]
    for native in (device, None):
        found = train(kind, flags, value.cuda(), there, native=native, **given)
        assert_same([each.cpu() for each in found], expected, where=(native, given))
    assert device.condition == "compiled"


@needs_cuda
def test_every_operation_of_every_kernel_rounds_by_itself() -> None:
    nvrtc = Nvrtc(open_nvrtc(Path(torch.__file__).parents[1], torch.version.cuda.split(".")[0]))
    for line, name in host.rows():
        text = f"{SOURCE.read_text(encoding='utf-8')}\n{line}\n"
        code = nvrtc.compile(text, 9999).decode()  # for a device of the future: PTX
        rounded = re.findall(r"\b(?:add|sub|mul|div|sqrt|rcp|fma|mad)\.(\S*f32)\b", code)
        assert f".entry {name}(" in code
        assert set(rounded) == {"rn.f32"}, name
        assert not re.search(r"\b(fma|mad)\.\S*f32", code)


@needs_cuda
@cases
def test_a_device_updates_as_the_cpu_does(
    kind: type[torch.optim.Optimizer], flags: dict[str, Any], device: DeviceLibrary
) -> None:
    generator = torch.Generator().manual_seed(0)
    for layout, dtype, factors in itertools.product(LAYOUTS, GRADS, FACTORS):
        value = torch.randn(4099, generator=generator)
        grads = [
            (torch.randn(4099, generator=generator) * 10.0 ** (i % 4 - 2)).to(dtype)
            for i in range(STEPS)
        ]
        by_both(kind, flags, value, grads, device, layout=layout, factors=factors)


@needs_cuda
@cases
def test_it_agrees_on_tiny_huge_and_broken_values(
    kind: type[torch.optim.Optimizer], flags: dict[str, Any], device: DeviceLibrary
) -> None:
    value = torch.tensor(ODD).repeat_interleave(len(ODD))
    for layout, dtype in itertools.product(LAYOUTS, GRADS):
        grads = [torch.tensor(ODD).roll(i).repeat(len(ODD)).to(dtype) for i in range(STEPS)]
        by_both(kind, flags, value, grads, device, layout=layout, factors=(0.5,))


@needs_cuda
@pytest.mark.parametrize("start", [1, 2, 4, 5])
def test_a_run_may_begin_anywhere_on_a_device(start: int, device: DeviceLibrary) -> None:
    n = 100_003
    generator = torch.Generator().manual_seed(1)
    value, grad = torch.randn(n, generator=generator), torch.randn(n, generator=generator)
    given: dict[str, Any] = {"layout": torch.bfloat16, "factors": ()}
    expected = train(AdamW, {}, value[start:], [grad[start:]], native=kernel.load(), **given)
    found = train(AdamW, {}, value.cuda()[start:], [grad.cuda()[start:]], native=device, **given)
    assert_same([each.cpu() for each in found], expected)


@needs_cuda
def test_an_update_runs_on_the_current_stream(device: DeviceLibrary) -> None:
    """The gradient is late on that stream: on another one the update would read its zeros."""
    value, late = torch.randn(1 << 20).cuda(), torch.randn(1 << 20).cuda()
    given: dict[str, Any] = {"layout": torch.bfloat16, "factors": ()}
    expected = train(AdamW, {}, value, [late], native=None, **given)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        grad = torch.zeros_like(late)
        torch.cuda._sleep(100_000_000)
        grad.copy_(late)
        found = train(AdamW, {}, value, [grad], native=device, **given)
    stream.synchronize()
    assert_same(found, expected)


@needs_cuda
def test_any_thread_updates_on_any_device(device: DeviceLibrary) -> None:
    """A thread that never used CUDA has no context of its own."""
    place = torch.device("cuda", torch.cuda.device_count() - 1)
    value, grad = torch.randn(5001).to(place), torch.randn(5001).to(place)
    given: dict[str, Any] = {"layout": torch.bfloat16, "factors": ()}
    expected = train(AdamW, {}, value, [grad], native=None, **given)
    torch.cuda.synchronize(place)
    found: list[torch.Tensor] = []

    def work() -> None:
        found.extend(train(AdamW, {}, value, [grad], native=device, **given))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize(place)
    assert_same(found, expected)
    assert device.problem == ""
