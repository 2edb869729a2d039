"""The CUDA path on a real device. Every test skips by name without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hetero.recipes.calibrate import CalibrateOptions, calibrate
from tests.gpu import cases
from tests.gpu.cases import Gpu
from tests.recipes.test_calibrate import TINY

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
globals().update({name: vars(cases)[name] for name in cases.NAMES})


@pytest.fixture
def gpu() -> Gpu:
    """The device, with the workspaces that cuBLAS takes in this thread and in backward's."""
    x = torch.ones(64, 64, device="cuda", requires_grad=True)
    (x @ x).sum().backward()
    return Gpu("cuda", torch.cuda, width=2048, slack=192 << 20)


def test_calibrating_cuda_writes_a_profile_without_a_problem(disk: Path) -> None:
    options = CalibrateOptions(pace=TINY, device="cuda", output=disk / "box.toml")
    result = calibrate(options)
    gpu, link = result.profile.gpu, result.profile.link

    assert result.problems == ()
    assert gpu is not None and link is not None
    assert gpu.name == torch.cuda.get_device_name()
    assert result.profile.matmul_seconds(64, 64, 64, "fp32") > 0
    assert result.profile.overlap.gemm_under_h2d is not None
    assert result.profile.overlap.update_under_dma is not None
