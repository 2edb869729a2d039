"""Real text as bytes, and batches of it drawn with a generator of their own."""

from __future__ import annotations

import math
from collections.abc import Iterable
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


class Batches:
    """Yields (tokens, targets) without end, int64 [batch, context] each, from random places.

    The same seed yields the same batches; the global generator is not touched. The position is the
    generator's state, which a checkpoint keeps.
    """

    def __init__(self, tokens: torch.Tensor, *, batch: int, context: int, seed: int) -> None:
        self._tokens = tokens
        self._batch = batch
        self._offsets = torch.arange(context + 1)
        self._generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        places = len(self._tokens) - len(self._offsets) + 1
        starts = torch.randint(places, (self._batch, 1), generator=self._generator)
        windows = self._tokens[starts + self._offsets].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return where the batches are."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Go on where ``state_dict`` was taken."""
        self._generator.set_state(state["generator"])


def unigram_entropy(tokens: torch.Tensor) -> float:
    """Return the entropy of single bytes in nats: the loss of the best guess without context."""
    counts: list[int] = torch.bincount(tokens.long(), minlength=256).tolist()
    shares = (count / len(tokens) for count in counts if count)
    return -sum(share * math.log(share) for share in shares)
