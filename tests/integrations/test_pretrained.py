"""`hetero.from_pretrained` against transformers' own: the same model, bit by bit."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import hetero
from hetero.errors import BudgetError, CheckpointCorrupt, ConfigError

transformers = pytest.importorskip("transformers")
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "intermediate_size": 64,
    "num_attention_heads": 4,
}


def llama(**settings: Any) -> nn.Module:
    sizes = {**SIZES, "num_key_value_heads": 2, "vocab_size": 64, "pad_token_id": 0}
    config = transformers.LlamaConfig(**{**sizes, **settings})
    return transformers.LlamaForCausalLM(config)


def bert(kind: str = "BertForMaskedLM", **settings: Any) -> nn.Module:
    config = transformers.BertConfig(**SIZES, vocab_size=64, **settings)
    return getattr(transformers, kind)(config)


def gpt2() -> nn.Module:
    ends = {"bos_token_id": 1, "eos_token_id": 1}
    config = transformers.GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=64, **ends)
    return transformers.GPT2LMHeadModel(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=64
    )
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config)


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        **SIZES, num_key_value_heads=2, vocab_size=64, num_local_experts=4
    )
    return transformers.MixtralForCausalLM(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "llama, tied": lambda: llama(tie_word_embeddings=True),
    "llama, bf16": lambda: llama().bfloat16(),
    "bert": bert,
    "gpt2": gpt2,
    "t5": t5,
    "mixtral": mixtral,
}


def saved(make: Callable[[], nn.Module], path: Path, **settings: Any) -> Path:
    torch.manual_seed(0)
    make().save_pretrained(path, **settings)
    return path


def budget(model: nn.Module) -> int:
    """Enough for what these models' widest unit and activations take, and not for all of them."""
    return sum(p.nbytes for p in model.parameters()) * 9 // 8


def ours(path: Path, stock: nn.Module, **settings: Any) -> nn.Module:
    given = {"device": "cpu:sim", "hbm": budget(stock), "chunk_bytes": 1024, **settings}
    return hetero.from_pretrained(path, **given)


def tokens(rows: int = 2) -> torch.Tensor:
    return torch.randint(2, 64, (rows, 6), generator=torch.Generator().manual_seed(1))


def outputs(model: nn.Module) -> torch.Tensor:
    extra = {"decoder_input_ids": tokens()} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model(tokens(), **extra)[0]


def same_state(left: nn.Module, right: nn.Module) -> None:
    a, b = left.state_dict(), right.state_dict()
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert torch.equal(a[name], b[name]), name


@pytest.mark.campaign(seconds=1)
@pytest.mark.parametrize("shards", ["1GB", "20KB"])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_what_transformers_loads(name: str, shards: str, tmp_path: Path) -> None:
    path = saved(MODELS[name], tmp_path, max_shard_size=shards)
    stock = type(MODELS[name]()).from_pretrained(path)

    model = ours(path, stock)

    assert type(model) is type(stock) and hetero.status(model).mode == "paged"
    assert not model.training
    assert model.dtype == stock.dtype
    assert torch.equal(outputs(model), outputs(stock))
    same_state(model, stock)
    assert model.config.to_dict() == stock.config.to_dict()
    assert model.config._name_or_path == str(path)
    assert str(getattr(model, "generation_config", "")) == str(
        getattr(stock, "generation_config", "")
    )
    buffers = dict(stock.named_buffers())
    assert all(torch.equal(b, buffers[n]) for n, b in model.named_buffers())
    hetero.release(model)
    same_state(model, stock)


def test_values_stay_in_their_files_until_the_model_is_prepared(tmp_path: Path) -> None:
    model = hetero.from_pretrained(saved(llama, tmp_path), prepare=False)
    assert all(p.is_meta for p in model.parameters())

    path = saved(mixtral, tmp_path / "mixtral")
    model = hetero.from_pretrained(path, prepare=False)
    here = {n.rpartition(".")[2] for n, p in model.named_parameters() if not p.is_meta}
    assert here == {"gate_up_proj", "down_proj"}  # transformers merges experts


@pytest.mark.parametrize("name", ["llama, tied", "bert"])
def test_a_run_of_training_gives_the_same_numbers(name: str, tmp_path: Path) -> None:
    path = saved(MODELS[name], tmp_path)
    cls = type(MODELS[name]())

    def run(model: nn.Module, optimizer: Any) -> list[float]:
        model.train()
        losses = []
        for number in range(5):
            torch.manual_seed(number)
            loss = model(tokens(4), labels=tokens(4)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    stock = cls.from_pretrained(path)
    expected = run(stock, torch.optim.AdamW(stock.parameters(), lr=1e-2))
    settings = {"device": "cpu:sim", "hbm": 3 * budget(stock), "chunk_bytes": 1024}
    model, optimizer = hetero.from_pretrained(
        path, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2), **settings
    )
    assert run(model, optimizer) == expected
    same_state(model, stock)

    later = hetero.from_pretrained(path, prepare=False)
    groups = [{"params": list(later.parameters())}]
    later, optimizer = hetero.prepare(later, torch.optim.AdamW(groups, lr=1e-2), **settings)
    assert run(later, optimizer) == expected


def test_homes_on_disk_are_filled_from_the_files(tmp_path: Path, disk: Path) -> None:
    path = saved(lambda: llama(num_hidden_layers=16, intermediate_size=256), tmp_path)
    stock = transformers.LlamaForCausalLM.from_pretrained(path)
    host = sum(p.nbytes for p in stock.parameters()) // 2

    model = ours(path, stock, host=host, nvme=disk)

    assert hetero.status(model).tiers["NVME"]["param"]
    assert torch.equal(outputs(model), outputs(stock))
    hetero.release(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, "float32", "auto"])
def test_a_dtype_is_kept_or_made_as_transformers_does(dtype: Any, tmp_path: Path) -> None:
    path = saved(llama, tmp_path)
    stock = transformers.LlamaForCausalLM.from_pretrained(path, dtype=dtype)

    same_state(ours(path, stock, dtype=dtype), stock)


def test_masters_are_of_the_values_that_the_model_would_have_had(tmp_path: Path) -> None:
    path = saved(llama, tmp_path)
    model = ours(path, llama(), dtype=torch.bfloat16, precision="bf16")
    stock = transformers.LlamaForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    hetero.release(model)

    same_state(model, stock)


def test_what_is_missing_is_initialised_and_reported_as_ever(tmp_path: Path) -> None:
    path = saved(bert, tmp_path)
    cls = transformers.BertForSequenceClassification

    def loaded(load: Callable[[], nn.Module]) -> tuple[nn.Module, list[str]]:
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: said.append(record.getMessage())
        log = logging.getLogger("transformers")
        log.addHandler(handler)
        torch.manual_seed(5)
        try:
            return load(), said
        finally:
            log.removeHandler(handler)

    stock, expected = loaded(lambda: cls.from_pretrained(path, num_labels=3))
    model, said = loaded(lambda: ours(path, stock, model_class=cls.__name__, num_labels=3))

    assert said == expected and "classifier.weight" in "".join(said)
    assert "cls.predictions.bias" in "".join(said)  # unexpected
    same_state(model, stock)
    assert torch.equal(outputs(model), outputs(stock))


def test_a_base_model_loads_from_a_head_models_files_and_the_other_way_round(
    tmp_path: Path,
) -> None:
    head, base = saved(bert, tmp_path / "head"), saved(lambda: bert("BertModel"), tmp_path / "base")
    for path, name in ((head, "BertModel"), (base, "BertForMaskedLM")):
        torch.manual_seed(3)
        stock = getattr(transformers, name).from_pretrained(path)
        torch.manual_seed(3)
        model = ours(path, stock, model_class=getattr(transformers, name))
        same_state(model, stock)


def test_old_names_of_norms_are_known(tmp_path: Path) -> None:
    path = saved(bert, tmp_path)
    file = path / "model.safetensors"
    state = load_file(file)
    old = {
        k.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): v
        for k, v in state.items()
    }
    assert old.keys() != state.keys()
    save_file(old, file, metadata={"format": "pt"})

    stock = transformers.BertForMaskedLM.from_pretrained(path)
    same_state(ours(path, stock), stock)


@pytest.mark.parametrize("equal", [True, False])
def test_both_names_of_a_tied_weight_are_in_the_file(equal: bool, tmp_path: Path) -> None:
    path = saved(lambda: llama(tie_word_embeddings=True), tmp_path)
    file = path / "model.safetensors"
    state = load_file(file)
    embed = state["model.embed_tokens.weight"]
    save_file(
        {**state, "lm_head.weight": embed.clone() if equal else embed + 1},
        file,
        metadata={"format": "pt"},
    )

    stock = transformers.LlamaForCausalLM.from_pretrained(path)
    model = ours(path, stock)

    assert (model.lm_head.weight is model.model.embed_tokens.weight) is equal
    same_state(model, stock)
    assert torch.equal(outputs(model), outputs(stock))


def test_a_prepare_that_failed_can_be_tried_again(tmp_path: Path) -> None:
    path = saved(mixtral, tmp_path)
    stock = transformers.MixtralForCausalLM.from_pretrained(path)
    model = hetero.from_pretrained(path, prepare=False)
    with pytest.raises(BudgetError):
        hetero.prepare(model, device="cpu:sim", hbm=2000, chunk_bytes=1024)
    file = path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    with pytest.raises(CheckpointCorrupt):
        hetero.prepare(model, device="cpu:sim", hbm=budget(stock), chunk_bytes=1024)
    file.write_bytes(whole)

    hetero.prepare(model, device="cpu:sim", hbm=budget(stock), chunk_bytes=1024)

    assert torch.equal(outputs(model), outputs(stock))


# -- what is refused -------------------------------------------------------------------------------


def test_a_name_that_cannot_be_reached_is_a_typed_error_with_advice() -> None:
    with pytest.raises(ConfigError, match="cannot load 'nobody/nothing'") as caught:
        hetero.from_pretrained("nobody/nothing", local_files_only=True, hbm="1GiB", device="cpu")
    assert "directory" in caught.value.advice


def test_a_missing_shard_and_a_damaged_index_are_told_before_anything_is_built(
    tmp_path: Path,
) -> None:
    path = saved(llama, tmp_path, max_shard_size="20KB")
    index = path / "model.safetensors.index.json"
    whole = index.read_text()
    gone = sorted(path.glob("model-0*"))[1]
    kept = gone.read_bytes()
    gone.unlink()
    with pytest.raises(CheckpointCorrupt, match="does not have") as caught:
        hetero.from_pretrained(path)
    assert "download" in caught.value.advice
    gone.write_bytes(kept)
    index.write_text(whole[: len(whole) // 2])
    with pytest.raises(CheckpointCorrupt, match="cannot be read"):
        hetero.from_pretrained(path)
    gone.write_bytes(kept[: len(kept) // 2])
    index.write_text(whole)
    with pytest.raises(CheckpointCorrupt):
        hetero.from_pretrained(path)


def test_a_checkpoint_of_another_model_names_what_differs(tmp_path: Path) -> None:
    path = saved(llama, tmp_path)
    config = path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "intermediate_size": 96}))

    with pytest.raises(ConfigError, match=r"9 differences: .*mlp.down_proj.weight") as caught:
        hetero.from_pretrained(path)
    assert "this very model" in caught.value.advice


def test_a_directory_of_pickles_is_refused(tmp_path: Path) -> None:
    path = saved(llama, tmp_path)
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()

    with pytest.raises(ConfigError, match="cannot load"):
        hetero.from_pretrained(path)


@pytest.mark.parametrize(
    "given", [{"device_map": "auto"}, {"hbmm": 3}, {"prepare": False, "hbm": 4}]
)
def test_settings_that_cannot_be_honoured_are_refused(given: Any, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, TypeError)):
        hetero.from_pretrained(saved(llama, tmp_path), **given)


def test_transformers_loads_as_ever_afterwards(tmp_path: Path) -> None:
    path = saved(llama, tmp_path)
    before = transformers.PreTrainedModel._load_pretrained_model
    hetero.from_pretrained(path, prepare=False)

    assert transformers.PreTrainedModel._load_pretrained_model is before
    assert not any(
        p.is_meta for p in transformers.LlamaForCausalLM.from_pretrained(path).parameters()
    )


# -- memory ----------------------------------------------------------------------------------------

MEASURE = """
    import sys
    import torch, transformers
    import hetero
    from hetero.api import engine_of

    def status(key):
        line = next(x for x in open("/proc/self/status") if x.startswith(key))
        return 1024 * int(line.split()[1])

    settings = dict(device="cpu:sim", chunk_bytes="8MiB", hbm="96MiB")
    hetero.from_pretrained(sys.argv[1], **settings)  # imports, and what first calls leave behind
    model = hetero.from_pretrained(sys.argv[2], prepare=False)
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins here
    before = status("VmRSS")
    hetero.prepare(model, **settings)
    engine = engine_of(model)
    homes = sum(home.part(slice(None)).nbytes for home in engine.setup.store.homes.values())
    print(status("VmHWM") - before, homes, engine.residence.manager.arena.slab.n_bytes)
"""


@pytest.mark.campaign(seconds=6)
def test_loading_takes_the_homes_and_hardly_more(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=8, vocab_size=8192)
    saved(llama, tmp_path / "small")
    saved(lambda: transformers.LlamaForCausalLM(config), tmp_path / "big", max_shard_size="50MB")

    code = [sys.executable, "-c", textwrap.dedent(MEASURE), tmp_path / "small", tmp_path / "big"]
    found = subprocess.run(code, check=True, capture_output=True, text=True).stdout.split()
    peak, homes, arena = map(int, found[-3:])

    assert homes > 100 * 2**20
    assert peak <= homes + arena + 2 * 8 * 2**20


def test_a_misspelt_setting_is_told_and_what_only_the_model_lacks_is_not_ours(
    tmp_path: Path,
) -> None:
    saved(gpt2, tmp_path)

    with pytest.raises(ConfigError, match="unknown setting 'hmb', did you mean hbm"):
        hetero.from_pretrained(tmp_path, device="cpu:sim", hmb="1MiB")
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        hetero.from_pretrained(tmp_path, device="cpu:sim", colour=3)
    model = hetero.from_pretrained(tmp_path, device="cpu:sim", attn_implementation="eager")
    assert model.config._attn_implementation == "eager"


def test_an_optimizer_in_place_of_a_function_is_refused(tmp_path: Path) -> None:
    other = torch.optim.SGD(nn.Linear(2, 2).parameters())

    with pytest.raises(ConfigError, match="is a SGD, not a function") as caught:
        hetero.from_pretrained(tmp_path / "not looked at", optimizer=other)
    assert "lambda params" in caught.value.advice
