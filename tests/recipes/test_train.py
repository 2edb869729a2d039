"""The recipe behind `hetero train`, at the size of a thumbnail."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from hetero.errors import BudgetError, ConfigError
from hetero.events import What
from hetero.recipes import record
from hetero.recipes.gpt import GPT, GPTConfig
from hetero.recipes.learners import digest
from hetero.recipes.optimizers import factor_of
from hetero.recipes.options import TrainOptions, gathered, settings_of
from hetero.recipes.result import RunStart, StepReport, TrainResult
from hetero.recipes.setup import HALF, NEEDED, QUARTER, settings_for
from hetero.recipes.task import load_tokens, shape
from hetero.recipes.text import (
    Batches,
    as_tokens,
    files_of,
    read_files,
    topics_text,
    unigram_entropy,
)
from hetero.recipes.train import train
from hetero.report import examine
from hetero.report.run import Recorder, Run
from hetero.report.values import read_values
from hetero.types import format_bytes

RUNS = Path(__file__).parent.parent.parent / "runs"
TINY = GPTConfig(width=32, layers=2, heads=2, context=16)
SIZES: dict[str, Any] = {"width": 32, "layers": 2, "heads": 2, "seq": 16}
HBM = 360_000  # activations and, of five units, all but one or two
HOST = 700_000  # half the states, so that a disk has the rest
CHUNK = 4096


def options(**fields: Any) -> TrainOptions:
    budgets = {"hbm": HBM, "host": HOST}  # both given: no budget has to be rehearsed
    given = {"device": "cpu", **budgets, "chunk_bytes": CHUNK}
    settings = {**given, **fields.pop("settings", {})}
    return TrainOptions(settings=settings, **{**SIZES, "steps": 8, "lr": 1e-2, **fields})


def plain(run: TrainOptions) -> tuple[list[float], str]:
    """Do what the recipe does, without hetero; return the losses and the digest of the weights."""
    torch.manual_seed(run.seed)
    model = GPT(shape(run))
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.lr, betas=(0.9, 0.95))
    scheduler = LambdaLR(optimizer, factor_of(run, run.steps))
    tokens = load_tokens(run.data, run.seq)
    data = Batches(tokens, batch=run.batch, context=run.seq, seed=run.seed)
    losses = []
    for _ in range(run.steps):
        loss = model(**next(data))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, digest(model)


@pytest.fixture(autouse=True)
def elsewhere(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run leaves its checkpoints, and what is on disk, in the working directory."""
    monkeypatch.chdir(disk)


@pytest.fixture(scope="module")
def learned() -> Iterator[TrainResult]:
    torch.set_num_threads(1)
    RUNS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=RUNS) as path:
        run = options(steps=40, save_dir=str(Path(path, "saved")), settings={"nvme": path})
        yield train(run)


# -- the run -------------------------------------------------------------------------------------


def test_the_loss_falls(learned: TrainResult) -> None:
    assert learned.last_loss < learned.first_loss - 1


def test_the_run_was_paged_and_moved_bytes(learned: TrainResult) -> None:
    status = learned.status

    assert status.mode == "paged"
    assert status.fetches > 0
    assert status.evictions > 0
    assert status.h2d_bytes > 0
    assert status.d2h_bytes > 0


def test_the_budget_held_activations_too(learned: TrainResult) -> None:
    hbm = learned.status.tiers["HBM"]

    assert learned.status.activation_bytes > 0
    assert hbm["peak"] is not None
    assert hbm["peak"] <= HBM


def test_the_result_adds_up(learned: TrainResult) -> None:
    assert learned.steps == len(learned.losses) == 40
    assert learned.first_loss == learned.losses[0]
    assert learned.last_loss == pytest.approx(sum(learned.losses[-10:]) / 10)
    assert learned.state_bytes == 16 * learned.parameters


def test_the_result_is_plain_data(learned: TrainResult) -> None:
    data = learned.as_json()

    assert data["weights_sha256"] == learned.weights_sha256
    assert data["status"]["tiers"]["HBM"]["budget"] == HBM


@pytest.mark.parametrize("device", ["cpu", "cpu:sim"])
@pytest.mark.parametrize("recompute", [False, True])
def test_weights_are_those_of_plain_torch_bit_for_bit(device: str, recompute: bool) -> None:
    hbm = 300_000
    run = options(checkpoint_blocks=recompute, settings={"device": device, "hbm": hbm})

    result = train(run)

    losses, weights = plain(run)
    assert result.status.evictions > 0
    assert list(result.losses) == losses
    assert result.weights_sha256 == weights


def test_without_a_budget_the_weights_are_the_same() -> None:
    paged, resident = train(options()), train(options(settings={"hbm": "all", "host": "8MB"}))

    assert (paged.status.mode, resident.status.mode) == ("paged", "resident")
    assert paged.weights_sha256 == resident.weights_sha256


@pytest.mark.parametrize(
    "precision", ["bf16", pytest.param("fp16", marks=pytest.mark.campaign(seconds=1.5))]
)
def test_two_byte_weights_are_the_same_at_any_budget(precision: str) -> None:
    runs = [
        train(options(settings={"hbm": hbm, "precision": precision})) for hbm in (200_000, 400_000)
    ]
    assert runs[0].weights_sha256 == runs[1].weights_sha256
    assert math.isfinite(runs[0].last_loss)


def test_checkpointed_blocks_take_less_room() -> None:
    few, many = (
        train(options(checkpoint_blocks=again, steps=2, settings={"hbm": 2 * HBM}))
        for again in (True, False)
    )

    assert few.status.activation_bytes < many.status.activation_bytes


def test_every_step_is_reported_in_order() -> None:
    seen: list[StepReport] = []

    result = train(options(steps=3), seen.append)

    assert [report.step for report in seen] == [1, 2, 3]
    assert tuple(report.loss for report in seen) == result.losses
    assert seen[-1].tokens == 3 * 2 * TINY.context


def test_minutes_end_a_run_early() -> None:
    assert train(options(steps=50, minutes=1e-6)).steps == 1


# -- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.campaign(seconds=5)
@pytest.mark.parametrize("stopped", [1, 3, 5])
def test_a_run_that_was_stopped_goes_on_bit_for_bit_at_other_budgets(stopped: int) -> None:
    whole = train(options(save_dir="whole", save_every=2))
    steps: list[int] = []

    first = train(
        options(save_dir="cut", save_every=2),
        lambda report: steps.append(report.step),
        lambda: 2 if len(steps) == stopped else None,
    )
    second = train(options(save_dir="cut", resume=True, settings={"hbm": 2 * HBM}))

    assert (first.steps, first.signal) == (stopped, 2)
    assert (second.steps, second.resumed_step, second.signal) == (8, stopped, None)
    assert second.losses == whole.losses
    assert second.weights_sha256 == whole.weights_sha256


def test_a_run_that_had_ended_says_so_and_may_be_made_longer() -> None:
    starts: list[RunStart] = []
    run = {"schedule": "constant", "warmup": 2, "save_dir": "cut"}
    whole = train(options(**{**run, "steps": 8, "save_dir": "whole"}))
    train(options(**run, steps=4))

    again = train(options(**run, steps=4, resume=True), announce=starts.append)
    longer = train(options(**run, steps=8, resume=True), announce=starts.append)

    assert [(s.ended_steps, s.resumed, s.steps, s.is_over) for s in starts] == [
        (4, 4, 4, True),
        (4, 4, 8, False),
    ]
    assert (again.steps, again.report) == (4, None)
    assert longer.losses == whole.losses  # as if it had been as long from the start
    assert longer.weights_sha256 == whole.weights_sha256
    with pytest.raises(ConfigError, match="steps was 8 and is 4") as refused:
        train(options(**run, steps=4, resume=True))
    assert "steps may be more" in refused.value.advice


def test_a_longer_run_goes_on_at_the_rate_of_its_own_schedule() -> None:
    rates: list[float] = []
    run = {"save_dir": "cut", "warmup": 1}
    train(options(**run, steps=4))

    train(options(**run, steps=8, resume=True), lambda report: rates.append(report.lr))

    factor = factor_of(options(**run), 8)
    assert rates == [1e-2 * factor(step) for step in (5, 6, 7, 8)]


def test_only_the_last_checkpoints_stay() -> None:
    result = train(options(save_every=2, keep=2))

    assert Path(result.checkpoint).name == "step-8"
    saved = Path(result.checkpoint).parent.glob("step-*")
    assert sorted(path.name for path in saved) == ["step-6", "step-8"]


def test_runs_are_numbered_and_the_last_one_is_gone_on_with() -> None:
    runs = [train(options(steps=8, minutes=1e-6)) for _ in range(2)]

    again = train(options(resume=True))

    assert [Path(r.checkpoint).parent.name for r in (*runs, again)] == ["1", "2", "2"]
    assert again.resumed_step == 1


def test_a_folder_with_another_runs_checkpoints_is_refused() -> None:
    train(options(steps=1, save_dir="there"))

    with pytest.raises(ConfigError, match="another run"):
        train(options(save_dir="there"))
    with pytest.raises(ConfigError, match=r"lr was 0\.01 and is 0\.02"):
        train(options(steps=1, save_dir="there", resume=True, lr=0.02))
    with pytest.raises(ConfigError, match="no checkpoint"):
        train(options(save_dir="elsewhere", resume=True))


def test_a_result_with_a_checkpoint_is_plain_data() -> None:
    data = json.loads(json.dumps(train(options(steps=1)).as_json()))

    assert data["checkpoint"].endswith("step-1")
    assert data["signal"] is None


# -- its recording -------------------------------------------------------------------------------


def recorded_steps(folder: str | Path) -> list[int]:
    return [event.step for event in Run.load(folder).events if event.what == What.STEP.value]


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cpu:sim", marks=pytest.mark.campaign(seconds=1.5))]
)
def test_a_recorded_run_computes_what_an_unrecorded_one_does(device: str) -> None:
    settings = {"device": device, "hbm": 300_000}
    seen = train(options(settings=settings, save_dir="seen"))
    unseen = train(options(settings=settings, save_dir="unseen", record="none"))

    assert seen.status.evictions > 0
    assert seen.losses == unseen.losses
    assert seen.weights_sha256 == unseen.weights_sha256
    assert unseen.report is None
    assert [path.name for path in Path("unseen").iterdir()] == ["step-8"]


def test_a_run_leaves_its_report_beside_its_checkpoints() -> None:
    run = options()
    result = train(run)

    folder = Path(result.checkpoint).parent / "run"
    assert result.report == str(folder / "report.html")
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert f"{format_bytes(result.state_bytes)} of states trained" in page
    assert Path(result.report).read_text().startswith("<!doctype html>")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["hbm"]["peak_bytes"] == result.status.tiers["HBM"]["peak"]
    assert summary["step"]["count"] == 8
    assert recorded_steps(folder) == list(range(8))
    assert (result.recorded_steps, result.report_problem) == (8, "")
    told = list(read_values(folder))
    assert [row.value for row in told if row.name == "loss"] == list(result.losses)
    tokens = [row.value for row in told if row.name == "tokens"]
    assert tokens == [run.batch * run.accumulate * run.seq] * 8


def test_recording_ends_before_a_long_run_does(monkeypatch: pytest.MonkeyPatch) -> None:
    unseen = train(options(save_dir="unseen", record="none"))
    monkeypatch.setattr(record, "MOST_STEPS", 3)

    result = train(options(record="there"))

    assert recorded_steps("there") == [0, 1, 2]
    assert (result.steps, result.recorded_steps) == (8, 3)
    assert result.report == "there/report.html"
    assert result.weights_sha256 == unseen.weights_sha256


def test_a_resumed_run_records_anew_beside_what_was_recorded() -> None:
    train(options(minutes=1e-6, save_dir="there"))
    before = Path("there/run/events.jsonl.gz").read_bytes()

    second = train(options(save_dir="there", resume=True))

    assert second.report == "there/run-2/report.html"
    assert len(recorded_steps("there/run-2")) == second.recorded_steps == 7
    assert Path("there/run/events.jsonl.gz").read_bytes() == before
    assert train(options(save_dir="there", resume=True)).report is None  # nothing was left to do


def no_space(*args: Any) -> None:
    raise OSError(errno.ENOSPC, "no space left on device")


def test_a_run_that_cannot_be_recorded_trains_and_says_why() -> None:
    unseen = train(options(save_dir="unseen", record="none"))
    Path("file").write_text("in the way")

    result = train(options(record="file/run"))

    assert result.report is None
    assert result.report_problem.startswith("DiskReadError: open failed on file/run")
    assert result.weights_sha256 == unseen.weights_sha256


@pytest.mark.parametrize(
    ("what", "name"), [(Recorder, "flush"), (examine.RunReport, "write"), (record, "report")]
)
def test_a_disk_that_is_full_ends_no_training(
    what: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(what, name, no_space)

    result = train(options())

    assert result.steps == 8
    assert Path(result.checkpoint).is_dir()
    assert result.report is None
    assert "no space left" in result.report_problem


# -- settings ------------------------------------------------------------------------------------


def test_the_default_budget_is_a_quarter_of_the_states_where_that_is_enough() -> None:
    run = TrainOptions(width=256, layers=6, heads=2, seq=16)
    model = GPT(shape(run))
    optimizer = torch.optim.AdamW(model.parameters())

    settled = settings_for(model, optimizer, settings_of(run), run)

    n_params = sum(p.numel() for p in model.parameters())
    assert (settled.config.hbm, settled.config.host) == (4 * n_params, 8 * n_params)
    assert settled.why == {"hbm": QUARTER, "host": HALF}
    assert settled.step_write_bytes is not None
    assert 6 * n_params < settled.step_write_bytes < 12 * n_params  # half of the states


@pytest.mark.campaign(seconds=7)
@pytest.mark.parametrize(
    "sizes",
    [
        {"width": 32, "layers": 2, "heads": 2, "seq": 32},
        {"width": 64, "layers": 2, "heads": 2, "seq": 256, "batch": 8},
    ],
    ids=lambda sizes: str(sizes["width"]) + "-" + str(sizes["seq"]),
)
def test_default_budgets_hold_any_shape_and_batch_and_the_run_says_why(
    sizes: dict[str, Any],
) -> None:
    starts: list[RunStart] = []

    result = train(TrainOptions(steps=3, record="none", **sizes), announce=starts.append)

    (start,) = starts
    assert result.steps == 3
    budgets = {each.tier: each for each in start.budgets}
    assert budgets["HBM"].why == NEEDED
    assert budgets["HBM"].n_bytes is not None
    assert budgets["HBM"].n_bytes > start.state_bytes // 4
    for tier in ("HBM", "HOST"):
        assert (result.status.tiers[tier]["peak"] or 0) <= (budgets[tier].n_bytes or 0)


def test_a_budget_that_was_given_is_no_default() -> None:
    starts: list[RunStart] = []

    Path("a").mkdir(mode=0o700)
    train(options(steps=1, settings={"nvme": ("a",), "host": "8MB"}), announce=starts.append)

    assert [(b.tier, b.n_bytes, b.why) for b in starts[0].budgets] == [
        ("HBM", HBM, "as given"),
        ("HOST", 8_000_000, "as given"),
    ]
    assert (starts[0].disks, starts[0].resumed, starts[0].is_over) == (("a",), 0, False)


def test_by_default_ram_holds_half_the_states_and_a_disk_the_rest() -> None:
    torch.manual_seed(0)
    sizes = {**SIZES, "width": 256, "layers": 4}
    run = TrainOptions(settings={"device": "cpu", "hbm": 2**26}, steps=2, **sizes)

    result = train(run)

    tiers = result.status.tiers
    assert tiers["HOST"]["budget"] == result.state_bytes // 2
    assert (tiers["HOST"]["peak"] or 0) <= result.state_bytes // 2
    assert (tiers["NVME"]["used"] or 0) > 0
    assert result.status.read_bytes > 0
    assert result.status.written_bytes >= result.status.write_bytes > 0


@pytest.mark.campaign(seconds=4)
def test_the_default_device_is_never_the_plain_cpu() -> None:
    run = TrainOptions()
    config = settings_for(*model_and_optimizer(), settings_of(run), run).config

    assert config.device != "cpu"


def model_and_optimizer() -> tuple[GPT, torch.optim.Optimizer]:
    model = GPT(TINY)
    return model, torch.optim.AdamW(model.parameters())


def test_a_settings_file_is_read_and_options_go_on_top(tmp_path: Path) -> None:
    path = tmp_path / "hetero.toml"
    path.write_text('hbm = "1MiB"\nhost = "8MiB"\ndevice = "cpu"\n')

    run = gathered(path, {"host": "9MiB"})
    config = settings_for(*model_and_optimizer(), settings_of(run), run).config

    assert (config.hbm, config.host, config.device) == (2**20, 9 * 2**20, "cpu")


def test_a_budget_that_activations_exceed_is_refused_with_the_one_that_works() -> None:
    with pytest.raises(BudgetError) as refused:
        train(options(settings={"hbm": 100_000}))

    enough = refused.value.needed_bytes
    assert train(options(steps=2, settings={"hbm": enough})).steps == 2


def test_a_mesh_of_parts_of_sequences_is_refused() -> None:
    with pytest.raises(ConfigError, match="hetero train knows no parts of sequences") as refused:
        train(options(settings={"mesh": {"cp": 2}}))
    assert refused.value.advice


def test_a_mesh_of_stages_without_other_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="this is the only rank") as refused:
        train(options(settings={"mesh": {"pp": 2}}))
    assert "torchrun --nproc-per-node 2 -m hetero train --mesh pp=2" in refused.value.advice


def test_a_width_that_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a multiple of heads=3") as refused:
        shape(options(heads=3))
    assert refused.value.advice


def test_the_schedule_climbs_then_falls_to_its_floor() -> None:
    factor = factor_of(options(), 100)
    rates = [factor(step) for step in range(101)]

    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[100] == pytest.approx(0.1)


# -- text ----------------------------------------------------------------------------------------


def test_the_default_text_is_large_and_predictable() -> None:
    tokens = as_tokens(topics_text())

    assert len(tokens) > 400_000
    assert 2.5 < unigram_entropy(tokens) < 4.0


def test_the_entropy_of_fair_bytes_is_the_log_of_their_number() -> None:
    assert unigram_entropy(as_tokens(b"abcd" * 5)) == pytest.approx(math.log(4))


def test_batches_repeat_with_the_seed_and_leave_the_global_generator_alone() -> None:
    tokens = as_tokens(bytes(range(200)))
    before = torch.get_rng_state()

    first, again = (next(Batches(tokens, batch=3, context=8, seed=5)) for _ in range(2))
    other = next(Batches(tokens, batch=3, context=8, seed=6))

    assert torch.equal(first["tokens"], again["tokens"])
    assert not torch.equal(first["tokens"], other["tokens"])
    assert torch.equal(torch.get_rng_state(), before)


def test_targets_are_the_next_tokens() -> None:
    batch = next(Batches(as_tokens(bytes(range(200))), batch=4, context=8, seed=0))

    x, y = batch["tokens"], batch["targets"]
    assert x.shape == y.shape == (4, 8)
    assert torch.equal(y, x + 1)


def test_the_last_window_is_reachable_and_nothing_beyond_it() -> None:
    data = Batches(as_tokens(b"abc"), batch=64, context=1, seed=0)

    assert {bytes(row.tolist()) for row in next(data)["tokens"]} == {b"a", b"b"}


def test_files_of_a_directory_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", ".hidden"):
        (tmp_path / name).write_text(name)

    assert [path.name for path in files_of(tmp_path)] == ["a.txt", "b.txt"]
    assert read_files([tmp_path, tmp_path / ".hidden"]) == b"a.txt\nb.txt\n.hidden"


def test_a_missing_text_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.txt"):
        load_tokens((str(tmp_path / "nowhere.txt"),), 16)


def test_a_text_shorter_than_a_sequence_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("0123456789abcdef")

    with pytest.raises(ConfigError, match="16 bytes; one sequence takes 17"):
        load_tokens((str(tmp_path / "short.txt"),), 16)


# -- the model -----------------------------------------------------------------------------------


def test_a_token_sees_only_what_came_before() -> None:
    model = GPT(TINY).eval()
    tokens = torch.arange(16).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 10:] = 200

    with torch.no_grad():
        before, after = model(tokens), model(changed)

    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])


def test_a_new_model_guesses_nearly_evenly() -> None:
    torch.manual_seed(0)
    x = torch.randint(256, (4, 16))

    assert GPT(TINY)(x, x).item() == pytest.approx(math.log(256), abs=0.2)


def test_what_writes_to_the_residual_stream_starts_smaller() -> None:
    torch.manual_seed(0)
    block = GPT(TINY).blocks[0]

    assert block.mlp.down.weight.std().item() == pytest.approx(0.01, rel=0.1)
    assert block.mlp.up.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_a_tied_head_is_the_embedding() -> None:
    model = GPT(dataclasses.replace(TINY, tied_head=True))

    assert model.head.weight is model.tokens.weight
    assert model.tokens.weight.std().item() < 0.03
