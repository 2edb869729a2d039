"""The demo's GPT as files of GPT-2, which it is but for its names: others load it (floor 4)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hetero.api import company_of
from hetero.export import export
from hetero.recipes.gpt import GPT

IN_BLOCKS = {  # and in transformers, where matrices are transposed
    "norm_attention": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "norm_mlp": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
OUTSIDE = {
    "tokens": "transformer.wte",
    "positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}
END = 0  # the byte that ends a document, and pads


def write_gpt(model: GPT, folder: Path) -> None:
    """Write a trained model with its configuration, and a tokenizer whose tokens are bytes.

    Ranks that share it read it together, and the first one writes.
    """
    values = dict(renamed(model.state_dict()))
    if company_of(model).rank:
        return
    export(tree(values), folder)
    for name, data in {"config.json": config_of_gpt(model), **tokenizer(model)}.items():
        (folder / name).write_text(json.dumps(data, indent=1) + "\n")


def renamed(state: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a state dict by GPT-2's names."""
    for name, value in state.items():
        module, _, leaf = name.rpartition(".")
        if module in OUTSIDE:
            yield f"{OUTSIDE[module]}.{leaf}", value.detach().cpu()
            continue
        _, number, inner = module.split(".", 2)
        turned = value.detach().cpu()
        yield (
            f"transformer.h.{number}.{IN_BLOCKS[inner]}.{leaf}",
            turned.t().contiguous() if turned.dim() == 2 else turned,
        )


def tree(values: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return modules whose state dict is ``values``."""
    root = nn.Module()
    for name, value in values.items():
        *path, leaf = name.split(".")
        at = root
        for part in path:
            if part not in at._modules:
                at.add_module(part, nn.Module())
            at = at.get_submodule(part)
        at.register_parameter(leaf, nn.Parameter(value, requires_grad=False))
    return root


def config_of_gpt(model: GPT) -> dict[str, Any]:
    shape = model.config
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": "gelu",
        "layer_norm_epsilon": model.norm.eps,
        "n_ctx": shape.context,
        "n_positions": shape.context,
        "n_embd": shape.width,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied_head,
        "dtype": str(model.tokens.weight.dtype).removeprefix("torch."),
        "bos_token_id": None,
        "eos_token_id": END,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    }


def tokenizer(model: GPT) -> dict[str, dict[str, Any]]:
    """Return the files of a tokenizer whose token is the number of a byte."""
    end = characters()[END]
    bytewise = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    bytewise["use_regex"] = False
    whole: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": bytewise,
        "post_processor": None,
        "decoder": bytewise,
        "model": {
            "type": "BPE",
            "vocab": {character: number for number, character in enumerate(characters())},
            "merges": [],
        },
    }
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.config.context,
        "clean_up_tokenization_spaces": False,
        **dict.fromkeys(("eos_token", "pad_token"), end),
    }
    return {"tokenizer.json": whole, "tokenizer_config.json": about}


def characters() -> list[str]:
    """Return the character that stands for each byte in vocabularies of GPT-2's kind."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    found = {byte: chr(byte) for byte in seen}
    rest = [byte for byte in range(256) if byte not in found]
    found.update({byte: chr(256 + n) for n, byte in enumerate(rest)})
    return [found[byte] for byte in range(256)]
