"""What a loop tells of its steps is kept, read and shown; what no recording has is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import hetero
from hetero.errors import ConfigError
from hetero.report.examine import examine
from hetero.report.measure import NS, measure
from hetero.report.run import Run
from hetero.report.series import series_of, undelta
from hetero.report.values import VALUES, Value, curves, read_values

from .synthetic import paged


def test_a_loop_tells_its_loss_and_tokens_and_the_page_shows_them(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with hetero.profile(model, tmp_path, optimizer=optimizer) as run:
        for _ in range(5):
            loss = model(torch.ones(3, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            run.note(loss=loss.item(), tokens=12)
    made = examine(run)
    found = made.measured

    assert [v.value for v in found.run.values if v.name == "loss"] == losses
    told = sum(v.value for v in found.run.values if v.name == "tokens")
    assert told == 60 and found.tokens_per_second is not None
    inside = sum(
        v.value
        for v in found.run.values
        if v.name == "tokens" and found.steps.begin_ns <= v.t_ns < found.steps.end_ns
    )
    assert found.tokens_per_second == inside / (found.steady_ns / NS)  # rounded alike
    assert made.summary.step.tokens_per_second == found.tokens_per_second
    loss_curve, rate = series_of(found)["values"]
    assert (loss_curve["name"], rate["name"]) == ("loss", "tokens/s")
    assert loss_curve["v"] == pytest.approx(losses, rel=1e-5)
    assert undelta(loss_curve["t"]) == sorted(undelta(loss_curve["t"]))
    made.write(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count('data-value="loss"') == page.count('data-value="tokens/s"') == 1


def test_tokens_are_a_rate_over_the_time_since_the_value_before() -> None:
    values = [Value(2 * NS, "tokens", 10.0), Value(4 * NS, "tokens", 30.0)]

    assert curves(values, begin_ns=NS)[0].numbers == (10.0, 15.0)


def test_numbers_that_are_none_are_left_out_of_curves() -> None:
    values = [Value(1, "loss", float("nan")), Value(2, "loss", 1.0), Value(3, "x", float("inf"))]

    assert [(c.name, c.numbers) for c in curves(values, 0)] == [("loss", (1.0,))]
    run = replace(paged(3), values=tuple(values))
    assert len(series_of(measure(run))["values"]) == 1


def test_a_cut_row_ends_the_values_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    file = tmp_path / VALUES
    file.write_text('[5, "loss", 1.5]\n[6, "lo')
    assert list(read_values(tmp_path)) == [Value(5, "loss", 1.5)]
    for row in ("[]", '["5", "loss", 1]', "[5, 6, 7]", '[5, "loss", "x"]', "{", "7"):
        file.write_text(row + "\n")
        with pytest.raises(ConfigError, match="no recording has the row"):
            list(read_values(tmp_path))


def test_an_earlier_recordings_values_do_not_stay(tmp_path: Path) -> None:
    (tmp_path / VALUES).write_text('[5, "loss", 1.5]\n')
    model = nn.Linear(2, 2)
    with hetero.profile(model, tmp_path):
        model(torch.ones(1, 2))

    assert Run.load(tmp_path).values == ()
