"""What `hetero train` can be told: forms of fields, their options, and what a checkpoint keeps."""

from __future__ import annotations

import math
from typing import Any, Literal

import click
import pytest
from click.testing import CliRunner

from hetero.config import Config
from hetero.errors import CheckpointCorrupt, ConfigError
from hetero.recipes.flags import as_flags, fields_as_options, taken
from hetero.recipes.options import FieldForm, TrainOptions, command_options, forms
from hetero.recipes.result import EvalLoss, Progress


@pytest.mark.parametrize(
    ("hint", "form"),
    [
        (int, FieldForm(int)),
        (float | None, FieldForm(float, is_optional=True)),
        (tuple[str, ...], FieldForm(str, is_list=True)),
        (tuple[str, ...] | None, FieldForm(str, is_list=True, is_optional=True)),
        (Literal["a", "b"], FieldForm(str, choices=("a", "b"))),
    ],
)
def test_a_form_is_read_from_a_type(hint: Any, form: FieldForm) -> None:
    assert FieldForm.of(hint) == form


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"lr": math.nan}, "lr=nan has to be above 0"),
        ({"steps": True}, "steps=True is no int"),
        ({"warmup": -1}, "warmup=-1 has to be 0 or more"),
        ({"data": "one"}, "data='one' is no list"),
        ({"task": "guess"}, "task='guess' is none of pretrain, sft"),
        ({"settings": {"hbn": 1}}, "unknown option 'hbn', did you mean hbm?"),
    ],
)
def test_a_wrong_option_is_refused_by_name(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        TrainOptions(**fields)
    assert refused.value.args[0] == problem


def test_every_problem_is_in_one_error() -> None:
    with pytest.raises(ConfigError, match=r"lr=-1\.0 .*; batch=0 .*; unknown option 'x'"):
        TrainOptions(lr=-1.0, batch=0, settings={"x": 1})


def test_every_field_and_setting_is_an_option_that_is_none_when_not_given() -> None:
    @click.command()
    @fields_as_options
    def command(**given: Any) -> None:
        assert set(given.values()) <= {None, ()}
        assert set(forms(TrainOptions)) <= given.keys()
        assert set(forms(Config)) - given.keys() == {"weights", "updates"}

    CliRunner().invoke(command, catch_exceptions=False)


def test_a_number_in_a_file_may_be_an_int_where_a_float_is_meant() -> None:
    assert command_options(None, {"lr": 1, "data": "one"}) == TrainOptions(
        lr=1.0, data=("one",), minutes=3.5
    )


def test_options_at_the_beginning_are_counted_with_their_values() -> None:
    values = {"--hbm": True, "-m": False}

    assert taken(["--hbm", "1GB", "-m", "script", "--hbm", "2GB"], values) == 3
    assert taken(["--hbm=1GB", "script"], values) == 1
    assert taken(["--hbm"], values) == 1


@pytest.mark.parametrize(
    ("said", "spoken"),
    [
        ("raise hbm= to 155453444 bytes", "raise --hbm to 155453444 bytes"),
        ("set pinned=512MiB, or activations='auto'", "set --pinned 512MiB, or --activations auto"),
        ("nvme_bytes='1 TiB' is little", "nvme_bytes='1 TiB' is little"),  # no option of its own
        ("hbm=-1 has to be above 0", "--hbm -1 has to be above 0"),
        ("pinned={'a': 2}: no size", "--pinned {'a': 2}: no size"),
        ("fused_loss=True helps", "--fused-loss helps"),
        ("updates='backward': loss=, n_x=3", "updates='backward': loss=, n_x=3"),
        ("as profile='profiles/<host>.toml'", "as --profile 'profiles/<host>.toml'"),
        ("gradients at --hbm=3, x.hbm=4, ahbm=5", "gradients at --hbm=3, x.hbm=4, ahbm=5"),
        ("batch=(1, 2)", "batch=(1, 2)"),
        ("call hetero.prepare(hbm=...)", "call hetero.prepare(hbm=...)"),
    ],
)
def test_settings_in_a_sentence_become_flags_of_the_command(said: str, spoken: str) -> None:
    options = ("--hbm", "--pinned", "--activations", "--profile", "--gpu-memory")
    made = [click.Option([name]) for name in options]
    command = click.Command("one", params=[*made, click.Option(["--fused-loss"], is_flag=True)])

    assert as_flags(said, command) == spoken


def test_progress_comes_back_from_what_a_checkpoint_keeps() -> None:
    done = Progress([3.0, 2.0], [EvalLoss(2, 2.5)], 7.0, 64)

    found = Progress.of(done.saved())

    assert (found.losses, found.evaluations, found.tokens) == ([3.0, 2.0], [EvalLoss(2, 2.5)], 64)
    assert (found.steps, found.resumed) == (2, 2)
    with pytest.raises(CheckpointCorrupt, match="how far its run has come"):
        Progress.of({"losses": [1.0]})


def test_a_perplexity_beyond_floats_is_infinite() -> None:
    assert EvalLoss(1, math.log(7.0)).perplexity == pytest.approx(7.0)
    assert EvalLoss(1, 1e4).perplexity == math.inf
