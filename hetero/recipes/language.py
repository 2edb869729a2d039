"""Hugging Face language models for `hetero train`: loaded, adapted, fed and exported (floor 4)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    GPT2Config,
    LlamaConfig,
)

from hetero.api import company_of
from hetero.config import Config
from hetero.errors import ConfigError
from hetero.export import export, trained_values
from hetero.integrations.pretrained import from_pretrained
from hetero.parallel.mesh import STAGES, sizes_named
from hetero.recipes.hub import check_reach
from hetero.recipes.options import TrainOptions, installed
from hetero.recipes.sequences import Shuffled, Tokens, answered, packed, together
from hetero.recipes.task import Task
from hetero.recipes.text import readable, rows_of, text_of

WIDTH, LAYERS, HEADS = 64, 2, 4  # of a preset, by default
PRESETS: dict[str, tuple[Any, tuple[str, ...]]] = {  # the names that each kind gives its sizes
    "tiny-llama": (
        LlamaConfig,
        (
            *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
            "max_position_embeddings",
        ),
    ),
    "tiny-gpt2": (GPT2Config, ("n_embd", "n_inner", "n_layer", "n_head", "n_positions")),
}
CALL = {"use_cache": False}  # training looks at every position once


def language_task(options: TrainOptions, config: Config) -> Task:
    """Return a causal language model with its data; ConfigError if one cannot be used."""
    check_reach(options.model)
    try:
        tokenizer = tokenizer_of(options)
        model = model_of(options, config, len(tokenizer))
    except (OSError, ValueError, StrictDataclassError) as error:
        raise ConfigError(
            f"--model {options.model}: {error}".splitlines()[0],
            advice="name a directory with config.json, safetensors and a tokenizer, or a preset:"
            f" gpt, {', '.join(PRESETS)}",
        ) from error
    if options.lora_rank is not None:
        model = adapted(model, options)
    learned = sequences(options.data, options, tokenizer, model)
    pad = pad_of(tokenizer)
    judged = sequences(options.eval_data, options, tokenizer, model) if options.eval_data else []
    size = options.batch
    return Task(
        model=model.train(),
        batches=Shuffled(learned, batch=size, pad=pad, seed=options.seed),
        evaluation=[together(judged[i : i + size], pad) for i in range(0, len(judged), size)],
        targets=torch.cat([s.labels[1:] for s in learned]),
        passes=len(learned) / size,
        unit="token",
        call=CALL,
        write=lambda folder: write(model, tokenizer, folder),
    )


# -- the model -----------------------------------------------------------------------------------


def model_of(options: TrainOptions, config: Config, vocabulary: int) -> nn.Module:
    """Return the model; if all of it trains, it takes no memory until it is prepared."""
    torch.manual_seed(options.seed)
    if options.model in PRESETS:
        build: Any = AutoModelForCausalLM.from_config
        drawn: nn.Module = build(preset(options, vocabulary))
        return drawn
    dtype = {"dtype": torch.float32} if config.precision == "fp32" else {"dtype": "auto"}
    if options.lora_rank is None and not sizes_named(config.mesh).get(STAGES):
        kind = AutoModelForCausalLM
        model: nn.Module = from_pretrained(options.model, prepare=False, model_class=kind, **dtype)
        return model
    # PEFT puts adapters on the device of the weights, and stages are cut of a model that has them
    return AutoModelForCausalLM.from_pretrained(options.model, **dtype)


def preset(options: TrainOptions, vocabulary: int) -> Any:
    """Return a small model's configuration."""
    width, heads = options.width or WIDTH, options.heads or HEADS
    if width % heads:
        raise ValueError(f"width={width} is not a multiple of heads={heads}")
    kind, names = PRESETS[options.model]
    sizes = (width, 4 * width, options.layers or LAYERS, heads, options.seq)
    return kind(
        vocab_size=vocabulary,
        bos_token_id=None,
        eos_token_id=ByT5Tokenizer().eos_token_id,
        **dict(zip(names, sizes, strict=True)),
    )


def adapted(model: nn.Module, options: TrainOptions) -> nn.Module:
    """Return a frozen model with low-rank adapters that train."""
    with installed("--lora-rank needs PEFT"):
        from peft import LoraConfig, get_peft_model
    rank = options.lora_rank or 0
    config = LoraConfig(
        r=rank,
        lora_alpha=options.lora_alpha or 2 * rank,
        target_modules=list(options.lora_targets) or "all-linear",
        lora_dropout=options.lora_dropout,
        task_type="CAUSAL_LM",
    )
    try:
        found: nn.Module = get_peft_model(model, config)
    except ValueError as error:
        linear = (n for n, m in model.named_modules() if isinstance(m, nn.Linear))
        names = sorted({name.rpartition(".")[2] for name in linear})
        raise ConfigError(
            f"--lora-targets: {error}", advice=f"this model has {', '.join(names)}"
        ) from error
    return found


# -- data ----------------------------------------------------------------------------------------


def tokenizer_of(options: TrainOptions) -> Any:
    """Return the tokenizer that options name, or the model's."""
    name = options.tokenizer or ("bytes" if options.model in PRESETS else options.model)
    return ByT5Tokenizer(extra_ids=0) if name == "bytes" else AutoTokenizer.from_pretrained(name)


def pad_of(tokenizer: Any) -> int:
    """Return the token that pads shorter sequences; it has no loss."""
    pad = tokenizer.pad_token_id
    found: int = tokenizer.eos_token_id if pad is None else pad
    return found


def sequences(
    paths: Sequence[str], options: TrainOptions, tokenizer: Any, model: nn.Module
) -> list[Tokens]:
    """Return the sequences that the rows of files make; ConfigError if there are none."""
    if tokenizer.eos_token_id is None:
        raise ConfigError("the tokenizer has no EOS", advice="name another one with --tokenizer")

    def encode(text: str) -> list[int]:
        found = tokenizer(readable(text), add_special_tokens=False, verbose=False)
        ids: list[int] = found["input_ids"]
        return ids

    rows = rows_of(paths)
    if options.task == "sft":
        answers = (answered(row, tokenizer, encode, options.seq) for row in rows)
        found = [each for each in answers if each is not None]
    else:
        documents = (encode(text_of(row)) for row in rows)
        found = packed(documents, tokenizer.eos_token_id, options.seq)
    if not found:
        raise ConfigError(
            f"the data makes no sequence of {options.seq} tokens",
            advice="give more data, or another --seq",
        )
    check_vocabulary(found, model)
    return found


def check_vocabulary(found: Sequence[Tokens], model: Any) -> None:
    """Refuse tokens without an embedding in the model."""
    largest = max(int(each.ids.max()) for each in found)
    size = model.config.vocab_size
    if largest >= size:
        raise ConfigError(
            f"the tokenizer makes token {largest}, the model knows {size}",
            advice="name the model's own tokenizer with --tokenizer",
        )


# -- export --------------------------------------------------------------------------------------


def write(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a model in Hugging Face's format, adapters alone in PEFT's, and the tokenizer; ranks
    that share it read it together, and the first one writes."""
    writes = company_of(model).rank == 0
    if hasattr(model, "peft_config"):
        own = model.state_dict()
        values = {**own, **trained_values(model, own)}
        if writes:
            model.save_pretrained(folder, state_dict=values)
    else:
        export(model, folder)
    if writes:
        tokenizer.save_pretrained(folder)
