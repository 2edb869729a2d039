"""Claims about a run: how they are written, and how they are judged."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.errors import ConfigError
from hetero.report.claims import judge, parse

FIGURES = {
    "hbm.peak_bytes": 24 * 2**30,
    "step.mean_seconds": 0.4,
    "step.exposed_share": 0.25,
    "h2d.bytes_per_second": 20e9,
    "events": 7,
}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("hbm.peak <= 24GiB", True),
        ("hbm.peak_bytes < 24GiB", False),
        ("HBM.peak>=25769803776", True),
        ("hbm.peak == 24576 MiB", True),
        ("hbm.peak < 25.8GB", True),
        ("step.mean < 401ms", True),
        ("step.mean >= 0.5", False),
        ("step.mean < 4.1e5us", True),
        ("step.exposed <= 25%", True),
        ("step.exposed <= 0.2", False),
        ("h2d.bytes > 19GB/s", True),
        ("events == 7", True),
    ],
)
def test_a_claim_holds_or_not(text: str, holds: bool) -> None:
    (verdict,) = judge([text], FIGURES)

    assert verdict.holds is holds
    assert verdict.measured == FIGURES[verdict.claim.key]
    assert ("holds, measured" in str(verdict)) is holds
    assert ("does not hold, measured" in str(verdict)) is not holds


@pytest.mark.parametrize(
    "text", ["", "hbm.peak", "hbm.peak = 3", "3 < hbm.peak", "a < b", "__x < 1"]
)
def test_what_is_no_claim_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(text, FIGURES)

    assert "hbm.peak <= 23GiB" in raised.value.advice


@pytest.mark.parametrize(
    "text", ["hbm.peak < 3ms", "step.mean < 3GiB", "events < 3%", "hbm.peak < 1.2.3", "events<1GiB"]
)
def test_a_wrong_unit_is_refused_with_those_that_fit(text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(text, FIGURES)

    assert "takes" in raised.value.advice


def test_an_unknown_key_names_the_closest() -> None:
    with pytest.raises(ConfigError) as raised:
        parse("hbm.peek <= 1", FIGURES)

    assert "hbm.peak_bytes" in raised.value.advice


def test_one_unreadable_claim_leaves_none_judged() -> None:
    with pytest.raises(ConfigError):
        judge(["hbm.peak < 1GiB", "nonsense"], FIGURES)


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=30))
def test_any_text_is_a_claim_or_a_typed_error(text: str) -> None:
    try:
        claim = parse(text, FIGURES)
    except ConfigError as error:
        assert error.advice
    else:
        assert claim.key in FIGURES
