"""`generate`, pipelines and eval loops under a budget: the same outputs, and each byte once."""

from __future__ import annotations

import copy
import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from benchmarks.engine import UNIT_BYTES, virtual
from benchmarks.inference import decoded
from hetero.api import engine_of
from hetero.errors import BudgetError

transformers = pytest.importorskip("transformers")
CHUNK = 1024
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}


def llama(layers: int = 12) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **SIZES,
        num_hidden_layers=layers,
        num_key_value_heads=2,
        vocab_size=96,
        pad_token_id=0,
        eos_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).eval()


def t5() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4, vocab_size=96, eos_token_id=None
    )
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config).eval()


def size(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


def prepared(model: nn.Module, share: float, **settings: Any) -> nn.Module:
    given = {"device": "cpu:sim", "hbm": int(share * size(model)), "chunk_bytes": CHUNK}
    return hetero.prepare(copy.deepcopy(model), **{**given, **settings})


def tokens(rows: int = 2, length: int = 5) -> torch.Tensor:
    return torch.randint(1, 96, (rows, length), generator=torch.Generator().manual_seed(1))


def generated(model: nn.Module, rows: int = 2, **how: Any) -> torch.Tensor:
    ids = tokens(rows)
    torch.manual_seed(4)
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    return model.generate(ids, **{**given, **how})


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 1.3},
    "beams": {"num_beams": 3},
    "static cache": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
}


@pytest.mark.campaign(seconds=3)
@pytest.mark.parametrize("make", [llama, t5])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_generated_is_what_the_plain_model_generates(way: str, make: Any) -> None:
    plain = make()
    model = prepared(plain, 1.0)
    assert hetero.status(model).mode == "paged"

    for _ in range(2):
        assert torch.equal(generated(model, **WAYS[way]), generated(plain, **WAYS[way]))

    status = hetero.status(model)
    assert status.tiers["HBM"]["peak"] <= status.tiers["HBM"]["budget"]
    assert status.fetches or status.hits


def test_a_pipeline_takes_a_prepared_model() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: i for i, word in enumerate(["<pad>", *(f"w{i}" for i in range(95))])}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>")
    plain = llama(4)
    how = {"max_new_tokens": 6, "do_sample": False}

    def said(model: nn.Module) -> Any:
        pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
        return pipe(["w3 w7 w9", "w4"], **how)

    assert said(prepared(plain, 0.9)) == said(plain)


# -- bytes of a token ------------------------------------------------------------------------------


class Steps:
    """Forwards of a model, each with what it moved and the frames it had; ends a generation."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.seen: list[tuple[Any, int]] = []
        engine = engine_of(model)
        ended = engine.residence.runtime.events.forward_ended

        def note() -> None:
            frames = engine.residence.manager.arena.limit
            ended()
            self.seen.append((hetero.status(model), frames * engine.setup.blueprint.granule_bytes))

        engine.residence.runtime.events = replace(
            engine.residence.runtime.events, forward_ended=note
        )


@pytest.mark.campaign(seconds=4)
@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_a_token_moves_what_does_not_stand_and_no_more(share: float) -> None:
    plain = llama(24)
    model = prepared(plain, share)
    sizes = sorted(b.n_bytes for b in engine_of(model).setup.blueprint.layout.buckets)
    steps = Steps(model)

    found = generated(model, max_new_tokens=24)

    assert torch.equal(found, generated(plain, max_new_tokens=24))
    assert len(steps.seen) == 24
    # the prefill is demand paging, the first token of the plan fills its frames
    assert sum(status.misses for status, _ in steps.seen[2:]) == 0
    # a forward after frames were given up may bring back what had to move
    quiet = [
        (status, frames)
        for (_, before), (_, then), (status, frames) in zip(
            steps.seen[1:], steps.seen[2:], steps.seen[3:], strict=False
        )
        if before == then == frames
    ]
    assert len(quiet) > 12
    for status, frames in quiet:
        # beside what stands: two units stream, one computes and one is on its way; less than one
        # unit's frames are left over, and a small unit may stream to make the fetches even
        assert status.h2d_bytes <= size(plain) - frames + 3 * sizes[-1] + sizes[len(sizes) // 8]
        assert status.h2d_bytes < size(plain)


def test_what_a_cache_grows_to_is_charged_and_frames_give_way() -> None:
    plain = llama()
    model = prepared(plain, 0.6)
    steps = Steps(model)

    found = generated(model, max_new_tokens=40)

    assert torch.equal(found, generated(plain, max_new_tokens=40))
    first, last = steps.seen[2], steps.seen[-1]
    cache = 2 * 2 * 12 * 2 * 16 * 4 * 40  # keys and values, rows, layers, heads of 16, fp32, tokens
    assert last[0].activation_bytes > first[0].activation_bytes
    assert last[0].activation_bytes >= cache
    assert last[1] < first[1]
    peak = last[0].tiers["HBM"]["peak"]
    assert peak <= last[0].tiers["HBM"]["budget"]


def test_a_cache_that_cannot_be_held_is_a_typed_error_and_the_model_goes_on() -> None:
    plain = llama(6)
    model = prepared(plain, 0.6)

    with pytest.raises(BudgetError, match="inputs, cache and results") as caught:
        generated(model, rows=12, max_new_tokens=60)
    assert caught.value.needed_bytes > hetero.status(model).tiers["HBM"]["budget"]
    assert "raise hbm=" in caught.value.advice
    del caught  # whose traceback holds the cache
    gc.collect()

    assert torch.equal(generated(model), generated(plain))
    enough = prepared(plain, 2.0)
    generated(enough, rows=12, max_new_tokens=60)


def test_a_longer_prompt_than_any_before_begins_with_the_fewest_frames() -> None:
    plain = llama()
    model = prepared(plain, 0.6)
    for length in (3, 30, 9, 50):
        ids = tokens(2, length)
        with torch.no_grad():
            assert torch.equal(model(ids).logits, plain(ids).logits)
    status = hetero.status(model)
    assert status.tiers["HBM"]["peak"] <= status.tiers["HBM"]["budget"]


@pytest.mark.parametrize("device", ["cpu:sim", "cpu"])
def test_an_eval_loop_is_larger_than_the_device(device: str) -> None:
    plain = llama()
    model = prepared(plain, 0.4, device=device)
    misses = []
    with torch.no_grad():
        for number in range(5):
            ids = torch.randint(1, 96, (3, 8), generator=torch.Generator().manual_seed(number))
            assert torch.equal(model(ids, labels=ids).loss, plain(ids, labels=ids).loss)
            misses.append(hetero.status(model).misses)
    assert misses[0] and not sum(misses[1:])


@pytest.mark.parametrize("ratio", [0.5, 3.0])
def test_the_link_or_compute_is_never_idle(ratio: float) -> None:
    seen = decoded(24, ratio, virtual())

    assert seen.misses == 0
    assert seen.seconds == max(24.0, ratio * seen.n_bytes / UNIT_BYTES)
    assert seen.n_bytes <= seen.least_bytes + 4 * UNIT_BYTES


def test_views_of_weights_that_are_kept_stay_right_while_frames_are_given_up() -> None:
    plain = llama(8)
    model = prepared(plain, 0.9)
    kept = model.model.layers[3].mlp.up_proj.weight.detach()

    assert torch.equal(generated(model, max_new_tokens=30), generated(plain, max_new_tokens=30))
    assert torch.equal(kept, plain.model.layers[3].mlp.up_proj.weight)


def test_gradients_through_a_model_for_inference_take_frames_too() -> None:
    plain = llama(8)
    model = prepared(plain, 0.8)
    ids = tokens()
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, plain(ids).logits)
    for _ in range(3):
        assert torch.equal(generated(model), generated(plain))
        assert torch.equal(model(ids).logits, plain(ids).logits)
        loss = model(ids, labels=ids).loss
        loss.backward()
        plain(ids, labels=ids).loss.backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)
            one.grad = other.grad = None
    hetero.release(model)
    assert torch.equal(generated(model), generated(plain))


# -- a large batch, slice by slice -----------------------------------------------------------------


def by_slices(model: nn.Module, ids: torch.Tensor, size: int) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(part).logits for part in ids.split(size)])


@pytest.mark.campaign(seconds=4)
@pytest.mark.parametrize("use_cache", [True, False])
def test_a_batch_that_does_not_fit_runs_unit_by_unit_in_slices(use_cache: bool) -> None:
    plain = llama()
    hbm = int(0.6 * size(plain))
    ids = tokens(48, 12)
    with pytest.raises(BudgetError), torch.no_grad():
        prepared(plain, 0.6)(ids, use_cache=False)

    model = prepared(plain, 0.6, micro_batch=2)
    given = ids[:8] if use_cache else ids
    for _ in range(5):  # the first checks every unit, so that its trace is its own
        with torch.no_grad():
            found = model(given, use_cache=use_cache)
        assert torch.equal(found.logits, by_slices(plain, given, 2))
    status = hetero.status(model)
    assert status.tiers["HBM"]["peak"] <= hbm
    assert 0 < status.h2d_bytes <= size(plain)  # each weight once, however many slices there are


@pytest.mark.parametrize("way", ["greedy", "beams", "sampling", "static cache"])
def test_a_cache_is_extended_slice_by_slice(way: str) -> None:
    plain = llama(4)
    model = prepared(plain, 3.0, micro_batch=2)

    assert torch.equal(generated(model, rows=5, **WAYS[way]), generated(plain, rows=5, **WAYS[way]))


def test_rows_of_a_cache_come_together_again() -> None:
    plain = llama(3)
    model = prepared(plain, 3.0, micro_batch=3)
    cache, expected = transformers.DynamicCache(), transformers.DynamicCache()
    with torch.no_grad():
        for ids in (tokens(7, 5), tokens(7, 1)):
            model(ids, past_key_values=cache)
            plain(ids, past_key_values=expected)
    assert len(cache.layers) == len(expected.layers)
    for one, other in zip(cache.layers, expected.layers, strict=True):
        assert one.keys.shape == other.keys.shape == (7, 2, 6, 16)
        assert torch.allclose(one.keys, other.keys, atol=1e-6)
        assert torch.allclose(one.values, other.values, atol=1e-6)


def test_a_unit_in_which_samples_meet_is_refused() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x - x.mean(0))

    model = nn.Sequential(*(Mixing() for _ in range(4)))
    hetero.prepare(model, device="cpu:sim", hbm=4096, chunk_bytes=64, micro_batch=1)
    with pytest.raises(hetero.StateError, match="mixes samples"), torch.no_grad():
        model(torch.randn(3, 8))
