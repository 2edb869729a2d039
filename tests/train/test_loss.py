"""The fused head against torch's linear layer and cross entropy."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import hetero
from hetero.errors import ConfigError
from hetero.functional.loss import tokens_at_once
from hetero.train.activations.meter import LiveBytes

Tensors = tuple[torch.Tensor, ...]
BOUND = {torch.float64: 1e-12, torch.float32: 2e-5}


def make(dtype: torch.dtype, tokens: int, width: int, vocabulary: int, *, bias: bool) -> Tensors:
    generator = torch.Generator().manual_seed(tokens * width + vocabulary)
    shapes = ((tokens, width), (vocabulary, width), (vocabulary,))
    drawn = [torch.randn(*s, generator=generator, dtype=dtype) for s in shapes]
    return tuple(t.requires_grad_() for t in drawn[: 3 if bias else 2])


def eager(inputs: Tensors, labels: torch.Tensor, z_loss: float, **options: Any) -> torch.Tensor:
    """Torch's own, with the z-loss added by its definition."""
    logits = F.linear(*inputs)
    loss = F.cross_entropy(logits, labels, **options)
    counts = labels != options.get("ignore_index", -100)
    z = (logits.logsumexp(-1).square() * z_loss).where(counts, 0)
    kind = options.get("reduction", "mean")
    return loss + (z if kind == "none" else z.sum() / (counts.sum() if kind == "mean" else 1))


def fused(inputs: Tensors, labels: torch.Tensor, **options: Any) -> torch.Tensor:
    hidden, weight, *bias = inputs
    return hetero.linear_cross_entropy(hidden, weight, labels, *bias, **options)


def near(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    scale = max(1.0, float(theirs.detach().abs().nan_to_num().max()))
    return torch.allclose(ours, theirs, rtol=0, atol=BOUND[theirs.dtype] * scale, equal_nan=True)


OPTIONS = [
    {"reduction": reduction, "label_smoothing": smoothing, "z_loss": z, "ignore_index": ignored}
    for reduction, smoothing, z, ignored in itertools.product(
        ("mean", "sum", "none"), (0.0, 0.1, 1.0), (0.0, 1e-2), (-100, 3)
    )
]


@pytest.mark.campaign(seconds=1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o.values())))
def test_loss_and_gradients_are_those_of_an_eager_head(
    dtype: torch.dtype, bias: bool, options: dict[str, Any]
) -> None:
    for tokens, width, vocabulary, chunk in ((1, 1, 5, 1), (37, 7, 11, 5), (64, 16, 33, None)):
        inputs = make(dtype, tokens, width, vocabulary, bias=bias)
        labels = torch.arange(tokens) % vocabulary
        labels[::3] = options["ignore_index"]
        theirs = eager(inputs, labels, **options)
        weights = torch.linspace(0.5, 2.0, theirs.numel(), dtype=dtype).view(theirs.shape)
        expected = torch.autograd.grad((theirs * weights).sum(), inputs)

        ours = fused(inputs, labels, chunk_tokens=chunk, **options)
        found = torch.autograd.grad((ours * weights).sum(), inputs)

        assert near(ours, theirs)
        assert all(map(near, found, expected))


@pytest.mark.parametrize(
    ("vocabulary", "width", "tokens"),
    [(128_256, 4096, 2048), (128_256, 2048, 1024), (32_000, 512, 524), (11, 8, 1_525_201)],
)
def test_how_many_tokens_a_chunk_has_is_a_matter_of_the_head_alone(
    vocabulary: int, width: int, tokens: int
) -> None:
    """A wide head reads its weight for half as many tokens as it is wide, not for 130."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        weight = torch.empty(vocabulary, width, dtype=dtype, device="meta")
        assert tokens_at_once(weight) == tokens


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_logits_of_a_chunk_are_gone_before_the_products_that_read_their_gradient(
    reduction: str,
) -> None:
    vocabulary, width, tokens = 512, 64, 16
    hidden = torch.randn(4 * tokens, width).bfloat16().requires_grad_()
    weight = torch.randn(vocabulary, width).bfloat16().requires_grad_()
    labels = torch.arange(4 * tokens)

    with LiveBytes([hidden, weight, labels]) as live:
        loss = fused((hidden, weight), labels, chunk_tokens=tokens, reduction=reduction)
        if reduction == "none":  # else the gradient is there by now
            loss.sum().backward()

    gradients = 4 * weight.numel() + 2 * hidden.numel()
    product, narrow, small = 2 * weight.numel(), 2 * vocabulary * tokens, 8_000
    assert live.peak <= gradients + product + narrow + small


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_labels_ignored(reduction: str) -> None:
    inputs = make(torch.float64, 6, 4, 9, bias=True)
    labels = torch.full((6,), -100)
    theirs = F.cross_entropy(F.linear(*inputs), labels, reduction=reduction)
    expected = torch.autograd.grad(theirs.sum(), inputs)

    ours = fused(inputs, labels, reduction=reduction)
    found = torch.autograd.grad(ours.sum(), inputs)

    assert near(ours, theirs)
    assert all(map(torch.equal, found, expected))


def test_no_tokens_at_all() -> None:
    hidden, weight = torch.randn(0, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    labels = torch.empty(0, dtype=torch.int64)

    loss = hetero.linear_cross_entropy(hidden, weight, labels, reduction="sum")
    loss.backward()

    assert loss == 0
    assert weight.grad is not None
    assert not weight.grad.any()


def test_without_bytes_a_loss_has_its_shape() -> None:
    hidden, weight = torch.empty(2, 5, 8, device="meta"), torch.empty(11, 8, device="meta")
    labels = torch.empty(2, 5, dtype=torch.int64, device="meta")
    for reduction, shape in (("mean", ()), ("none", (2, 5))):
        loss = hetero.linear_cross_entropy(hidden, weight, labels, reduction=reduction)
        assert loss.is_meta and loss.shape == shape


def test_shapes_of_a_batch_and_a_second_backward() -> None:
    inputs = make(torch.float64, 12, 4, 9, bias=False)
    labels = torch.arange(12) % 9
    hidden = inputs[0].view(3, 4, 4)

    loss = hetero.linear_cross_entropy(hidden, inputs[1], labels.view(3, 4), reduction="none")
    mean = hetero.linear_cross_entropy(hidden, inputs[1], labels.view(3, 4))
    first = torch.autograd.grad(mean, inputs[1], retain_graph=True)[0]
    second = torch.autograd.grad(mean * 2, inputs[1])[0]

    assert loss.shape == (3, 4)
    assert torch.equal(second, 2 * first)


def test_a_part_that_needs_no_gradient_gets_none() -> None:
    hidden, weight = make(torch.float32, 8, 4, 9, bias=False)
    labels = torch.arange(8)

    (grad,) = torch.autograd.grad(fused((hidden, weight.detach()), labels), hidden)
    frozen = fused((hidden.detach(), weight.detach()), labels)

    assert grad.abs().sum() > 0
    assert not frozen.requires_grad


def test_half_precision_sums_in_fp32_and_autocast_casts() -> None:
    hidden, weight = make(torch.float32, 16, 8, 19, bias=False)
    labels = torch.arange(16)
    low = [t.detach().bfloat16().requires_grad_() for t in (hidden, weight)]
    theirs = F.cross_entropy(F.linear(*low).float(), labels)

    ours = fused(tuple(low), labels, chunk_tokens=4)
    with torch.autocast("cpu", torch.bfloat16):
        cast = fused((hidden, weight), labels, chunk_tokens=4)
    cast.backward()

    assert ours.dtype == torch.float32
    assert abs(float(ours) - float(theirs)) < 0.02
    assert abs(float(cast) - float(ours)) < 0.02
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("do not fit", {"labels": torch.zeros(5, dtype=torch.int64)}),
        ("int64", {"labels": torch.zeros(4)}),
        ("label is no word of the head's 7", {"labels": torch.tensor([0, 7, 1, 2])}),
        ("label is no word of the head's 7", {"labels": torch.tensor([0, -5, 1, 2])}),
        ("reduction", {"reduction": "median"}),
        ("label_smoothing", {"label_smoothing": 1.5}),
        ("bias", {"bias": torch.zeros(3)}),
    ],
)
def test_what_does_not_fit_is_refused(what: str, options: dict[str, Any]) -> None:
    given: dict[str, Any] = {"labels": torch.zeros(4, dtype=torch.int64), **options}

    with pytest.raises(ConfigError, match=what):
        hetero.linear_cross_entropy(torch.randn(4, 3), torch.randn(7, 3), **given)
