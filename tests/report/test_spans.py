"""Arithmetic of time: what is divided adds up again."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.report.spans import Interval, Stack, flatten, stack, total_ns

SPANS = st.lists(
    st.builds(
        lambda begin, length, label: Interval(begin, begin + length, label),
        *(st.integers(0, 60), st.integers(0, 30), st.sampled_from("abc")),
    ),
    max_size=12,
)


def covered(spans: list[Interval]) -> set[int]:
    return {t for span in spans for t in range(span.begin_ns, span.end_ns)}


def first(spans: list[Interval], t_ns: int) -> str | None:
    """Return the label that holds at a time: of the span that began first, then the longer."""
    here = [span for span in spans if span.begin_ns <= t_ns < span.end_ns]
    return min(here, key=lambda s: (s.begin_ns, -s.end_ns)).label if here else None


@settings(max_examples=60, deadline=None)
@given(SPANS)
def test_flattened_spans_cover_the_same_time_without_overlap(spans: list[Interval]) -> None:
    flat = flatten(spans)

    assert covered(flat) == covered(spans)
    assert all(a.end_ns <= b.begin_ns for a, b in itertools.pairwise(flat))
    assert total_ns(spans) == len(covered(spans))


@settings(max_examples=60, deadline=None)
@given(SPANS, SPANS, SPANS, st.integers(0, 50), st.integers(1, 60))
def test_every_moment_belongs_to_the_first_layer_that_covers_it(
    top: list[Interval], middle: list[Interval], bottom: list[Interval], begin: int, length: int
) -> None:
    layers = [[span._replace(label=f"{i}{span.label}") for span in layer]
              for i, layer in enumerate((top, middle, bottom))]  # fmt: skip
    expected: dict[str, int] = {"rest": 0}
    for t in range(begin, begin + length):
        label = next((f for layer in layers if (f := first(layer, t))), "rest")
        expected[label] = expected.get(label, 0) + 1

    parts = Stack(stack(layers)).split(begin, begin + length, "rest")

    assert parts == expected
    assert sum(parts.values()) == length
