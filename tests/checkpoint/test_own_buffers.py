"""Buffers that each rank has of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetero.checkpoint.manifest import SavedTensor
from hetero.checkpoint.own_buffers import TOLD, rows_of, sources
from hetero.checkpoint.rank_places import Division, RankPlace
from hetero.checkpoint.values import encode_inside


def test_a_buffer_has_rows_if_it_is_not_the_same_on_all_that_have_it() -> None:
    told = [b'{"b": 1, "same": 5}', b'{"b": 1, "same": 5}', b'{"a": 3}', b'{"a": 4, "b": 2}']
    assert rows_of(told) == {"a": [3], "b": [1, 3]}


def test_buffers_that_ranks_told_as_json_are_read() -> None:
    """As checkpoints have them that were written before they had entries."""
    mean = torch.tensor([1.0, 2.0])
    reader: Any = SimpleNamespace(
        entries=[SavedTensor("buffer", "mean", "", "float32", (2,))],
        of_ranks=[{}, {"rng": None, TOLD: encode_inside({"mean": mean})}],
        find=lambda *name: 0 if name == ("buffer", "mean") else None,
    )
    saved = Division(n_ranks=2, n_stages=1, n_tensor=2)

    assert not sources(reader, saved, RankPlace(0, 0, 0))
    second = RankPlace(stage=0, copy=3, tensor=1)
    source = sources(reader, saved, second)["mean"]
    into = bytearray(4)
    source.read(4, memoryview(into))
    assert source.numel == 2 and into == mean[1:].numpy().tobytes()
    reader.entries[0] = SavedTensor("buffer", "mean", "", "float64", (2,))
    with pytest.raises(ValueError, match="own buffer 'mean'"):
        sources(reader, saved, second)
