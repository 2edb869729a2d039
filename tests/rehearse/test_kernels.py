"""On the meta device operations make what they make on a CPU: as many tensors, as large."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as imported
from torch.utils._python_dispatch import TorchDispatchMode

from hetero.internals import run_backward
from hetero.rehearse.kernels import AsOn, as_on_cpu
from hetero.rehearse.twin import batch_twin, twin_of

D = 16
HARMLESS = ("aten.lift_fresh.default", "aten.detach.default")


class Operations(TorchDispatchMode):
    """Notes every operation with the geometry of what it takes and makes."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        tensors = [t for t in args if isinstance(t, Tensor)]
        if any(t.is_meta for t in tensors):
            found = as_on_cpu(func, args, found)
        made = found if isinstance(found, (tuple, list)) else [found]
        if str(func) not in HARMLESS:
            rows = [geometry(t) for t in (*tensors, *made) if isinstance(t, Tensor)]
            self.rows.append(f"{func} {rows}")
        return found


def geometry(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), str(tensor.dtype)


def operations(model: nn.Module, data: Tensor) -> list[str]:
    with AsOn(is_cuda=False), Operations() as seen:
        output = model(data)
        output = output[0] if isinstance(output, tuple) else output
        run_backward(output.float().square().sum())
    return seen.rows


class Function(nn.Module):
    """A function of the input, times a parameter."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.weight)


class Experts(nn.Module):
    """Rows in groups, each times its own matrix; or a product for each group."""

    def __init__(self, *, is_sorted: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, D, D))
        self.register_buffer("ends", torch.tensor([7, 14], dtype=torch.int32))
        self.is_sorted = is_sorted

    def forward(self, x: Tensor) -> Tensor:
        multiply: Any = F.grouped_mm
        found: Tensor = (
            multiply(x.flatten(0, 1), self.weight, offs=self.ends)
            if self.is_sorted
            else multiply(x, self.weight)
        )
        return found


def heads(x: Tensor, n: int = 4) -> Tensor:
    return x.view(*x.shape[:2], n, -1).transpose(1, 2)


def conv(*after: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(D, 8, 3), *after)


SEQUENCE, IMAGE = (2, 7, D), (2, D, 6, 6)
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layer_norm": (lambda: nn.LayerNorm(D), SEQUENCE),
    "rms_norm": (lambda: nn.RMSNorm(D), SEQUENCE),
    "group_norm": (lambda: nn.GroupNorm(4, D), IMAGE),
    "batch_norm": (lambda: nn.BatchNorm2d(D), IMAGE),
    "instance_norm": (lambda: nn.InstanceNorm2d(D, affine=True), IMAGE),
    "encoder_layer": (lambda: nn.TransformerEncoderLayer(D, 4, 32, batch_first=True), SEQUENCE),
    "conv": (conv, IMAGE),
    "conv_transpose": (lambda: nn.ConvTranspose2d(D, 8, 3), IMAGE),
    "max_pool": (lambda: conv(nn.MaxPool2d(2)), IMAGE),
    "avg_pool": (lambda: conv(nn.AdaptiveAvgPool2d(1)), IMAGE),
    "upsample": (lambda: conv(nn.Upsample(scale_factor=2, mode="bilinear")), IMAGE),
    "prelu": (nn.PReLU, SEQUENCE),
    "experts": (lambda: Experts(is_sorted=True), SEQUENCE),
    "matrices": (lambda: Experts(is_sorted=False), SEQUENCE),
    **{
        name: ((lambda function=function: Function(function)), SEQUENCE)
        for name, function in {
            "attention": lambda x: F.scaled_dot_product_attention(heads(x), heads(x), heads(x)),
            "causal": lambda x: F.scaled_dot_product_attention(*[heads(x)] * 3, is_causal=True),
            "imported": lambda x: imported(heads(x), heads(x), heads(x)),
            "grouped": lambda x: F.scaled_dot_product_attention(
                heads(x), heads(x[..., :8], 2), heads(x[..., :8], 2), enable_gqa=True
            ),
            "masked": lambda x: F.scaled_dot_product_attention(
                *[heads(x)] * 3, attn_mask=torch.ones(7, 7, dtype=torch.bool, device=x.device)
            ),
            "dropped": lambda x: F.scaled_dot_product_attention(*[heads(x)] * 3, dropout_p=0.1),
            "softmax": lambda x: F.softmax(x, -1),
            "log_softmax": lambda x: F.log_softmax(x, -1),
            "gelu": F.gelu,
            "silu": F.silu,
            "glu": F.glu,
            "dropout": lambda x: F.dropout(x, 0.1),
            "cumsum": lambda x: x.cumsum(1),
            "topk": lambda x: x.topk(3, -1).values,
            "sort": lambda x: x.sort(-1).values,
            "einsum": lambda x: torch.einsum("bsd,btd->bst", x, x),
            "std": lambda x: x.std(-1),
            "where": lambda x: torch.where(x > 0, x, x * 2),
            "cat": lambda x: torch.cat([x, x], 1),
            "pad": lambda x: F.pad(x, (1, 1)),
            "gather": lambda x: x.gather(1, torch.zeros_like(x, dtype=torch.long)),
            "cross_entropy": lambda x: F.cross_entropy(
                x.flatten(0, 1), torch.zeros(14, dtype=torch.long, device=x.device)
            ),
        }.items()
    },
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_meta_makes_what_a_cpu_makes(name: str, dtype: torch.dtype) -> None:
    make, shape = CASES[name]
    model, data = make().to(dtype), torch.randn(shape).to(dtype)
    twin = twin_of(model).model

    assert operations(twin, batch_twin(data)) == operations(model, data)


def test_attention_is_torchs_own_again_behind_the_block() -> None:
    query = torch.empty(2, 4, 64, 16, device="meta", requires_grad=True)
    with AsOn(is_cuda=False), Operations() as inside:
        F.scaled_dot_product_attention(query, query, query)
    with Operations() as behind:
        F.scaled_dot_product_attention(query, query, query)

    assert any("flash_attention" in row for row in inside.rows)
    assert any("aten.bmm" in row for row in behind.rows)


@pytest.mark.parametrize(
    ("dtype", "mask", "saved"),
    [
        (torch.bfloat16, False, "_scaled_dot_product_flash_attention.default"),
        (torch.float32, False, "_scaled_dot_product_efficient_attention.default"),
        (torch.bfloat16, True, "_scaled_dot_product_efficient_attention.default"),
    ],
)
def test_on_cuda_attention_is_one_kernel(dtype: torch.dtype, mask: bool, saved: str) -> None:
    query = torch.empty(2, 4, 64, 20, dtype=dtype, device="meta", requires_grad=True)
    bias = torch.empty(64, 64, dtype=dtype, device="meta") if mask else None
    with AsOn(is_cuda=True), Operations() as seen:
        output = F.scaled_dot_product_attention(query, query, query, attn_mask=bias)
        run_backward(output.sum())

    assert output.shape == query.shape
    assert any(saved in row for row in seen.rows)
    assert not any("aten.bmm" in row for row in seen.rows)


def test_autocast_may_be_switched_off_for_tensors_without_bytes_and_not_on() -> None:
    own = torch.autocast.__init__
    with AsOn(is_cuda=True):
        with torch.autocast("meta", enabled=False):
            assert not torch.is_autocast_enabled("cpu")
        with pytest.raises(RuntimeError):
            torch.autocast("meta")
        with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
            assert not torch.is_autocast_enabled("cpu")

    assert torch.autocast.__init__ is own
    with pytest.raises(RuntimeError):
        torch.autocast("meta", enabled=False)
