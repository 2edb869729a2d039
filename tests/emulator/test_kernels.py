"""Masters on an emulated CUDA device, updated by its kernels: the CPU's bits, and in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hetero
from hetero.api import engine_of, prepare_tuned
from hetero.config import Config
from hetero.train.engine.tuning import Tuning
from hetero.train.update import device_kernel
from hetero.train.update.device_kernel import DeviceLibrary
from hetero.train.update.kernel import Operands
from tests.emulator import fake
from tests.emulator.shim import DEVICE
from tests.emulator.test_hbm_homes import (
    a_larger_batch,
    reads_between_steps,
    run_on,
    six_steps,
    sums,
)
from tests.equivalence.blocks import SOME, WIDTH, Blocks, Run
from tests.nvrtc import host

INTS = {2: torch.int16, 4: torch.int32}


class Seen(DeviceLibrary):
    """The kernels, whose reads and writes the emulator sees: they change no bit before it."""

    def update(self, c: Any, run: Operands) -> None:
        for tensor in (run.param, run.low, *run.states):
            tensor.view(INTS[tensor.itemsize]).bitwise_or_(0)
        run.grad.clone()
        super().update(c, run)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> DeviceLibrary:
    made = host.toolchain()
    found = Seen(lambda: made, kind=DEVICE)
    monkeypatch.setattr(device_kernel, "load_device", lambda: found)
    return found


@pytest.mark.campaign(seconds=4)
@pytest.mark.parametrize(
    "train", [six_steps, sums, a_larger_batch, reads_between_steps], ids=lambda f: f.__name__
)
def test_kernels_of_a_device_have_the_bits_of_updates_at_home(
    train: Callable[[Run], None], kernels: DeviceLibrary, watched: None
) -> None:
    up, down = run_on(None), run_on(False)
    train(down)
    assert kernels.condition == "compiled when it is first needed"
    train(up)

    assert up.most and kernels.condition == "compiled"
    assert any(call.startswith("cuLaunchKernel adam_") for call in host.calls())
    assert up.bits() == down.bits()


def bits_of(tuning: Tuning | None = None, **settings: Any) -> tuple[bytes, str]:
    """Return the bits after four steps, and where the model stayed."""
    torch.manual_seed(5)
    model = Blocks()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = Config.load(device=fake.device(), chunk_bytes=4096, **settings)
    model, optimizer = prepare_tuned(model, inner, config, tuning)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[settings["precision"]]
    for number in range(4):
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(number))
        hetero.backward(model(x.to(dtype).to(fake.PLACE)).float().square().mean())
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    masters = optimizer.state_dict()["masters"].values()
    bits = b"".join(m.detach().cpu().numpy().tobytes() for m in masters)
    return bits, engine_of(model).residence.name


@pytest.mark.campaign(seconds=3)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("way", ["resident", "streamed"])
def test_a_model_that_fits_or_streams_its_homes_is_updated_by_kernels(
    precision: str, way: str, kernels: DeviceLibrary, watched: None
) -> None:
    expected, name = bits_of(Tuning(homes_on_hbm=False), precision=precision, hbm=SOME)
    assert name == "paged" and kernels.condition == "compiled when it is first needed"
    if way == "resident":
        found, name = bits_of(precision=precision, hbm=64 << 20)
    else:
        streams = Tuning(update_on_device=True, homes_on_hbm=False)
        found, name = bits_of(streams, precision=precision, hbm=SOME + (64 << 10))

    assert name == ("resident" if way == "resident" else "paged")
    assert kernels.condition == "compiled"
    assert found == expected
