"""PEFT LoRA over a frozen base in code: bit for bit what torch trains over rounded weights."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

import hetero  # noqa: E402
from hetero.api import engine_of, prepare_tuned  # noqa: E402
from hetero.config import Config  # noqa: E402
from hetero.memory.codec import CODECS  # noqa: E402
from hetero.train.engine.tuning import Tuning  # noqa: E402
from tests.equivalence.harness import Seen, adamw, note, same, sgd, states  # noqa: E402

STEPS = 5
VOCAB = 67
SIM = {"device": "cpu:sim", "hbm": 135_000, "chunk_bytes": 2048}
PLACES: dict[str, dict[str, Any]] = {
    "sim": SIM,
    "sim, small chunks": {**SIM, "chunk_bytes": 512, "hbm": 130_000},
    "cpu": {**SIM, "device": "cpu", "hbm": 130_000},
    "cpu, without a budget": {"device": "cpu"},
}


def base(width: int = 36) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 3 // 2,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCAB,
        max_position_embeddings=16,
    )
    return transformers.LlamaForCausalLM(config)


def adapted(model: nn.Module) -> Any:
    torch.manual_seed(1)
    lora = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = peft.get_peft_model(model, lora)
    for name, param in model.named_parameters():
        if "lora_B" in name:  # zeros otherwise, and no gradient would reach the base's input
            nn.init.normal_(param, std=0.05)
    return model


def rounded(model: Any, codec: str) -> Any:
    """Replace frozen matrices by what their codes stand for, in plain torch."""
    for param in model.parameters():
        if not param.requires_grad and param.dim() >= 2:
            flat = param.detach().reshape(-1)
            found = torch.empty_like(flat)
            CODECS[codec].decode(CODECS[codec].encode(flat, flat.dtype), found)
            param.data = found.view(param.shape)
    return model


def tokens(step: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (1, 7), generator=torch.Generator().manual_seed(step))


def train_both(
    codec: str,
    make: Any,
    settings: dict[str, Any],
    *,
    tuning: Tuning | None = None,
    steps: int = STEPS,
    width: int = 36,
) -> tuple[Any, Any, Any, Seen]:
    """Train plain and prepared side by side; every difference is an AssertionError."""
    plain = rounded(adapted(base(width)), codec)
    optimizer = make(plain)
    model = adapted(base(width))
    config = Config.load(frozen=codec, activations="keep", **settings)
    model, ours = prepare_tuned(model, make(model), config, tuning)
    seen = Seen()
    for step in range(steps):
        batch = tokens(step)
        losses = [m(input_ids=batch, labels=batch).loss for m in (plain, model)]
        same([losses[0].detach()], [losses[1].detach()], f"loss of step {step}")
        for loss in losses:
            loss.backward()
        found = [[p.grad for p in m.parameters() if p.requires_grad] for m in (plain, model)]
        same(found[0], [g.clone() for g in found[1]], f"gradients of step {step}")
        for each in (optimizer, ours):
            each.step()
            each.zero_grad()
        note(seen, engine_of(model))
    same(*(values(m) for m in (plain, model)), "weights")
    same(states(plain, optimizer), states(model, ours), "states")
    return plain, model, ours, seen


def values(model: Any) -> list[torch.Tensor]:
    return [value.clone() for value in model.state_dict().values()]


@pytest.mark.campaign(seconds=2.2)
@pytest.mark.parametrize("codec", ["int8", "nf4"])
@pytest.mark.parametrize("make", [sgd, adamw])
def test_lora_over_codes_is_lora_over_rounded_weights(codec: str, make: Any) -> None:
    plain, model, ours, seen = train_both(codec, make, SIM)

    assert seen.chunks >= 5 and seen.evictions >= 3 and seen.mode == "paged"
    model, _ = hetero.release(model, ours)
    same(values(plain), values(model), "released weights")


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize("place", list(PLACES))
def test_every_place_gives_the_same_bits(place: str) -> None:
    _, _, _, seen = train_both("nf4", adamw, PLACES[place])

    assert seen.mode == "paged"  # homes in code are never what computes
    assert seen.evictions >= 3 or "budget" in place


@pytest.mark.parametrize(
    "codec", ["int8", pytest.param("nf4", marks=pytest.mark.campaign(seconds=1))]
)
def test_codes_that_lie_on_disk_give_the_same_bits(codec: str, disk: Path) -> None:
    settings = {**SIM, "hbm": 1_700_000, "host": 420_000, "nvme": disk, "chunk_bytes": 8192}
    tuning = Tuning(extent_numel=4096)
    _, model, _, seen = train_both(codec, adamw, settings, tuning=tuning, steps=3, width=128)

    assert seen.read_bytes > 0 and seen.write_bytes > 0 and seen.evictions >= 3
    homes = [home for home in engine_of(model).setup.store.homes.values() if not home.codec.exact]
    assert sum(not home.stays for home in homes) >= 2


def test_bytes_at_home_and_on_the_link_are_those_of_the_codes() -> None:
    found = {}
    for frozen in ("keep", "int8", "nf4"):
        model = adapted(base())
        model, optimizer = hetero.prepare(model, adamw(model), frozen=frozen, **SIM)
        for step in range(3):
            model(input_ids=tokens(step), labels=tokens(step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        status = hetero.status(model)
        found[frozen] = status.tiers["HOST"]["param"], status.h2d_bytes
        buckets = engine_of(model).setup.blueprint.layout.buckets
        assert status.tiers["HOST"]["param"] == sum(b.home_bytes for b in buckets)
    (kept, moved), (int8, moved8), (nf4, moved4) = found.values()
    assert nf4 < 0.4 * kept and nf4 < int8 < 0.5 * kept
    assert moved4 < moved8 < 0.5 * moved


def test_after_release_an_adapter_merges_as_in_plain_torch() -> None:
    plain, model, ours, _ = train_both("nf4", adamw, SIM, steps=2)
    model, _ = hetero.release(model, ours)
    same(values(plain.merge_and_unload()), values(model.merge_and_unload()), "merged weights")


def test_while_prepared_a_merge_is_rounded_to_codes() -> None:
    """As bitsandbytes does it; the rounding is that of one more `encode`."""
    plain, model, _, _ = train_both("nf4", adamw, SIM, steps=2)
    merged = rounded(plain.merge_and_unload().requires_grad_(False), "nf4")
    ours = model.merge_and_unload()
    theirs = dict(merged.state_dict())
    assert theirs.keys() == ours.state_dict().keys()
    for name, value in ours.state_dict().items():
        same([theirs[name]], [value.clone()], name)


def test_an_adapter_is_saved_and_a_base_exported_while_prepared(tmp_path: Path) -> None:
    plain, model, _, _ = train_both("int8", sgd, SIM, steps=2)
    plain.save_pretrained(tmp_path / "plain")
    model.save_pretrained(tmp_path / "ours")
    name = "adapter_model.safetensors"
    theirs, ours = ((tmp_path / side / name).read_bytes() for side in ("plain", "ours"))
    assert theirs == ours
    hetero.export(model, tmp_path / "whole")
    hetero.export(plain, tmp_path / "expected")
    whole, expected = (
        (tmp_path / side / "model.safetensors").read_bytes() for side in ("whole", "expected")
    )
    assert whole == expected


def test_a_base_in_code_generates_as_the_rounded_one() -> None:
    plain, ours = rounded(base().requires_grad_(False), "nf4"), base().requires_grad_(False)
    ours = hetero.prepare(ours.eval(), frozen="nf4", **SIM)
    plain.eval()
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    one, other = (m.generate(tokens(0), **options) for m in (plain, ours))
    assert torch.equal(one, other)
    assert hetero.status(ours).evictions >= 0
