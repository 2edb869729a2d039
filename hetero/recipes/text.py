"""Real text as bytes, and batches of it drawn with a generator of their own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch


def topics_text() -> bytes:
    """Return Python's own reference manual, about half a megabyte that every Python brings."""
    from pydoc_data import topics

    return "\n\n".join(topics.topics.values()).encode()


def read_files(paths: Iterable[str | Path]) -> bytes:
    """Return the bytes of files, and of all files below directories in the order of their names.

    Raises FileNotFoundError for a path that is not there.
    """
    return b"\n".join(path.read_bytes() for given in paths for path in files_of(Path(given)))


def files_of(path: Path) -> list[Path]:
    """Return a file, or the regular files below a directory, hidden ones left out."""
    if not path.exists():
        raise FileNotFoundError(f"no such file or directory: {path}")
    if not path.is_dir():
        return [path]
    inside = (p for p in sorted(path.rglob("*")) if p.is_file())
    return [p for p in inside if not any(s.startswith(".") for s in p.relative_to(path).parts)]


def as_tokens(text: bytes) -> torch.Tensor:
    """Return one uint8 token per byte."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def batches(
    tokens: torch.Tensor, *, batch: int, context: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (tokens, targets) without end, int64 [batch, context] each, from random places.

    The same seed yields the same batches; the global generator is not touched.
    """
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(context + 1)
    while True:
        starts = torch.randint(len(tokens) - context, (batch, 1), generator=generator)
        windows = tokens[starts + offsets].long()
        yield windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def unigram_entropy(tokens: torch.Tensor) -> float:
    """Return the entropy of single bytes in nats: the loss of the best guess without context."""
    counts: list[int] = torch.bincount(tokens.long(), minlength=256).tolist()
    shares = (count / len(tokens) for count in counts if count)
    return -sum(share * math.log(share) for share in shares)
