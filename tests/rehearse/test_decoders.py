"""Published models in plain torch: they are those of transformers, parameter by parameter and
operation by operation, so a plan is the same without it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from hetero.errors import ConfigError
from hetero.functional.head import causal_loss, head_of, late
from hetero.internals import DispatchMode, run_backward
from hetero.plan.presets import PRESETS
from hetero.plan.shape import StageShare, shape_of
from hetero.rehearse.decoders import decoder
from hetero.rehearse.kernels import AsOn
from hetero.rehearse.models import from_config, from_shape, from_transformers
from hetero.rehearse.plan import plan

# MoE's experts and Megatron's sizes are Mixtral's and GPT-2's once more
KINDS = [
    *("llama-3-8b", "mistral-7b", "mixtral-8x7b", "qwen2.5-7b", "gemma-2b", "gpt2", "phi-3-mini"),
    *("bloom-176b", "smollm2-135m", "bert-base-uncased"),
]


def shallow(name: str, layers: int = 2) -> Mapping[str, Any]:
    """Return a published configuration of fewer layers."""
    depth = "n_layer" if "n_layer" in PRESETS[name] else "num_hidden_layers"
    return {**PRESETS[name], depth: layers}


class Operations(DispatchMode):
    """Lists the operations of a model without bytes, and the geometry of what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return True if args[0].dtype is torch.bool else 1
        found = func(*args, **(kwargs or {}))
        made = [t for t in (found if isinstance(found, tuple) else (found,)) if is_number(t)]
        if made and not func.is_view:
            shapes = ", ".join(f"{tuple(t.shape)} {t.stride()} {t.dtype}" for t in made)
            self.rows.append(f"{func} {shapes}")
        return found


def is_number(value: Any) -> bool:
    """Whether a result is a tensor that takes memory: masks and places are told from positions."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 0


def operations(model: Any, *, is_cuda: bool) -> list[str]:
    tokens = torch.zeros(2, 16, dtype=torch.long, device="meta")
    with AsOn(is_cuda=is_cuda), Operations() as seen:
        run_backward(model.to(torch.bfloat16)(input_ids=tokens, labels=tokens)["loss"])
    return seen.rows


@pytest.mark.parametrize("name", KINDS)
def test_a_plain_model_has_the_parameters_of_transformers_under_their_names(name: str) -> None:
    pytest.importorskip("transformers")
    plain, theirs = from_shape(shallow(name)), from_transformers(shallow(name))
    assert plain is not None

    ours = [(path, tuple(param.shape)) for path, param in plain.named_parameters()]
    assert ours == [(path, tuple(param.shape)) for path, param in theirs.named_parameters()]
    tied = [path for path, _ in plain.named_parameters(remove_duplicate=False)]
    assert tied == [path for path, _ in theirs.named_parameters(remove_duplicate=False)]


@pytest.mark.campaign(seconds=1)
@pytest.mark.parametrize("name", KINDS)
def test_a_plain_model_makes_the_operations_of_transformers_in_their_order(name: str) -> None:
    pytest.importorskip("transformers")
    plain, theirs = from_shape(shallow(name)), from_transformers(shallow(name))

    assert operations(plain, is_cuda=True) == operations(theirs, is_cuda=True)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_the_closed_form_counts_the_parameters_that_are_built(name: str) -> None:
    shape = shape_of(shallow(name))
    if shape is None:  # BERT decodes nothing
        return

    assert shape.numel == sum(p.numel() for p in from_config(shallow(name)).parameters())


def test_what_a_stage_receives_is_new_and_gets_a_gradient_to_send_back() -> None:
    shape = shape_of(shallow("llama-3-8b"))
    assert shape is not None
    last = decoder(shape, StageShare(1, 2, opens=False, closes=True))
    tokens = torch.zeros(2, 16, dtype=torch.long, device="meta")

    first, second = last.received(tokens), last.received(tokens)
    assert first.shape == (2, 16, shape.width) and first is not second
    assert first.is_leaf and first.requires_grad
    assert decoder(shape).received(tokens) is tokens


def test_a_published_model_is_planned_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # an import of it fails

    config = shallow("smollm2-135m")
    plain, fused = (
        plan(config, (1, 8), profile="rtx4090", precision="bf16", fused_loss=fused, estimates=False)
        for fused in (False, True)
    )

    assert plain.fits and fused.fits
    assert plain.n_params == sum(p.numel() for p in from_config(config).parameters())


@pytest.mark.campaign(seconds=1)
@pytest.mark.parametrize("name", KINDS[:-1])
def test_a_fused_loss_makes_the_operations_that_it_makes_in_transformers(name: str) -> None:
    pytest.importorskip("transformers")
    made = []
    for model in (from_shape(shallow(name)), from_transformers(shallow(name))):
        assert model is not None
        head, loss = head_of(model), model.loss_function
        head.forward = late(head, head.forward)
        model._loss_function = causal_loss(head, loss)
        made.append(operations(model, is_cuda=True))

    assert made[0] == made[1]


def test_a_plan_of_a_model_without_a_head_says_so() -> None:
    with pytest.raises(ConfigError, match=r"fused_loss: .* no head of words"):
        plan(PRESETS["bert-base-uncased"], (1, 8), profile="rtx4090", fused_loss=True)


def test_a_configuration_that_says_more_than_a_shape_is_left_to_transformers() -> None:
    assert from_shape({**shallow("llama-3-8b"), "attention_bias": True}) is None
    assert from_shape({**shallow("llama-3-8b"), "num_attention_heads": 0}) is None
