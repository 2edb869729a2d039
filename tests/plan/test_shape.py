"""Shares of a decoder: layers are cut, tensors are divided, and nothing is lost."""

from __future__ import annotations

import pytest

from hetero.errors import ConfigError
from hetero.plan.candidates import SearchWork, candidates, fitting
from hetero.plan.hardware import find
from hetero.plan.presets import PRESETS
from hetero.plan.shape import DecoderShape, check_divides, even_cut, shape_of


def shape(name: str) -> DecoderShape:
    found = shape_of(PRESETS[name])
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["llama-3-8b", "bloom-176b", "gpt-3-175b", "moe-1t"])
@pytest.mark.parametrize("stages", [1, 2, 5])
def test_stages_and_parts_make_up_the_model(name: str, stages: int) -> None:
    whole = shape(name)
    cut = even_cut(whole, stages, 4)

    assert [share.first for share in cut[1:]] == [share.after for share in cut[:-1]]
    assert (cut[0].first, cut[-1].after) == (0, whole.layers)
    assert [share.opens for share in cut] == [True] + [False] * (stages - 1)
    assert [share.closes for share in cut] == [False] * (stages - 1) + [True]
    split = sum(whole.share_numel(share)[0] for share in cut)
    alone = sum(whole.share_numel(share)[1] for share in cut)
    again = whole.table_numel * (whole.tied and stages > 1)  # each end has the words
    padded = 4 * whole.width * (1 + (not whole.tied) + (stages > 1)) * (whole.vocab % 4 > 0)
    assert 0 <= 4 * split + alone - whole.numel - again <= padded


def test_words_as_heavy_as_a_layer_count_as_one() -> None:
    """BLOOM's run has 70 layers and two tables on twelve stages."""
    cut = even_cut(shape("bloom-176b"), 12)

    assert [share.n_layers for share in cut] == [5, *[6] * 10, 5]


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="32 layers make no 40 stages"):
        even_cut(shape("llama-3-8b"), 40)


def test_ranks_that_do_not_divide_heads_are_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match="3 ranks do not divide 32 heads") as refused:
        check_divides(shape("llama-3-8b"), 3)

    assert "tp=2 or 4 or 8" in refused.value.advice


def test_every_candidate_is_of_all_ranks_and_all_samples() -> None:
    work = SearchWork(shape("llama-3-8b"), 64, 2048, 32, find("a100-80"))
    found = list(candidates(work))

    assert {each.pp * each.tp * each.dp for each in found} == {32}
    assert all(64 % (each.dp * each.micro_batch) == 0 for each in found)
    assert max(each.tp for each in found) == 8  # of a machine


def test_candidates_that_fit_come_with_the_fastest_first() -> None:
    work = SearchWork(shape("bloom-176b"), 2048, 2048, 384, find("a100-80"))
    found = fitting(work)

    assert found == sorted(found, key=lambda each: each.seconds)
    assert 0 < len(found) < len(list(candidates(work)))
    assert max(each.hbm_bytes for each in found) <= 80 * 2**30


def test_if_nothing_fits_what_needs_least_comes_first() -> None:
    found = fitting(SearchWork(shape("bloom-176b"), 8, 2048, 8, find("a100-40")))

    assert found and found[0].hbm_bytes > 40 * 2**30
    needs = [each.hbm_bytes + each.host_bytes for each in found]
    assert needs == sorted(needs)
