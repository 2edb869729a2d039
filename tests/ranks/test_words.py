"""A loss over a head whose words ranks divide: no rank has all logits, all have the same loss."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import hetero
from hetero.errors import ConfigError
from hetero.internals import DispatchMode, tree_iter
from hetero.parallel.tensor import parallelize
from hetero.testing.ranks import run_ranks
from tests.ranks.models import OPTIMIZERS
from tests.ranks.tensor_models import difference, found_in, tiny_llama, whole

WIDTH, TOKENS = 8, 24


class Largest(DispatchMode):
    """Notes the most elements that a result of an operation has, of those with all words."""

    def __init__(self, n_words: int) -> None:
        super().__init__()
        self.n_words = n_words
        self.numel = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        found = func(*args, **(kwargs or {}))
        for each in tree_iter(found):
            logits = isinstance(each, torch.Tensor) and each.is_floating_point() and each.dim() > 1
            if logits and each.shape[-1] == self.n_words:
                self.numel = max(self.numel, each.numel())
        return found


def inputs(n_words: int) -> tuple[torch.Tensor, ...]:
    source = torch.Generator().manual_seed(7)
    hidden, weight = (torch.randn(n, WIDTH, generator=source) for n in (TOKENS, n_words))
    bias = torch.randn(n_words, generator=source)
    labels = torch.randint(0, n_words, (TOKENS,), generator=source)
    labels[3] = -100
    return hidden, weight, bias, labels


def one_loss(rank: int, n_words: int, options: dict[str, Any]) -> dict[str, Any]:
    """Return how far loss and gradients are from the whole head's, and what else is to hold."""
    hidden, weight, bias, labels = inputs(n_words)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    cut = [distribute_tensor(each, mesh, [Shard(0)]) for each in (weight, bias)]
    found: list[list[torch.Tensor]] = []
    largest: list[int] = []
    most = Largest(n_words)
    for parts in ((weight, bias), cut, cut):
        leaves = [each.detach().clone().requires_grad_() for each in (hidden, *parts)]
        with most:
            most.numel = 0
            loss = hetero.linear_cross_entropy(
                *(leaves[0], leaves[1], labels, leaves[2]), chunk_tokens=TOKENS, **options
            )
            loss.sum().backward()
        largest.append(most.numel)
        found.append([loss.detach(), *(whole(each.grad) for each in leaves)])
    off = max(float((a - b).abs().max()) for a, b in zip(*found[:2], strict=True))
    same = all(map(torch.equal, found[1], found[2]))
    return {"off": off, "same": same, "most": largest, "bits": found[1]}


@pytest.mark.campaign(seconds=0.6)
@pytest.mark.parametrize("n_ranks, n_words", [(2, 64), (2, 63), (3, 64)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("more", [{}, {"label_smoothing": 0.1, "z_loss": 0.01}], ids=["", "more"])
def test_a_loss_over_divided_words_is_that_of_all_words(
    n_ranks: int, n_words: int, reduction: str, more: dict[str, float]
) -> None:
    """Sums of exponentials are of parts: another order, so some ulps of numbers up to 300."""
    found = run_ranks(n_ranks, one_loss, n_words, {"reduction": reduction, **more})
    for each in found:
        assert each["off"] < 1e-4
        assert each["same"]
        assert each["most"] == [TOKENS * n_words, 0, 0]  # no rank has all logits
        assert all(map(torch.equal, each["bits"], found[0]["bits"]))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64, bias=False)


def by_torchs_loss(model: Head, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    with loss_parallel():
        return F.cross_entropy(model.head(model.norm(model.layers(x))), labels)


def by_ours(model: Head, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return hetero.linear_cross_entropy(model.norm(model.layers(x)), model.head.weight, labels)


Loss = Callable[[Head, torch.Tensor, torch.Tensor], torch.Tensor]


def beside_torchs(rank: int) -> float:
    found: list[list[torch.Tensor]] = []
    losses: tuple[Loss, Loss] = (by_torchs_loss, by_ours)
    for loss_of in losses:
        model = Head()
        mesh = init_device_mesh("cpu", (2,))
        layouts = {"output_layouts": Shard(-1), "use_local_output": False}
        head = ColwiseParallel(input_layouts=Shard(0), **layouts)
        parallelize_module(model, mesh, {"norm": SequenceParallel(sequence_dim=0), "head": head})
        x, _, _, labels = inputs(64)
        loss = loss_of(model, x.chunk(2)[rank], labels)
        with loss_parallel():
            loss.backward()
        grads = [whole(param.grad) for param in model.parameters() if param.grad is not None]
        found.append([whole(loss.detach()), *grads])
    assert len(found[0]) == len(found[1]) == 12
    return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))


def test_it_is_torchs_loss_parallel_after_a_sequence_parallel_norm() -> None:
    """Within some ulps: torch's takes the logarithm of each probability."""
    for off in run_ranks(2, beside_torchs):
        assert off < 1e-6


def divided_llama(folder: str) -> Any:
    """Return a Llama whose tensors ranks divide: by our recipe, or by its own plan."""
    if not folder:
        model = tiny_llama()
        parallelize(model, init_device_mesh("cpu", (2,)))
        return model.train()
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    plan = DistributedConfig(tp_size=2)
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=plan).train()


def llama(rank: int, folder: str) -> tuple[list[str], float, int, int]:
    """Compare a fused loss, paged, with a plain loop of the same parts and the same loss."""
    words = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(1))
    after = F.pad(words, (0, 1), value=-100)[..., 1:]
    found = []
    off, evictions = 0.0, 0
    for paged in (False, True):
        model: Any = divided_llama(folder)
        most = Largest(model.config.vocab_size)
        assert isinstance(model.lm_head.weight, DTensor)
        off = float(model(input_ids=words, labels=words).loss.detach())
        optimizer: Any = OPTIMIZERS["adamw"](model.parameters())
        if paged:
            settings = {"device": "cpu", "hbm": 120_000, "chunk_bytes": 1024}
            model, optimizer = hetero.prepare(model, optimizer, **settings, fused_loss=True)
        for step in range(5):
            with most if paged and step == 4 else nullcontext():
                if paged:
                    loss = model(input_ids=words, labels=words).loss
                else:
                    hidden = model.model(input_ids=words).last_hidden_state
                    loss = hetero.linear_cross_entropy(hidden, model.lm_head.weight, after)
            off = abs(off - float(loss.detach())) if step == 0 else off
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(found_in(model, optimizer))
        evictions = hetero.status(model).evictions if paged else 0
    return difference(found[1], found[0]), off, evictions, most.numel


@pytest.mark.slow  # transformers is imported
@pytest.mark.parametrize("plan", ["ours", "the model's"])
def test_a_llama_with_a_divided_head_is_trained_without_its_logits(
    plan: str, tmp_path: Path
) -> None:
    folder = "" if plan == "ours" else str(tmp_path)
    if folder:
        tiny_llama(vocab_size=96).save_pretrained(folder)  # no other width is 96
    for odd, off, evictions, most in run_ranks(2, llama, folder):
        assert not odd
        assert off < 1e-6  # of the loss that torch computes from whole logits
        assert evictions >= 3
        assert not most


def refused(rank: int) -> None:
    hidden, weight, _, labels = inputs(64)
    mesh = init_device_mesh("cpu", (2,))
    rows = distribute_tensor(weight, mesh, [Shard(1)])
    with pytest.raises(ConfigError, match="the head is placed as"):
        hetero.linear_cross_entropy(hidden, rows, labels)
    cut = distribute_tensor(weight, mesh, [Shard(0)])
    labels[5] = 64
    assert hetero.linear_cross_entropy(hidden, cut, labels).isnan()  # no rank has this word


def test_heads_that_are_not_divided_by_words_are_refused() -> None:
    run_ranks(2, refused)
