"""A tensor that is saved box by box is read in any other boxes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.boxes import Arrangement, Box, common, cuts_of, divided, numel_of, sizes_of
from hetero.checkpoint.manifest import SavedTensor, Unfit, check_entry, version_for
from hetero.train.engine import snapshot
from hetero.train.engine.snapshot import read_box


def saved(whole: torch.Tensor, lies: Arrangement) -> memoryview:
    """Return a tensor's bytes, box by box, each with its dimensions in the order of ``lies``."""
    order = lies.order or tuple(range(whole.dim()))
    rows = [
        whole[tuple(slice(*side) for side in box)].permute(order).reshape(-1)
        for _, box in lies.boxes()
    ]
    return memoryview(torch.cat(rows).numpy().tobytes())


@st.composite
def arranged(draw: Any) -> tuple[Arrangement, Box]:
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    order = tuple(draw(st.permutations(range(len(shape))))) if draw(st.booleans()) else ()
    cuts = cuts_of(shape, [sides_of(size, draw(st.integers(1, 4))) for size in shape])
    box = []
    for size in shape:
        start = draw(st.integers(0, size))
        box.append((start, draw(st.integers(start, size))))
    return Arrangement(shape, order, cuts), tuple(box)


def sides_of(size: int, n_parts: int) -> Sequence[tuple[int, int]]:
    return divided((0, size), n_parts)


@settings(max_examples=60, deadline=None)
@given(arranged(), st.integers(1, 40))
def test_any_box_is_read_from_any_arrangement(case: tuple[Arrangement, Box], piece: int) -> None:
    lies, box = case
    numel = numel_of(lies.whole)
    whole = torch.arange(numel, dtype=torch.float32).view(lies.shape)
    raw = saved(whole, lies)

    def read(start: int, into: memoryview) -> None:
        into[:] = raw[start : start + len(into)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "PIECE_BYTES", 4 * piece)
        found = read_box(box, torch.float32, read, lies)

    assert torch.equal(found, whole[tuple(slice(*side) for side in box)])


@given(arranged())
def test_boxes_are_a_tensor_once(case: tuple[Arrangement, Box]) -> None:
    lies, _ = case
    boxes = list(lies.boxes())
    seen = torch.zeros(lies.shape, dtype=torch.int64)
    for first, box in boxes:
        assert first == int(seen.sum())
        assert lies.first_of(box) == first
        seen[tuple(slice(*side) for side in box)] += 1
    assert bool((seen == 1).all())


def test_parts_are_those_of_torch() -> None:
    for size in range(9):
        for n_parts in range(1, 5):
            there = [len(each) for each in torch.arange(size).chunk(n_parts)] if size else []
            found = [sizes_of((side,))[0] for side in divided((0, size), n_parts)]
            assert found == there + [0] * (n_parts - len(there))


def test_boxes_that_only_touch_have_nothing_in_common() -> None:
    assert common(((0, 2),), ((2, 4),)) is None
    assert common(((0, 3), (0, 4)), ((2, 4), (1, 9))) == ((2, 3), (1, 4))


@pytest.mark.parametrize(
    "cuts, problem",
    [
        (((2,),), "not of its dimensions"),
        (((), ()), "not of its dimensions"),
        (((0,), ()), "do not rise"),
        (((4,), ()), "do not rise"),
        (((3, 2), ()), "do not rise"),
        (((1, 1), ()), "do not rise"),
        (((True,), ()), "no number"),
    ],
)
def test_cuts_that_no_save_makes_are_refused(cuts: Any, problem: str) -> None:
    with pytest.raises(Unfit, match=problem):
        check_entry("entry 0", SavedTensor("param", "w", "", "float32", (4, 4), (), cuts))


def test_only_cut_tensors_need_the_newest_version() -> None:
    entry = SavedTensor("param", "w", "", "float32", (4, 4))
    cut = SavedTensor("param", "w", "", "float32", (4, 4), (), ((2,), ()))
    assert version_for([entry]) == 3
    assert version_for([entry, cut]) == 4
