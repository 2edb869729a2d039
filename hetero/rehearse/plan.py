"""`hetero.plan`: the memory and the time of a training run, before it runs (floor 4)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hetero.config import Config, Settings, parse_bytes
from hetero.errors import ConfigError
from hetero.internals import tree_iter
from hetero.parallel.mesh import refuse_stages
from hetero.plan.division import Hbm
from hetero.plan.machine import Dtype, MachineProfile
from hetero.plan.weighing import Copies
from hetero.rehearse.attempts import (
    BUDGETS,
    Fitted,
    Shortfall,
    budget,
    has_one_ram,
    in_words,
    ram_beside,
    until_it_fits,
)
from hetero.rehearse.mirror import ranks_of
from hetero.rehearse.models import Described, describe
from hetero.rehearse.named import ModelConfig, machine
from hetero.rehearse.rehearsal import (
    PlainStep,
    Rehearsal,
    Scene,
    plain_step,
    set_apart,
)
from hetero.rehearse.several import several_gpus
from hetero.rehearse.stand_in import device_for, update_seconds
from hetero.rehearse.twin import batch_twin, twin_of
from hetero.rehearse.variants import adapted, named
from hetero.rehearse.whatif import ENDLESS, Baseline, on_its_clock, what_if, without_hetero
from hetero.report.examine import PREDICTED, WHATIF, examine
from hetero.report.measure import NS, Measured, Summary, measure, summarize
from hetero.report.peaks import Peak
from hetero.report.run import Run
from hetero.report.views import REHEARSED, Sidecar, WhatIf
from hetero.train.engine.budget import paging_bytes
from hetero.train.engine.hbm_homes import movable_homes
from hetero.train.engine.lacking import lacking, refuse_lacking
from hetero.train.engine.spill import passing_bytes
from hetero.train.engine.tradeoff import traffic_of
from hetero.train.update.trial import check_optimizer
from hetero.types import Kind, Lane, Tier, format_bytes

DTYPE: dict[str, Dtype] = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}


@dataclass(frozen=True, slots=True)
class TierPlan:
    """A tier, as planned; if something is short, as it would be with enough."""

    tier: str
    budget_bytes: int | None
    peak_bytes: int
    kinds: dict[str, int]
    """The most bytes of each kind; their peaks may be at different times."""
    at_peak: dict[str, int]
    """Bytes of each category when the tier held most; they add up to ``peak_bytes``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A plan; everything but ``fits`` and ``shortfalls`` is of a run that fits."""

    model: str
    n_params: int
    profile: str
    fits: bool
    shortfalls: tuple[Shortfall, ...]
    tiers: tuple[TierPlan, ...]
    step_seconds: float
    start_seconds: float | None
    """Of page-locking RAM and moving weights there, spread over `prepare` and the first step; None
    where the profile does not say how long it takes."""
    first_step_seconds: float
    tokens: int
    """Of a step; samples if there are no tokens."""
    tokens_per_second: float
    bottleneck: str
    shares: dict[str, float]
    """Seconds of a step by use."""
    disk_write_bytes: int
    """Per step."""
    drive_life_steps: float | None
    """Steps until the drives' endurance, or that of a usual drive where the profile does not say
    it, is spent; None: nothing is written."""
    policies: dict[str, int]
    """How many units have each policy."""
    settings: dict[str, Any]
    """For `hetero.prepare`."""
    what_if: tuple[WhatIf, ...]
    mfu: float | None
    """Part of the peak rate that the plain model's matrix products make; None without a peak."""
    checks: tuple[()] = ()
    """None since closed forms went; readers of version 0.1 look for them."""
    rehearsal: Rehearsal = field(repr=False)
    """Its ``run`` may be given to `hetero.report`."""

    @property
    def paste(self) -> str:
        """The line for a training script."""
        given = "".join(f", {key}={value!r}" for key, value in self.settings.items())
        return f"model, optimizer = hetero.prepare(model, optimizer{given})"

    def write(self, path: str | Path) -> None:
        """Write the report of the rehearsal as HTML, with estimates of other settings."""
        examine(self.rehearsal.run, Sidecar(whatif=self.what_if)).write(path)

    def write_beside(self, directory: str | Path) -> None:
        """Write the plan into the directory of a run, for its report to compare."""
        folder = Path(directory)
        predicted = summarize(measure(self.rehearsal.run)).as_json()
        (folder / PREDICTED).write_text(json.dumps(predicted, indent=1))
        rows = [asdict(row) for row in self.what_if]
        (folder / WHATIF).write_text(json.dumps(rows, indent=1))

    def as_json(self) -> dict[str, Any]:
        """Return all but the rehearsal as JSON-ready data."""
        data = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "rehearsal"}
        for name in ("shortfalls", "tiers", "what_if"):
            data[name] = [asdict(row) for row in data[name]]
        return {**data, "paste": self.paste}


def plan(
    model_or_config: nn.Module | ModelConfig,
    batch: Any = None,
    *,
    optimizer: torch.optim.Optimizer | str | None = None,
    lora_rank: int | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    config: Settings = None,
    estimates: bool = True,
    **settings: Any,
) -> Plan:
    """Find out the memory and the time of training, without the hardware and the weights.

    The library itself trains a twin of the model without bytes, for a few steps, on the clock of a
    hardware profile.

    Args:
        model_or_config: a module (real, or on the meta device); the name of a published model
            (``"llama-3-8b"``); a Hugging Face config, as an object or a mapping, its file or
            directory; or ``"package.module:function"``, which returns a module, or a module and its
            batch.
        batch: the model's arguments: a mapping of keyword arguments, a sequence of positional ones,
            or one tensor. For a Hugging Face model it may be ``(samples, positions)``; None: one
            sample of 1024.
        optimizer: over the module's parameters, or the name of one (``"adamw8bit"``); None: AdamW.
        lora_rank: plan low-rank adapters of this rank (PEFT) at all linear modules, and the model
            frozen (``frozen="nf4"``: in four bits); None: it is trained as it is.
        loss: makes a scalar of the model's output; None: its ``loss``, its first scalar, or the sum
            of its first tensor.
        config: a `Config`, a mapping, or a TOML or YAML file; ``settings`` go on top.
        estimates: whether to estimate other settings.
        settings: as for `hetero.prepare`; ``profile`` names the machine (`hetero calibrate`).
            ``mesh={"dp_shard": N}`` plans one of N ranks on it.

    Raises:
        ConfigError: a setting cannot be honoured, the model or the optimizer computes by its
            numbers, or `prepare` refuses the optimizer.

    Example:
        >>> import torch, hetero
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64))
        >>> found = hetero.plan(model, torch.ones(8, 64), profile="rtx4090", estimates=False)
        >>> found.fits
        True
    """
    known = Config.load(config, **settings)
    profile = machine(known)
    refuse_stages(known.mesh, "hetero.plan of a module", "use `hetero plan NAME --mesh ...`")
    described = describe(model_or_config, batch, plain=lora_rank is None)  # PEFT knows its own
    if lora_rank is not None:
        described = replace(described, model=adapted(described.model, lora_rank, optimizer))
    if isinstance(optimizer, str):
        optimizer = named(optimizer, described.model)
    scene = scene_of(described, optimizer, loss, known, profile)
    estimates = estimates and ranks_of(known.mesh, profile).size == 1  # they are of one rank
    with set_apart():
        return drawn(scene, described, until_it_fits(scene), estimates)


def scene_of(
    described: Described,
    optimizer: torch.optim.Optimizer | None,
    loss: Callable[[Any], torch.Tensor] | None,
    config: Config,
    profile: MachineProfile,
) -> Scene:
    """Return the scene to rehearse; ConfigError for an optimizer that `prepare` refuses."""
    twin = twin_of(described.model, optimizer)
    if twin.optimizer is not None:
        check_optimizer(twin.optimizer)
    refuse_lacking([lacking(twin.model, twin.optimizer, config)])
    trained = [p for p in twin.model.parameters() if p.requires_grad]
    return Scene(
        model=twin.model,
        optimizer=twin.optimizer or torch.optim.AdamW(trained),
        args=batch_twin(described.args),
        kwargs=batch_twin(described.kwargs),
        loss=loss or scalar_of,
        config=config,
        profile=profile,
    )


def scalar_of(output: Any) -> torch.Tensor:
    """Return the scalar that a training loop would most likely minimise."""
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    tensors = [named] if named is not None else list(tree_iter(output))
    found = [t for t in tensors if isinstance(t, torch.Tensor) and t.requires_grad]
    if not found:
        raise ConfigError(
            "the model returns nothing that leads back to its parameters",
            advice="pass loss=, a function of what the model returns",
        )
    return next((t for t in found if t.numel() == 1), None) or found[0].float().sum()


# -- the plan of it ------------------------------------------------------------------------------


def drawn(
    scene: Scene,
    described: Described,
    fitting: Fitted,
    estimates: bool,
) -> Plan:
    """Return the plan of a rehearsal that fits."""
    found, config, shortfalls = fitting
    tokens = tokens_of(scene)
    needed = {row.tier: row.needed_bytes for row in shortfalls}
    found = replace(found, run=with_limits(scene, found, needed, tokens))
    measured = measure(found.run)  # all figures are those of the plan's page
    summary = summarize(measured)
    step_seconds, life = measured.step_seconds, measured.drive_life
    paged = as_paged(scene, found) if estimates and not found.units else found
    peak_flops = peak_of(scene)
    plain = plain_step(scene, found.blueprint) if estimates or peak_flops is not None else None
    rows: Sequence[WhatIf] = ()
    if estimates:
        limits = measured.meta.budgets
        rows = estimates_of(scene, described, paged, needed, limits, plain, stays=not found.units)
        rows = [*rows, *several_gpus(scene, tokens)]
    return Plan(
        model=described.name,
        n_params=sum(p.numel() for p in scene.model.parameters()),
        profile=scene.profile.name,
        fits=not shortfalls,
        shortfalls=shortfalls,
        tiers=tuple(tier_plan(found, peak) for peak in measured.peaks.values()),
        step_seconds=step_seconds,
        start_seconds=start_seconds(scene, found),
        first_step_seconds=measured.steps.all[0].wall_ns / NS,
        tokens=tokens,
        tokens_per_second=tokens / step_seconds if step_seconds else 0.0,
        bottleneck=bottleneck(summary),
        shares=summary.time,
        disk_write_bytes=round(summary.traffic.disk_write_bytes),
        drive_life_steps=None if life is None else life.steps,
        policies=dict(Counter(found.policies.values())),
        settings=settings_of(config),
        what_if=(as_rehearsed(measured, shortfalls, tokens), *rows),
        mfu=mfu_of(plain, step_seconds, peak_flops),
        rehearsal=found,
    )


def start_seconds(scene: Scene, found: Rehearsal) -> float | None:
    """Return the time of page-locking what was, and of copying the weights into it."""
    host = scene.profile.host
    if not found.locked_bytes:
        return 0.0
    if host.lock_bytes_per_second is None:
        return None
    weights = 2 * sum(bucket.home_bytes for bucket in found.blueprint.layout.buckets)
    locking = found.locked_bytes / host.lock_bytes_per_second.value
    return locking + weights / host.dram_bytes_per_second.value


def with_limits(scene: Scene, found: Rehearsal, needed: Mapping[str, int], tokens: int) -> Run:
    """Return the rehearsed run with the limits of all its tiers: its budgets, or the machine's."""
    meta = found.run.meta
    budgets = {
        name: meta.budgets.get(name) or needed.get(name) or budget(scene, field)
        for name, field in BUDGETS.items()
    }
    if scene.config.device == "cpu":  # it and HBM are one RAM
        budgets["HBM"] = meta.budgets.get("HBM")
    if has_one_ram(scene):
        budgets["HOST"] = meta.budgets.get("HOST") or ram_beside(scene, budgets["HBM"])
    return replace(found.run, meta=replace(meta, budgets=budgets, step_tokens=tokens))


def tier_plan(found: Rehearsal, peak: Peak) -> TierPlan:
    tier = Tier[peak.tier]
    kinds = {kind.value: found.kinds[tier, kind] for kind in Kind if found.kinds[tier, kind]}
    return TierPlan(peak.tier, peak.budget_bytes, peak.n_bytes, kinds, dict(peak.categories))


def tokens_of(scene: Scene) -> int:
    """Return the tokens of a batch: of its first tensor of whole numbers, or its samples."""
    tensors = [t for t in tree_iter((scene.args, scene.kwargs)) if isinstance(t, torch.Tensor)]
    whole = [t for t in tensors if not t.dtype.is_floating_point]
    if whole:
        return whole[0].numel()
    return tensors[0].shape[0] if tensors and tensors[0].dim() else 1


def bottleneck(summary: Summary) -> str:
    """Return the part of a step that takes most time."""
    return max(summary.time, key=lambda part: summary.time[part]).removesuffix("_seconds")


def settings_of(config: Config) -> dict[str, Any]:
    """Return the settings that are not defaults.

    The profile is among them: with it a run takes policies to cost as much as here.
    """
    values = {f.name: getattr(config, f.name) for f in fields(Config)}
    plain = {f.name: f.default for f in fields(Config)}
    given = {k: v for k, v in values.items() if v != plain[k]}
    sizes = {key: shown(n) for key, n in given.items() if key in BUDGETS.values()}
    return {**given, **sizes}


def shown(n_bytes: int) -> str | int:
    """Return a size as people write it, where that is exact."""
    text = format_bytes(n_bytes).replace(" ", "")
    return text if parse_bytes(text) == n_bytes else n_bytes


def estimates_of(
    scene: Scene,
    described: Described,
    paged: Rehearsal,
    needed: Mapping[str, int],
    limits: Mapping[str, int | None],
    plain: PlainStep | None,
    *,
    stays: bool,
) -> Sequence[WhatIf]:
    """Return estimates of other settings; of a model that ``stays``, as if it were paged."""
    if not paged.units:
        return ()
    baseline = baseline_of(scene, paged, needed, limits, stays=stays)
    rehearsed = paged.run.meta.budgets.get("HBM") or paged.peaks[Tier.HBM]
    baseline = on_its_clock(baseline, paged.step_seconds, rehearsed)
    rows = what_if(baseline, described.samples, described.positions)
    if plain is None:
        return [*rows]
    return [without_hetero(baseline.hbm.total_bytes, plain, baseline.tokens), *rows]


def as_rehearsed(measured: Measured, shortfalls: Sequence[Shortfall], tokens: int) -> WhatIf:
    """Return the row of the plan itself, which is no estimate."""
    seconds, hbm = measured.step_seconds, measured.peaks.get("HBM")
    speed = tokens / seconds if seconds else 0.0
    peak = 0 if hbm is None else hbm.n_bytes
    said = in_words(shortfalls)
    return WhatIf("as planned", not shortfalls, peak, seconds, said, speed, REHEARSED)


def as_paged(scene: Scene, found: Rehearsal) -> Rehearsal:
    """Rehearse a model that stays with too little memory for that, to see what units leave."""
    less = paging_bytes(found.blueprint)
    config = replace(scene.config, hbm=less, device=scene.config.device or "cuda")
    if scene.profile.gpu is None:
        config = replace(config, device="cpu:sim")
    return until_it_fits(replace(scene, config=config)).found


def peak_of(scene: Scene) -> float | None:
    """Return the device's peak rate; None if a profile has none."""
    gpu = scene.profile.gpu
    peak = None if gpu is None else gpu.tflops.of(DTYPE[scene.config.precision])
    return None if peak is None else peak.value


def mfu_of(plain: PlainStep | None, seconds: float, peak_flops: float | None) -> float | None:
    """Return the part of the peak rate that a step makes; recomputation is left out."""
    if plain is None or peak_flops is None or not seconds:
        return None
    return plain.flops / seconds / peak_flops


def baseline_of(
    scene: Scene,
    found: Rehearsal,
    needed: Mapping[str, int],
    limits: Mapping[str, int | None],
    *,
    stays: bool,
) -> Baseline:
    """Return the figures of a rehearsal that estimates start from, within the plan's ``limits``.

    If the planned model ``stays``, all its homes may be on HBM, and frozen weights need none.
    """
    limit = None if "HBM" in needed else limits.get("HBM")  # else it was raised
    blueprint = found.blueprint
    trainable = [b for b in blueprint.layout.buckets if b.trainable]
    states = sum(b.numel * blueprint.costs[b.id].state for b in trainable)
    trained = sum(b.numel for b in trainable)
    pace = update_seconds(scene.profile, blueprint, trained) / max(trained, 1)
    limit = limit or budget(scene, "hbm") or found.peaks[Tier.HBM]
    homes = tuple(movable_homes(blueprint, is_cuda=False)) if stays else found.homes
    host = max(0, (budget(scene, "host") or 0) - passing_bytes(blueprint))
    frozen = sum(b.home_bytes for b in blueprint.layout.buckets if not b.trainable)
    return Baseline(
        units=found.units,
        traffic=traffic_of(blueprint.layout, homes, pace),
        homes=homes,
        early=scene.config.updates == "backward",
        is_auto=scene.config.activations == "auto",
        working_bytes=found.working_bytes,
        end_bytes=found.end_bytes,
        hbm=Hbm(
            *(limit, found.buffer_bytes, blueprint.least_bytes, blueprint.granule_bytes),
            units=blueprint.frames_of_units(),
        ),
        home_bytes=blueprint.home_bytes,
        state_bytes=states,
        numel=sum(b.numel for b in blueprint.layout.buckets),
        host_bytes=max(host, frozen) if stays else host,
        disk_bytes=(budget(scene, "nvme_bytes") or ENDLESS) if scene.config.nvme else 0,
        tokens=tokens_of(scene),
        profile=scene.profile,
        copies=copies_of(scene),
        needed=dict(needed),
    )


def copies_of(scene: Scene) -> Copies:
    """Return how long copies take on the scene's machine."""
    seconds = device_for(scene.config, scene.profile).copy_seconds
    return Copies(*(partial(seconds, lane) for lane in (Lane.H2D, Lane.D2H, Lane.D2D)))
