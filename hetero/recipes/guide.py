"""How help is laid out: commands in the order of use, options in groups, examples (no torch)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem
from click.types import StringParamType

from hetero.plan.presets import PRESETS

if TYPE_CHECKING:
    Choice = click.Choice[str]
else:  # of an older click, which takes no type
    Choice = click.Choice

SIZES_TEXT = (
    "SIZE is text in any case: 20GiB, or 20G for short (2^30 bytes each), 20GB (10^9 each), or a"
    " number of bytes."
)
ORDER = ("train", "run", "watch", "plan", "report", "doctor", "calibrate", "verify", "bench")
WORDS_OF_TRAIN = (
    "A run's folder is --save-dir FOLDER (with --resume, to go on), a text --data FILE, a model"
    " --model NAME."
)
OTHERS = "Others"  # title of the options that no group names
TRAIN_GROUPS: Mapping[str, tuple[str, ...]] = {
    "Model": (
        *("model", "tokenizer", "seq", "width", "layers", "heads", "checkpoint_blocks"),
        *("lora_rank", "lora_alpha", "lora_targets", "lora_dropout"),
    ),
    "Data": ("data", "task", "eval_data", "eval_every"),
    "Learning": (
        *("optimizer", "lr", "schedule", "warmup", "weight_decay", "max_grad_norm", "batch"),
        *("accumulate", "exchange", "steps", "epochs", "minutes", "seed"),
    ),
    "Budgets": ("device", "hbm", "host", "nvme", "nvme_bytes", "pinned"),
    "How it computes": (
        *("precision", "keep_fp32", "frozen", "keep_exact", "activations", "micro_batch", "tile"),
        *("fused_loss", "units", "chunk_bytes"),
    ),
    "Several ranks": (
        "mesh",
        "pipeline",
        "stages_per_rank",
        "sum_group",
        "gather_shares",
        "timeout_seconds",
    ),
    "Files": ("config", "save_dir", "save_every", "keep", "resume", "out", "track", "record"),
    "Planning": ("dry_run", "profile"),
}
TRAIN_EXAMPLES = (
    "hetero train                       # the demo: no GPU, no download",
    "hetero train --model ./llama --data corpus/ --hbm 20GiB --out ./trained",
    "hetero train --model ./llama --data chats.jsonl --task sft --lora-rank 16",
    "hetero train --config run.toml --lr 1e-5 --dry-run --profile rtx4090",
    "hetero train --resume              # goes on with the last run",
)
PLAN_EXAMPLES = (
    "hetero plan llama-3-8b --profile rtx4090 --precision bf16 --nvme .",
    "hetero plan ./model/config.json --profile h100-sxm --batch 8 --sequence 4096",
    "hetero plan mymodels:small --profile rtx3090 --hbm 10G",
    "hetero plan bloom-176b --mesh pp=12,tp=4,dp=8 --batch 256 --micro-batch 2 --profile a100-80",
    "hetero plan bloom-176b --ranks 384 --search --batch 2048 --precision bf16 --profile a100-80",
)


class SizeType(StringParamType):
    """A size as people type it; settings are checked together, when all are known."""

    name = "size"


class DeviceName(Choice):
    """A kind of device; which one of a kind, the environment says."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return a kind; a GPU by its number is told how to choose it."""
        if str(value).startswith("cuda:"):
            kinds = ", ".join(map(repr, self.choices))
            self.fail(
                f"{value!r} is not one of {kinds}; CUDA_VISIBLE_DEVICES=1 chooses a GPU", param, ctx
            )
        return super().convert(value, param, ctx)


class ModelName(StringParamType):
    """A model to plan; the message without one lists the published names."""

    name = "model"

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None) -> str:
        """Return the names that there are."""
        return f"Published ones: {', '.join(PRESETS)}; or a config.json, or module:function."

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the published names that begin so."""
        return [CompletionItem(name) for name in PRESETS if name.startswith(incomplete)]


class Commands(click.Group):
    """Commands in the order in which people need them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return their names."""
        return sorted(self.commands, key=(*ORDER, *self.commands).index)


class GroupedCommand(click.Command):
    """Options in groups of help, and examples at its end.

    Args:
        groups: names of options by title.
        examples: command lines.
    """

    def __init__(
        self,
        *args: Any,
        groups: Mapping[str, Iterable[str]] | None = None,
        examples: Iterable[str] = (),
        **others: Any,
    ) -> None:
        super().__init__(*args, **others)
        self.groups = {title: tuple(names) for title, names in (groups or {}).items()}
        self.examples = tuple(examples)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse; of words that stand alone where none may, say which options take such words."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            if self.name != "train" or "unexpected extra argument" not in error.message:
                raise
            raise click.UsageError(f"{error.message}. {WORDS_OF_TRAIN}", ctx) from error

    def title_of(self, param: click.Parameter) -> str:
        """Return the title above an option."""
        found = (title for title, names in self.groups.items() if param.name in names)
        return next(found, OTHERS if self.groups else "Options")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write options by group, then what a size is, then the examples."""
        rows: dict[str, list[tuple[str, str]]] = {title: [] for title in self.groups}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                rows.setdefault(self.title_of(param), []).append(record)
        for title, records in rows.items():
            with formatter.section(title):
                formatter.write_dl(records)
        if any(isinstance(param.type, SizeType) for param in self.params):
            formatter.write_paragraph()
            formatter.write_text(SIZES_TEXT)
        if self.examples:
            with formatter.section("Examples"):
                formatter.write("".join(f"  {line}\n" for line in self.examples))
