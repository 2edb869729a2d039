"""A causal model of transformers computes its loss without its logits, and nothing else changes.

The model here has what `PreTrainedModel` has: `get_output_embeddings`, a `loss_function` that an
attribute overrides, and the loss that causal models share, under its name.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hetero
from hetero.api import engine_of
from hetero.errors import ConfigError
from hetero.functional.head import LateLogits
from tests.equivalence.harness import adamw

D, VOCAB, LENGTH = 16, 41, 9


def ForCausalLMLoss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    kind = "mean" if num_items_in_batch is None else "sum"
    logits = logits.float().view(-1, vocab_size)
    loss = F.cross_entropy(
        logits, shift_labels.flatten(), ignore_index=ignore_index, reduction=kind
    )
    return loss if num_items_in_batch is None else loss / num_items_in_batch


class Causal(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(4))
        self.lm_head = nn.Linear(D, VOCAB, bias=False)
        self.scale = 1.0
        if tied:
            self.lm_head.weight = self.embed.weight

    @property
    def loss_function(self) -> Any:
        return getattr(self, "_loss_function", ForCausalLMLoss)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> dict[str, Any]:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        logits = self.lm_head(x)
        if self.scale != 1.0:
            logits = logits * self.scale
        found = {"logits": logits}
        if labels is not None:
            found["loss"] = self.loss_function(
                logits=logits, labels=labels, vocab_size=VOCAB, **kwargs
            )
        return found


def make(*, tied: bool = False) -> Causal:
    torch.manual_seed(0)
    return Causal(tied=tied)


def data(step: int) -> Tensor:
    return torch.randint(0, VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(step))


def prepared(model: nn.Module, **settings: Any) -> tuple[Any, Any]:
    given = {"device": "cpu", "hbm": "256KiB", "chunk_bytes": 512, **settings}
    return hetero.prepare(model, adamw(model), fused_loss=True, **given)


@pytest.mark.campaign(seconds=0.5)
@pytest.mark.parametrize("device", ["cpu", "cpu:sim"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("hbm", ["50KiB", None])
@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": torch.tensor(17)}])
def test_a_causal_model_trains_as_with_its_own_loss(
    tied: bool, hbm: str | None, options: dict[str, Any], device: str
) -> None:
    plain = make(tied=tied)
    reference = adamw(plain)
    model, optimizer = prepared(copy.deepcopy(plain), hbm=hbm, device=device)

    for step in range(4):
        ids = data(step)
        theirs = plain(ids, labels=ids, **options)["loss"]
        output = model(ids, labels=ids, **options)
        assert isinstance(output["logits"], LateLogits)
        assert not output["logits"].computed
        assert output["logits"].shape == (3, LENGTH, VOCAB)
        assert torch.allclose(output["loss"], theirs, rtol=1e-5)
        for loss, rule in ((theirs, reference), (output["loss"], optimizer)):
            loss.backward()
            rule.step()
            rule.zero_grad()
    for name, value in model.state_dict().items():
        assert torch.allclose(value, plain.state_dict()[name], atol=2e-4), name


class Wrapper(nn.Module):
    """Shows the names of the model inside it, as PEFT's models do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.forward(*args, **kwargs)


def test_the_loss_of_a_model_in_a_wrapper_is_fused_too() -> None:
    model, _ = prepared(Wrapper(make()))

    output = model(data(0), labels=data(0))

    assert isinstance(output["logits"], LateLogits)
    assert not output["logits"].computed


def test_logits_that_somebody_looks_at_are_the_heads_own() -> None:
    plain = make()
    model, _ = prepared(copy.deepcopy(plain))
    ids = data(0)

    output = model(ids)
    found = torch.softmax(output["logits"], -1)
    found.sum().backward()
    with torch.no_grad():
        quiet = model(ids)["logits"]

    assert torch.equal(found, torch.softmax(plain(ids)["logits"], -1))
    assert not isinstance(quiet, LateLogits)
    assert output["logits"].computed


def test_a_model_that_changes_its_logits_has_its_own_loss() -> None:
    plain = make()
    plain.scale = 0.5
    model, _ = prepared(copy.deepcopy(plain))
    ids = data(0)

    theirs, ours = plain(ids, labels=ids)["loss"], model(ids, labels=ids)["loss"]
    theirs.backward()
    ours.backward()

    assert torch.equal(ours, theirs)
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_logits_that_stay_late_are_not_counted_as_memory() -> None:
    model, _ = prepared(make())
    model(data(0), labels=data(0))["loss"].backward()

    assert engine_of(model).residence.runtime.saved.footprint.output_bytes < 3 * LENGTH * VOCAB * 4


def test_release_gives_head_and_loss_back() -> None:
    model, optimizer = prepared(make())
    hetero.release(model, optimizer)

    assert not isinstance(model(data(0))["logits"], LateLogits)
    assert model.loss_function is ForCausalLMLoss
    assert "forward" not in model.lm_head.__dict__


def test_a_model_without_such_a_loss_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    other = make()
    other._loss_function = F.cross_entropy
    for refused in (model, other):
        with pytest.raises(ConfigError, match="is no causal model"):
            hetero.prepare(refused, adamw(refused), device="cpu", fused_loss=True)
        refused(torch.zeros(1, 4) if refused is model else data(0))
