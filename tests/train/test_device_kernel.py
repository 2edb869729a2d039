"""Models train by the kernels of a CUDA device, compiled for the host, as by torch's operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hetero
from hetero.api import engine_of, prepare_tuned
from hetero.config import Config
from hetero.device import SimDevice
from hetero.events import What
from hetero.status import status
from hetero.train.engine.tuning import Tuning
from hetero.train.update import device_kernel
from hetero.train.update.arithmetic import KERNEL_NUMEL, formula_numel
from hetero.train.update.device_kernel import DeviceLibrary
from tests.nvrtc import host


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> DeviceLibrary:
    """The kernels for CPU tensors, in place of the compiled library."""
    found = host.library()
    monkeypatch.setattr(device_kernel, "load", lambda: None)
    monkeypatch.setattr(device_kernel, "load_device", lambda: found)
    return found


def train(precision: str, **settings: Any) -> tuple[list[torch.Tensor], Any]:
    """Return the masters after three steps of accumulated gradients, and the model."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
    plain = torch.optim.AdamW(model.parameters(), lr=0.01)
    tuning = settings.pop("tuning", None)
    config = Config.load(precision=precision, chunk_bytes=1024, **settings)
    model, optimizer = prepare_tuned(model, plain, config, tuning)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    for number in range(3):
        for part in range(2):
            x = torch.randn(2, 16, generator=torch.Generator().manual_seed(2 * number + part))
            hetero.backward(model(x.to(dtype)).float().square().mean())
        optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
    engine = engine_of(model)
    engine.finish()
    masters = engine.setup.masters
    return [masters.value(s).clone() for _, s in engine.setup.blueprint.layout.home], model


PLACES: list[dict[str, Any]] = [{"device": "cpu"}, {"device": SimDevice(seed=2), "hbm": 8_000}]


@pytest.mark.parametrize("settings", PLACES, ids=["resident", "paged"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_model_trains_by_kernels_as_by_torchs_operations(
    precision: str, settings: dict[str, Any], device: DeviceLibrary
) -> None:
    expected, _ = train(precision, **settings, tuning=Tuning(native=False))
    assert device.condition == "compiled when it is first needed"
    masters, _ = train(precision, **settings)

    assert device.condition == "compiled"
    assert sum(call.startswith("cuLaunchKernel adam_") for call in host.calls()) >= 12
    for ours, theirs in zip(masters, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_a_kernel_that_fails_costs_no_bit_and_is_told_once(device: DeviceLibrary) -> None:
    expected, _ = train("bf16", device="cpu", tuning=Tuning(native=False))
    host.fail("cuLaunchKernel", 700)
    masters, model = train("bf16", device="cpu")
    host.fail("cuLaunchKernel", 0)

    for ours, theirs in zip(masters, expected, strict=True):
        assert torch.equal(ours, theirs)
    log = engine_of(model).setup.log
    said = [e.why for e in log if e.what == What.DECISION.value and "cuLaunchKernel" in e.why]
    assert len(said) == 1
    assert "torch's operations, with the same bits" in said[0]
    assert "cuLaunchKernel" in device_kernel.conditions(torch.device("cuda"))["cuda"]


def test_status_says_how_masters_are_updated() -> None:
    _, model = train("bf16", device="cpu")

    assert list(status(model).update_kernels) == ["cpu"]


def test_a_device_takes_a_run_in_one_launch() -> None:
    assert formula_numel(torch.device("cuda", 1)) is None
    assert formula_numel(torch.device("cpu")) == KERNEL_NUMEL


def test_the_doctor_tries_the_kernel_that_training_uses(device: DeviceLibrary) -> None:
    assert device.try_out(torch.device("cpu")) == ""
    assert any(call == "cuModuleGetFunction adam_split_bfloat" for call in host.calls())

    assert "not sm_70" in host.library(capability=70).try_out(torch.device("cpu"))
