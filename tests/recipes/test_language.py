"""`hetero train` on Hugging Face models: against plain torch loops, and what it makes of data."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

transformers = pytest.importorskip("transformers")

from huggingface_hub import HfApi  # noqa: E402
from huggingface_hub.utils import validate_repo_id  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer  # noqa: E402

from hetero.cli import main  # noqa: E402
from hetero.config import Config  # noqa: E402
from hetero.errors import ConfigError  # noqa: E402
from hetero.recipes import hub  # noqa: E402
from hetero.recipes.gpt import GPT, GPTConfig  # noqa: E402
from hetero.recipes.gpt_files import write_gpt  # noqa: E402
from hetero.recipes.language import PRESETS  # noqa: E402
from hetero.recipes.learners import digest  # noqa: E402
from hetero.recipes.optimizers import factor_of  # noqa: E402
from hetero.recipes.options import TrainOptions, gathered  # noqa: E402
from hetero.recipes.result import StepReport  # noqa: E402
from hetero.recipes.sequences import IGNORED, answered, packed, together  # noqa: E402
from hetero.recipes.text import rows_of  # noqa: E402
from hetero.recipes.train import task_of, train  # noqa: E402

TEXT = Path(__file__).parent.parent.parent / "LICENSE"
HBM = 450_000
SMALL: dict[str, Any] = {"model": "tiny-llama", "width": 32, "heads": 2, "layers": 3, "seq": 16}
CHATS = [
    {"prompt": "2 + 2 =", "completion": " 4"},
    {"prompt": "the capital of France?", "completion": " Paris"},
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]},
]


@pytest.fixture(autouse=True)
def elsewhere(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run leaves its checkpoints in the working directory."""
    monkeypatch.chdir(disk)
    rows = "\n".join(json.dumps(row) for row in CHATS * 3)
    Path("chats.jsonl").write_text(rows)


def options(**fields: Any) -> TrainOptions:
    settings = {"device": "cpu:sim", "hbm": HBM, **fields.pop("settings", {})}
    given = {"data": (str(TEXT),), "steps": 6, "lr": 1e-2, "record": "none", **SMALL, **fields}
    return TrainOptions(settings=settings, **given)


def learned(run: TrainOptions) -> Any:
    """Return a model and its batches as the recipe draws them, for a loop without hetero."""
    return task_of(run, Config.load(None))


def plain(run: TrainOptions, model: nn.Module, batches: Any) -> tuple[list[float], str]:
    """Train in a plain torch loop; return the losses and the digest of the weights."""
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=run.lr, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor_of(run, run.steps))
    losses = []
    for _ in range(run.steps):
        passes = [next(batches) for _ in range(run.accumulate)]
        counts = [int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in passes]
        total = 0.0
        for batch, count in zip(passes, counts, strict=True):
            loss = model(**batch, use_cache=False).loss
            if run.accumulate > 1:
                loss = loss * (count / sum(counts))
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, digest(model)


RUNS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"model": "tiny-gpt2"},
    "accumulated": {"accumulate": 2, "schedule": "linear"},
    "sft": {"task": "sft", "data": ("chats.jsonl",), "seq": 48, "accumulate": 2, "batch": 3},
    "lora": {"lora_rank": 2, "lora_dropout": 0.1, "warmup": 0},
}


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize("name", RUNS)
def test_the_numbers_are_those_of_a_plain_loop(name: str) -> None:
    run = options(**RUNS[name], settings={"hbm": 2 * HBM if name == "sft" else HBM})
    task = learned(run)
    losses, weights = plain(run, task.model, task.batches)

    result = train(run)

    assert result.status.evictions > 0
    assert list(result.losses) == losses
    assert len(set(losses)) == 6
    assert result.weights_sha256 == weights


class Killed(Exception):
    """Stands for the end of a process between two steps."""


def test_a_run_that_was_killed_goes_on_from_its_last_save_bit_for_bit() -> None:
    given = {**RUNS["lora"], "save_every": 2}
    whole = train(options(**given, save_dir="whole"))

    def kill(report: StepReport) -> None:
        if report.step == 5:
            raise Killed

    with pytest.raises(Killed):
        train(options(**given, save_dir="cut"), kill)
    resumed = train(options(**given, save_dir="cut", resume=True, settings={"hbm": 2 * HBM}))

    assert resumed.resumed_step == 4
    assert resumed.losses == whole.losses
    assert resumed.weights_sha256 == whole.weights_sha256


def test_what_is_written_is_what_others_load_and_what_a_run_begins_with() -> None:
    Path("short.txt").write_text("A few words to be judged by, and a few more of them.")
    first = train(options(out="model", eval_data=("short.txt",), eval_every=3))

    model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
    assert digest(model) == first.weights_sha256
    assert AutoTokenizer.from_pretrained("model")("ab").input_ids == [100, 101, 1]
    assert [each.step for each in first.evaluations] == [3, 6]

    run = options(model="model", seed=3)
    task = learned(run)
    assert all(param.is_meta for param in task.model.parameters())
    losses, weights = plain(run, model.train(), task.batches)
    second = train(run)
    assert list(second.losses) == losses
    assert second.weights_sha256 == weights


@pytest.mark.parametrize("model", ["gpt", *PRESETS])
def test_what_is_written_of_every_preset_loads_again_and_trains_on(model: str) -> None:
    result = train(options(model=model, steps=2, out="out", settings={"hbm": "all"}))

    loaded = AutoModelForCausalLM.from_pretrained("out")
    tokenizer = AutoTokenizer.from_pretrained("out")
    text = "def f(x):\n    return 'caf\u00e9'"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    again = train(options(model="out", steps=1, save_dir="again", settings={"hbm": "all"}))

    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id is not None
    assert result.out == "out"
    assert sum(p.numel() for p in loaded.parameters()) == again.parameters == result.parameters
    if model == "gpt":
        assert ids == list(text.encode())


def test_presets_are_known_where_transformers_is_not_imported() -> None:
    assert ("gpt", *PRESETS) == hub.OWN


def test_the_demo_is_gpt2_to_others_and_gives_the_same_logits() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(width=32, layers=3, heads=2, context=16)).eval()
    tokens = torch.randint(256, (2, 16))

    write_gpt(model, Path("plain"))

    loaded = AutoModelForCausalLM.from_pretrained("plain").eval()
    with torch.no_grad():  # its matrices are transposed, so that products may round otherwise
        assert torch.allclose(model(tokens), loaded(tokens).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tinyllama", "did you mean tiny-llama?"),
        ("nowhere/tiny-lama", "did you mean tiny-llama?"),
        ("llama-3-8b", "hetero plan knows it by name"),
        ("no name at all", "is no name on the Hub"),
    ],
)
def test_a_model_that_cannot_be_reached_is_told_at_once_with_near_names(
    name: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def unreachable(hub: Any, name: str, timeout: float) -> None:
        asked.append(timeout)
        validate_repo_id(name)
        raise OSError("no route to host")

    monkeypatch.setattr(HfApi, "model_info", unreachable)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", None)  # which tries for a minute

    with pytest.raises(ConfigError, match=re.escape(said)) as refused:
        train(options(model=name))
    assert refused.value.args[0].startswith(f"--model {name} is no")
    assert asked == ([] if " " in name else [3.0])


@pytest.mark.parametrize("model", ["gpt", "tiny-llama"])
def test_data_without_a_byte_is_refused_by_name(model: str, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()

    for name in ("empty.txt", "folder"):
        with pytest.raises(ConfigError, match=rf"there is no text in .*{name}"):
            train(options(model=model, data=(str(tmp_path / name),)))


def test_an_evaluation_is_the_mean_loss_of_a_token_and_changes_no_number() -> None:
    data = {"task": "sft", "data": ("chats.jsonl",), "seq": 48, "settings": {"hbm": 2 * HBM}}
    unseen = train(options(**data, save_dir="unseen"))
    run = options(**data, save_dir="seen", eval_data=("chats.jsonl",), eval_every=6)
    seen = train(run)

    task = learned(run)
    _, weights = plain(run, task.model, task.batches)
    total = n_tokens = 0.0
    with torch.no_grad():
        for batch in task.evaluation:
            logits = task.model.eval()(**batch).logits[:, :-1].flatten(0, 1)
            labels = batch["labels"][:, 1:].flatten()
            total += nn.functional.cross_entropy(logits, labels, reduction="sum").item()
            n_tokens += int((labels != IGNORED).sum())
    assert seen.weights_sha256 == unseen.weights_sha256 == weights
    assert seen.evaluations[-1].loss == pytest.approx(total / n_tokens, rel=1e-5)


def test_adapters_are_written_as_peft_reads_them() -> None:
    from peft import PeftModel

    train(options(out="base", steps=1))
    base = {"model": "base", "lora_rank": 2, "lora_targets": ("q_proj", "v_proj")}
    result = train(options(**base, out="adapters"))

    assert not Path("adapters/model.safetensors").exists()
    plain_model = AutoModelForCausalLM.from_pretrained("base", dtype=torch.float32)
    loaded = PeftModel.from_pretrained(plain_model, "adapters", is_trainable=True)
    assert digest(loaded) == result.weights_sha256
    trained = [name for name, param in loaded.named_parameters() if param.requires_grad]
    assert len(trained) == 2 * 2 * 3


def test_a_frozen_base_may_be_coded_and_a_run_goes_on_only_as_it_began() -> None:
    exact = train(options(**RUNS["lora"]))
    coded = {**RUNS["lora"], "save_dir": "coded", "settings": {"frozen": "nf4"}}

    result = train(options(**coded))

    assert result.losses[0] != exact.losses[0]
    assert result.losses[-1] < result.losses[0]
    with pytest.raises(ConfigError, match="frozen was nf4 and is keep"):
        train(options(**{**coded, "settings": {}}, resume=True))


# -- data ----------------------------------------------------------------------------------------


def test_packing_loses_nothing_but_the_last_block_and_pads_nothing() -> None:
    documents = [[5, 6, 7], [8], [], [9, 10, 11, 12]]

    blocks = packed(documents, 1, 4)

    assert [block.ids.tolist() for block in blocks] == [[5, 6, 7, 1], [8, 1, 1, 9], [10, 11, 12, 1]]
    assert all(torch.equal(block.ids, block.labels) for block in blocks)
    assert "attention_mask" not in together(blocks, 0)


def said(row: Mapping[str, Any], length: int = 99) -> tuple[str, str]:
    """Return a row's text, and the part that is learned."""
    tokenizer = ByT5Tokenizer(extra_ids=0)
    found = answered(
        row, tokenizer, lambda text: tokenizer(text, add_special_tokens=False).input_ids, length
    )
    assert found is not None
    part = found.labels[found.labels != IGNORED]
    return tokenizer.decode(found.ids), tokenizer.decode(part)


def test_only_what_is_answered_is_learned() -> None:
    assert said(CHATS[0]) == ("2 + 2 = 4</s>", " 4</s>")
    turns = [
        *({"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}),
        *({"role": "user", "content": "who?"}, {"role": "assistant", "content": "me"}),
    ]
    text, learned_text = said({"messages": turns})
    assert "who?" in text
    assert learned_text == "hello</s>me</s>"
    assert said(CHATS[0], 8) == ("2 + 2 = ", " ")


def test_what_is_too_long_to_be_answered_is_left_out() -> None:
    run = options(task="sft", data=("chats.jsonl",), seq=10)

    assert len(learned(run).batches._sequences) == 3


def test_rows_come_from_files_and_from_what_datasets_saved(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"text": "one"}, {"text": "two"}]
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.jsonl").write_text('{"text": "two"}\n\n{"text": "three"}\n')
    saved = datasets.Dataset.from_list(rows)
    saved.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": saved, "test": saved}).save_to_disk(tmp_path / "splits")

    assert list(rows_of([tmp_path / "a.txt", tmp_path / "b.jsonl"])) == [*rows, {"text": "three"}]
    assert list(rows_of([tmp_path / "saved"])) == list(rows_of([tmp_path / "splits"])) == rows


# -- the command line ----------------------------------------------------------------------------


def call(*line: str) -> Result:
    return CliRunner().invoke(main, list(line))


def test_a_file_of_options_is_read_and_flags_go_on_top() -> None:
    Path("run.yaml").write_text("model: tiny-llama\nlr: 1\ndata: [a, b]\nmicro-batch: 2\n")
    Path("run.toml").write_text(
        'model = "tiny-llama"\nlr = 1\ndata = ["a", "b"]\nmicro_batch = 2\n'
    )

    found = [gathered(f"run.{kind}", {"lr": 2.0}) for kind in ("yaml", "toml")]

    assert found[0] == found[1]
    assert (found[0].lr, found[0].data, found[0].settings) == (2.0, ("a", "b"), {"micro_batch": 2})


def test_an_option_that_nobody_knows_is_refused_with_the_closest() -> None:
    Path("run.toml").write_text("lora-rnak = 3\nhbn = '1GiB'\n")

    result = call("train", "--config", "run.toml")

    assert result.exit_code == 2
    assert "did you mean lora_rank?" in result.stderr
    assert "did you mean hbm?" in result.stderr


def test_a_dry_run_is_the_plan_of_the_run_and_trains_nothing() -> None:
    line = [f"--{k}={v}" for k, v in {**SMALL, "layers": 1, "data": TEXT}.items()]

    fits = call("train", *line, "--dry-run", "--profile", "rtx4090", "--json")
    short = call("train", *line, "--dry-run", "--profile=rtx4090", "--json", "--hbm=100KB")

    assert (fits.exit_code, short.exit_code) == (0, 1)
    assert json.loads(fits.stdout)["model"] == "LlamaForCausalLM"
    assert not Path("runs").exists()


def test_figures_go_to_trackers() -> None:
    result = train(options(track=("jsonl",), save_dir="tracked", steps=2))

    first, *steps = map(json.loads, Path("tracked/metrics.jsonl").read_text().splitlines())
    assert first["config"]["model"] == "tiny-llama"
    assert [line["loss"] for line in steps] == list(result.losses)
    assert [line["step"] for line in steps] == [1, 2]
    with pytest.raises(ConfigError, match="no tracker 'nobody'"):
        train(options(track=("nobody",)))


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hetero.recipes.language", None)

    with pytest.raises(ConfigError, match="needs transformers") as refused:
        train(options())

    assert "hetero[integrations]" in refused.value.advice


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model": "./nowhere"}, "nowhere is no directory"),
        ({"lora_rank": 2, "lora_targets": ("nobody",)}, "this model has .*q_proj"),
        ({"seq": 100_000}, "makes no sequence"),
        ({"data": ("chats.jsonl",)}, "and no text"),
        ({"task": "sft"}, "and no 'prompt'"),
    ],
)
def test_what_cannot_be_trained_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        learned(options(**fields))
