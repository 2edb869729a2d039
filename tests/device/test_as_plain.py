"""What decides over CUDA's bits: the operations that are called, and where tensors lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import hetero
from tests.emulator import fake


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = (torch.nn.Linear(24, 24), torch.nn.LayerNorm(24), torch.nn.Linear(24, 5))
    return torch.nn.Sequential(*layers)


def norms_of(model: torch.nn.Module, clip: Any) -> set[str]:
    model(torch.ones(3, 24, device=fake.PLACE)).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        clip()
    return {event.name for event in seen.events() if "norm" in event.name}


def test_norms_are_taken_by_the_kernels_that_plain_torch_uses(watched: None) -> None:
    plain, model = fake.on_device(build()), build()
    clip = torch.nn.utils.clip_grad_norm_
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = hetero.prepare(model, optimizer, device=fake.device(), hbm=20_000)

    ours = norms_of(model, lambda: optimizer.clip_grad_norm_(1.0))

    assert ours == norms_of(plain, lambda: clip(plain.parameters(), 1.0))
    assert "aten::_foreach_norm" in ours


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_begin_where_kernels_expect_them(watched: None, precision: str) -> None:
    model = build()
    model = hetero.prepare(model, device=fake.device(), hbm=20_000, precision=precision)
    starts: list[int] = []
    for layer in model:
        layer.register_forward_pre_hook(
            lambda module, args: starts.extend(p.data_ptr() % 256 for p in module.parameters())
        )
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model(torch.ones(3, 24, device=fake.PLACE, dtype=dtype))

    assert starts and not any(starts)
