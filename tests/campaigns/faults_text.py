"""Parsers of text: settings, profiles, rows of data, safetensors, configurations."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path

from transformers import ByT5Tokenizer

from hetero.config import Config
from hetero.plan import hardware
from hetero.recipes.options import gathered
from hetero.recipes.sequences import answered
from hetero.recipes.text import bytes_of, rows_of, text_of
from hetero.rehearse.models import describe
from hetero.tensorfile import INDEX
from hetero.weights import Weights
from tests.campaigns.fuzz import Attempt, Parser, as_text, changed, spoiled

TOML = b"""hbm = "20GiB"
host = 1000000
precision = "bf16"
keep_fp32 = ["norm", "*.head"]
max_grad_norm = 1.0
nvme = ["/tmp/a"]
device = "cpu"
chunk_bytes = 1024
units = ["blocks.*"]
micro_batch = 4
fused_loss = false
"""
YAML = b"""hbm: 20GiB
host: 1000000
precision: &p bf16
keep_fp32: [norm, "*.head"]
max_grad_norm: 1.0
nvme: [/tmp/a]
device: cpu
chunk_bytes: 1024
units:
  - blocks.*
micro_batch: 4
fused_loss: false
"""
OPTIONS = b'model = "tiny-llama"\nlr = 1e-3\ndata = ["a", "b"]\nmicro_batch = 2\nsteps = 7\n'


SETTINGS = {
    "hbm": "20GiB",
    "host": 1_000_000,
    "precision": "bf16",
    "keep_fp32": ["norm", "*.head"],
    "max_grad_norm": 1.0,
    "nvme": ["/tmp/a", "/tmp/b"],
    "device": "cpu",
    "chunk_bytes": 1024,
    "units": ["blocks.*"],
    "micro_batch": 4,
    "fused_loss": False,
    "profile": None,
}


def lines_of(settings: dict[str, object], between: str) -> bytes:
    """Return settings as lines: values of JSON are nearly all values of TOML and of YAML."""
    given = {k: v for k, v in settings.items() if v is not None}
    return "\n".join(f"{k}{between}{json.dumps(v)}" for k, v in given.items()).encode()


def of_bytes(
    name: str, good: bytes, read: Callable[[Path], object], between: str = ""
) -> Callable[[Path], Attempt]:
    """Return how the text of a file is tampered with; with ``between`` also values in it."""

    def prepare(directory: Path) -> Attempt:
        path = directory / name

        def attempt(seeded: random.Random) -> str:
            if between and seeded.random() < 0.7:
                path.write_bytes(lines_of(changed(SETTINGS, seeded), between))
            else:
                path.write_bytes(spoiled(good, seeded))
            read(path)
            return "read"

        return attempt

    return prepare


def profile(directory: Path) -> Attempt:
    good = (hardware.FOLDERS[1] / "a100-80.toml").read_bytes()
    return of_bytes("mine.toml", good, read_profile)(directory)


def read_profile(path: Path) -> None:
    hardware.lint_file(path)
    hardware.load(path)


# -- rows of data --------------------------------------------------------------------------------

ROWS = [
    {"text": "one and two"},
    {"prompt": "2 + 2 =", "completion": " 4"},
    {
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "hello"},
            {"role": "user", "content": "who?"},
        ]
    },
]
TOKENIZER = ByT5Tokenizer(extra_ids=0)


def encode(text: str) -> list[int]:
    found: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return found


def rows(directory: Path) -> Attempt:
    path = directory / "rows.jsonl"

    def attempt(seeded: random.Random) -> str:
        lines = b"\n".join(map(as_text, changed(ROWS, seeded)))
        path.write_bytes(spoiled(lines, seeded) if seeded.random() < 0.3 else lines)
        for row in rows_of([path]):
            if "text" in row:
                bytes_of(text_of(row))
            else:
                answered(row, TOKENIZER, encode, 64)
        return "read"

    return attempt


# -- safetensors ---------------------------------------------------------------------------------

HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "empty": {"dtype": "I64", "shape": [0, 5], "data_offsets": [32, 32]},
}
PARTS = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}


def read_weights(path: Path) -> str:
    with Weights(path) as weights:
        for name in weights.names():
            for _ in weights.pieces(name, 5):
                pass
    return "read"


def header(directory: Path) -> Attempt:
    def attempt(seeded: random.Random) -> str:
        text, data = as_text(changed(HEADER, seeded)), bytes(32)
        if seeded.random() < 0.4:
            text = spoiled(as_text(HEADER), seeded)
        length = len(text) + seeded.choice([*[0] * 12, 1, -1, 2**40, -len(text)])
        raw = struct.pack("<Q", length) + text + data[: seeded.choice([*[32] * 8, 31, 0])]
        (directory / "model.safetensors").write_bytes(raw)
        return read_weights(directory)

    return attempt


def index(directory: Path) -> Attempt:
    for name, file in PARTS.items():
        text = as_text({name: {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}})
        (directory / file).write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    good = {"metadata": {"total_size": 16}, "weight_map": PARTS}

    def attempt(seeded: random.Random) -> str:
        text = as_text(changed(good, seeded))
        if seeded.random() < 0.4:
            text = spoiled(as_text(good), seeded)
        (directory / INDEX).write_bytes(text)
        return read_weights(directory)

    return attempt


# -- configurations ------------------------------------------------------------------------------

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def configuration(directory: Path) -> Attempt:
    def attempt(seeded: random.Random) -> str:
        text = json.dumps(changed(LLAMA, seeded)).encode()
        if seeded.random() < 0.3:
            text = spoiled(as_text(LLAMA), seeded)
        (directory / "config.json").write_bytes(text)
        describe(directory, None)
        return "read"

    return attempt


PARSERS = [
    Parser("toml", of_bytes("a.toml", TOML, Config.load, " = ")),
    Parser("yaml", of_bytes("a.yaml", YAML, Config.load, ": ")),
    Parser("options", of_bytes("run.toml", OPTIONS, lambda path: gathered(str(path), {}))),
    Parser("profile", profile),
    Parser("jsonl", rows),
    Parser("safetensors header", header),
    Parser("safetensors index", index),
    Parser("config.json", configuration),
]
