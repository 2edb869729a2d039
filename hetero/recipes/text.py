"""Real text: rows of files, their bytes, and batches drawn with a generator of their own."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from hetero.device import checked_rng
from hetero.errors import ConfigError
from hetero.recipes.options import installed

Row = Mapping[str, Any]
"""One document ({"text"}), or one example ({"prompt", "completion"} or {"messages"})."""
Batch = Mapping[str, torch.Tensor]
"""The keyword arguments of one pass."""
SAVED = ("state.json", "dataset_dict.json")  # in a directory written by datasets
SPLIT = "train"


def topics_text() -> bytes:
    """Return Python's reference manual, half a megabyte that every Python has."""
    from pydoc_data import topics

    return "\n\n".join(topics.topics.values()).encode()


def rows_of(paths: Iterable[str | Path]) -> Iterator[Row]:
    """Yield the rows of files, of directories of files, and of saved datasets.

    A ``.jsonl`` file has one row per line; any other file is one document. Without paths, the rows
    are the topics of Python's reference manual. Raises ConfigError.
    """
    given = [Path(path) for path in paths]
    if not given:
        from pydoc_data import topics

        yield from ({"text": text} for text in topics.topics.values())
    try:
        for path in given:
            saved = any((path / name).exists() for name in SAVED)
            yield from saved_rows(path) if saved else (r for f in files_of(path) for r in read(f))
    except OSError as error:
        raise ConfigError(f"data: {error}", advice="--data takes files and directories") from error


def read(file: Path) -> Iterator[Row]:
    """Yield the rows of one file; `bytes_of` restores its bytes, UTF-8 or not."""
    text = file.read_bytes().decode("utf-8", "surrogateescape")
    if file.suffix != ".jsonl":
        yield {"text": text}
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield parsed(line, f"{file}:{number}")


def parsed(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
        if "\\u" in line:  # an escape may be half of a surrogate pair
            bytes_of(json.dumps(row, ensure_ascii=False))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: {error}", advice="write one JSON object a line") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is no JSON object", advice='write a row as {"text": "..."}')
    return row


def saved_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a directory written by datasets; of several splits, those of `SPLIT`."""
    with installed(f"{path} was saved by datasets", "datasets"):
        from datasets import load_from_disk
    found: Any = load_from_disk(str(path))
    splits = found if hasattr(found, "keys") else {SPLIT: found}
    if SPLIT not in splits:
        raise ConfigError(
            f"{path} has no split {SPLIT!r} but {', '.join(splits)}",
            advice="name one split's folder",
        )
    yield from splits[SPLIT]


def text_of(row: Row) -> str:
    text = row.get("text")
    if not isinstance(text, str):
        raise ConfigError(
            f"a row has {', '.join(map(str, row))} and no text",
            advice='give rows as {"text": "..."}, or --task sft for prompts and completions',
        )
    return text


def readable(text: str) -> str:
    """Return the text; ConfigError if it has bytes that are not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the data has bytes that are no UTF-8, at {text[max(0, error.start - 20) :][:40]!r}",
            advice="convert the files to UTF-8",
        ) from error
    return text


def bytes_of(text: str) -> bytes:
    """Return the bytes that a text was read from."""
    return text.encode("utf-8", "surrogateescape")


def read_files(paths: Iterable[str | Path]) -> bytes:
    """Return the bytes of all documents, joined by newlines."""
    return b"\n".join(bytes_of(text_of(row)) for row in rows_of(paths))


def files_of(path: Path) -> list[Path]:
    """Return a file, or the regular files below a directory, except hidden ones."""
    if not path.exists():
        raise FileNotFoundError(f"no such file or directory: {path}")
    if not path.is_dir():
        return [path]
    inside = (p for p in sorted(path.rglob("*")) if p.is_file())
    return [p for p in inside if not any(s.startswith(".") for s in p.relative_to(path).parts)]


def as_tokens(text: bytes) -> torch.Tensor:
    """Return one uint8 token per byte."""
    if not text:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


class Batches:
    """Yields tokens and targets without end, int64 [batch, context] each, from random places.

    The same seed yields the same batches; the global generator is not touched. The position is the
    generator's state, which a checkpoint keeps.
    """

    def __init__(self, tokens: torch.Tensor, *, batch: int, context: int, seed: int) -> None:
        self._tokens = tokens
        self._batch = batch
        self._offsets = torch.arange(context + 1)
        self._generator = torch.Generator().manual_seed(seed)

    def __next__(self) -> Batch:
        places = len(self._tokens) - len(self._offsets) + 1
        starts = torch.randint(places, (self._batch, 1), generator=self._generator)
        windows = self._tokens[starts + self._offsets].long()
        return {"tokens": windows[:, :-1].contiguous(), "targets": windows[:, 1:].contiguous()}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self._generator.set_state(checked_rng(state["generator"]))


def unigram_entropy(tokens: torch.Tensor) -> float:
    """Return the entropy of single tokens in nats: the best loss of a guess without context."""
    counts: list[int] = torch.bincount(tokens.long()).tolist()
    shares = (count / len(tokens) for count in counts if count)
    return -sum(share * math.log(share) for share in shares)
