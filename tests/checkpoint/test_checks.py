"""What a load says before it changes anything."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetero


def prepared() -> Any:
    model = nn.Linear(4, 3)
    return hetero.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), device="cpu")


@pytest.mark.parametrize("threads", [1, 2])
def test_another_number_of_threads_is_told_as_it_may_change_bits(
    threads: int, tmp_path: Path
) -> None:
    torch.set_num_threads(threads)
    hetero.save_checkpoint(tmp_path, *prepared())
    hetero.load_checkpoint(tmp_path, *prepared())  # nothing is said

    torch.set_num_threads(3 - threads)
    with pytest.warns(UserWarning, match=f"on {threads} threads .* set OMP_NUM_THREADS={threads}"):
        hetero.load_checkpoint(tmp_path, *prepared())


@pytest.fixture(autouse=True)
def no_other_warning() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
