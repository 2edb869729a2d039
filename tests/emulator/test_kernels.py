"""Masters on an emulated CUDA device, updated by its kernels: the CPU's bits, and in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hetero.train.update import device_kernel
from hetero.train.update.device_kernel import DeviceLibrary
from tests.emulator.shim import DEVICE
from tests.emulator.test_hbm_homes import Run, a_larger_batch, reads_between_steps, six_steps, sums
from tests.nvrtc import host

INTS = {2: torch.int16, 4: torch.int32}


class Seen(DeviceLibrary):
    """The kernels, whose reads and writes the emulator sees: they change no bit before it."""

    def update(self, c: Any, *, param: Any, low: Any, grad: Any, states: Any, factors: Any) -> None:
        for tensor in (param, low, *states):
            tensor.view(INTS[tensor.itemsize]).bitwise_or_(0)
        grad.clone()
        super().update(c, param=param, low=low, grad=grad, states=states, factors=factors)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> DeviceLibrary:
    made = host.toolchain()
    found = Seen(lambda: made, kind=DEVICE)
    monkeypatch.setattr(device_kernel, "load_device", lambda: found)
    return found


@pytest.mark.parametrize(
    "train", [six_steps, sums, a_larger_batch, reads_between_steps], ids=lambda f: f.__name__
)
def test_kernels_of_a_device_have_the_bits_of_updates_at_home(
    train: Callable[[Run], None], kernels: DeviceLibrary, watched: None
) -> None:
    up, down = Run(None), Run(False)
    train(down)
    assert kernels.condition == "compiled when it is first needed"
    train(up)

    assert up.most and kernels.condition == "compiled"
    assert any(call.startswith("cuLaunchKernel adam_") for call in host.calls())
    assert up.bits() == down.bits()
