"""TRL's trainers and PEFT's adapters with hetero against without: every number is the same.

TRL's losses read ``lm_head.weight`` themselves, and DoRA the weight of the layer below it: no hook
on a module hears of that, and yet the bytes have to be there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("peft")

from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast, Trainer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import hetero
from hetero.api import engine_of
from tests.integrations.trainers import (
    SETTINGS,
    arguments,
    built,
    evictions,
    history,
    llama,
    same_run,
    same_weights,
    weights,
    within,
)

WORDS = 62
EVERYWHERE = {"target_modules": "all-linear"}
ADAPTERS: dict[str, dict[str, Any]] = {
    "LoRA": EVERYWHERE,
    "DoRA": {**EVERYWHERE, "use_dora": True},
    "whole modules": {
        "target_modules": ["q_proj", "v_proj"],
        "modules_to_save": ["embed_tokens", "lm_head"],
    },
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def tokenizer() -> Any:
    vocabulary = {f"w{i}": i for i in range(WORDS)} | {"<pad>": 62, "<eos>": 63}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def texts(length: int, seed: int) -> list[str]:
    drawn = torch.randint(0, WORDS, (12, length), generator=torch.Generator().manual_seed(seed))
    return [" ".join(f"w{i}" for i in row) for row in drawn.tolist()]


def completions() -> Dataset:
    return Dataset.from_list([{"text": text} for text in texts(8, seed=1)])


def preferences() -> Dataset:
    three = zip(texts(4, seed=1), texts(5, seed=2), texts(5, seed=3), strict=True)
    rows = [{"prompt": p, "chosen": f" {c}", "rejected": f" {r}"} for p, c, r in three]
    return Dataset.from_list(rows)


def prompts() -> Dataset:
    return Dataset.from_list([{"prompt": text} for text in texts(4, seed=1)])


def length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def config(**changes: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "task_type": "CAUSAL_LM", **changes})


RUNS: dict[str, tuple[type, type, Callable[[], Dataset], Callable[[], dict[str, Any]], int]] = {
    "SFT": (SFTTrainer, SFTConfig, completions, dict, 4_332_472),
    "SFT with LoRA": (
        SFTTrainer,
        SFTConfig,
        completions,
        lambda: {"peft_config": config(**ADAPTERS["LoRA"])},
        4_327_864,
    ),
    "SFT with DoRA": (
        SFTTrainer,
        SFTConfig,
        completions,
        lambda: {"peft_config": config(**ADAPTERS["DoRA"])},
        4_324_280,
    ),
    "DPO": (DPOTrainer, DPOConfig, preferences, lambda: {"ref_model": llama()}, 9_689_040),
    "DPO with LoRA": (
        DPOTrainer,
        DPOConfig,
        preferences,
        lambda: {"peft_config": config(**ADAPTERS["LoRA"])},
        9_677_776,
    ),
    "GRPO": (GRPOTrainer, GRPOConfig, prompts, lambda: {"reward_funcs": [length]}, 4_867_936),
}
OF_GRPO = {"num_generations": 4, "max_completion_length": 6, "max_steps": 2}


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize("name", RUNS)
def test_a_trainer_of_trl_gives_the_same_numbers(name: str, tmp_path: Path) -> None:
    cls, of_arguments, data, given, hbm = RUNS[name]
    own = OF_GRPO if cls is GRPOTrainer else {"max_length": 16, "max_steps": 3}

    def trained(cls: type, **settings: Any) -> Any:
        run = cls(
            model=llama(),
            args=arguments(tmp_path, of_arguments, bf16=False, **own),
            train_dataset=data(),
            processing_class=tokenizer(),
            **given(),
            **settings,
        )
        run.train()
        return run

    expected = trained(cls)
    told: AbstractContextManager[Any] = nullcontext()
    if name == "DPO":  # of a reference model
        told = pytest.warns(UserWarning, match="budget of its own")
    with told:
        found = within(hbm, lambda settings: trained(hetero.trainer(cls), hetero=settings))

    for row in found.state.log_history + expected.state.log_history:
        row.pop("step_time", None)
    same_run(found, expected)
    assert evictions(found) > 3
    assert hetero.status(found.model).mode == "paged"


# -- adapters ------------------------------------------------------------------------------------


def adapted(name: str, layers: int = 4) -> nn.Module:
    model = llama(layers)
    torch.manual_seed(0)
    return get_peft_model(model, config(**ADAPTERS[name]))


def trained(cls: type, folder: Path, name: str, checkpoint: Path | None = None) -> Any:
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    settings = {} if cls is Trainer else {"hetero": {**SETTINGS, "hbm": 300_000}}
    run = built(cls, folder, adapted(name), **saving, **settings)
    run.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    return run


@pytest.mark.campaign(seconds=4)
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_train_are_saved_resumed_and_merged_alike(name: str, tmp_path: Path) -> None:
    ours = hetero.trainer(Trainer)
    expected = trained(Trainer, tmp_path / "stock", name)
    found = trained(ours, tmp_path / "ours", name)

    # 1. the numbers, with evictions
    same_run(found, expected)
    assert evictions(found) > 3
    # 2. the frozen base: no gradient, no state, never written
    engine = engine_of(found.model)
    buckets = engine.setup.blueprint.layout.buckets
    frozen = {kind for kind, bucket in engine.setup.store.homes if not buckets[bucket].trainable}
    trainable = sum(p.nbytes for p in found.model.parameters() if p.requires_grad)
    assert frozen == {"param"}
    assert hetero.status(found.model).d2h_bytes == trainable
    # 3. the files
    folders = [tmp_path / side / "checkpoint-4" for side in ("ours", "stock")]
    names = [sorted(path.name for path in folder.iterdir()) for folder in folders]
    assert names[0] == names[1]
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (folders[0] / file).read_bytes() == (folders[1] / file).read_bytes()
    # 4. resumed from either
    for side in ("ours", "stock"):
        again = trained(ours, tmp_path / "again", name, tmp_path / side / "checkpoint-2")
        assert history(again)[:-1] == history(expected)[:-1]
        same_weights(again.model, expected.model)
    # 5. merged, attached and released
    merged = weights(expected.model.merge_and_unload())
    hetero.release(again.model)
    for model in (again.model, found.model):
        values = weights(model.merge_and_unload())
        assert values.keys() == merged.keys()
        assert all(torch.equal(values[key], merged[key]) for key in merged)


def test_adapters_at_home_on_disk_are_saved_alike(tmp_path: Path) -> None:
    expected = built(Trainer, tmp_path / "stock", adapted("LoRA", layers=8), max_steps=3)
    disk = {**SETTINGS, "hbm": 500_000, "nvme": str(tmp_path), "host": 340_000}
    ours = hetero.trainer(Trainer)
    found = built(ours, tmp_path / "ours", adapted("LoRA", layers=8), hetero=disk, max_steps=3)

    for run in (expected, found):
        run.train()
        run.save_model()

    same_run(found, expected)
    name = "adapter_model.safetensors"
    assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "stock" / name).read_bytes()
    assert hetero.status(found.model).written_bytes > 0


def test_what_trl_and_peft_ask_of_parameters_fetches_nothing(tmp_path: Path) -> None:
    run = trained(hetero.trainer(Trainer), tmp_path, "LoRA")
    runtime = engine_of(run.model).residence.manager
    before = dict(runtime.counts)

    run.model.get_nb_trainable_parameters()
    found = [(p.numel(), p.dtype, p.shape, p.requires_grad) for p in run.model.parameters()]
    run.get_decay_parameter_names(run.model)

    assert len(found) > 70
    assert dict(runtime.counts) == before


def test_inner_modules_have_state_dicts_while_attached(tmp_path: Path) -> None:
    run = trained(hetero.trainer(Trainer), tmp_path / "ours", "LoRA")
    expected = trained(Trainer, tmp_path / "stock", "LoRA")

    for name, module in expected.model.named_modules():
        found = run.model.get_submodule(name).state_dict()
        for key, value in module.state_dict().items():
            assert torch.equal(found[key], value), f"{name}.{key}"
