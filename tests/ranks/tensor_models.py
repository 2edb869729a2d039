"""Tensor parallel models, and their training by plain torch and by hetero on the same ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import hetero
from tests.ranks.models import ADDING, OPTIMIZERS, WHOLE

WORDS, WIDTH = 20, 16
TIGHT = {"device": "cpu:sim", "hbm": 26_000, "chunk_bytes": 1024}
Clip = Callable[[Iterable[nn.Parameter], float], torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


class LM(nn.Module):
    def __init__(self, n_blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(n_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class TensorRun:
    """What a run does."""

    style: str = "tp"
    """"tp", "sequence" (norms on parts of the sequence), or "vocabulary" (that, and the loss)."""
    optimizer: str = "adamw"
    steps: int = 5
    passes: int = 1
    clip: float | None = None
    settings: Mapping[str, Any] = field(default_factory=lambda: TIGHT)
    frozen: tuple[int, ...] = ()
    dp: int = 1
    """Ranks that have other batches; those of a tensor follow each other."""


def mesh_of(run: TensorRun) -> Any:
    """Return the mesh of this rank's tensors."""
    n_ranks = torch.distributed.get_world_size()
    names = ("dp_shard", "tp")
    return init_device_mesh("cpu", (run.dp, n_ranks // run.dp), mesh_dim_names=names)["tp"]


def plan_of(style: str, n_blocks: int) -> dict[str, Any]:
    blocks = [f"blocks.{number}" for number in range(n_blocks)]
    if style == "tp":
        plan = {f"{block}.up": ColwiseParallel() for block in blocks}
        return {**plan, **{f"{block}.down": RowwiseParallel() for block in blocks}}
    local = style != "vocabulary"
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=Shard(1),
            output_layouts=Replicate() if local else Shard(-1),
            use_local_output=local,
        ),
    }
    for block in blocks:
        plan[f"{block}.norm"] = SequenceParallel()
        plan[f"{block}.up"] = ColwiseParallel(input_layouts=Shard(1))
        plan[f"{block}.down"] = RowwiseParallel(output_layouts=Shard(1))
    return plan


def built(run: TensorRun) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = LM()
    parallelize_module(model, mesh_of(run), plan_of(run.style, len(model.blocks)))
    for number in run.frozen:
        model.blocks[number].requires_grad_(False)
    trained = [param for param in model.parameters() if param.requires_grad]
    return model, {**OPTIMIZERS, **ADDING, **WHOLE}[run.optimizer](trained)


def loss_of(model: nn.Module, run: TensorRun, micro: int, dp_rank: int = 0) -> torch.Tensor:
    source = torch.Generator().manual_seed(1000 * micro + dp_rank)
    words = torch.randint(0, WORDS, (3, 4), generator=source)
    then = torch.randint(0, WORDS, (3, 4), generator=source)
    out = model(words).float()
    return nn.functional.cross_entropy(out.flatten(0, 1), then.flatten())


def around(run: TensorRun) -> AbstractContextManager[Any]:
    """Return the block in which losses and backward passes are."""
    return loss_parallel() if run.style == "vocabulary" else nullcontext()


@dataclass
class Trained:
    """What a run came to on one rank: each tensor whole."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    states: dict[int, dict[str, torch.Tensor]]
    status: Any = None


def by_torch(run: TensorRun) -> Trained:
    model, optimizer = built(run)
    return train(model, optimizer, run, torch_clip)


def by_hetero(run: TensorRun, **settings: Any) -> Trained:
    """Train with hetero; the plain model that is released in the end has the same numbers."""
    model, plain = built(run)
    model, optimizer = hetero.prepare(model, plain, **{**run.settings, **settings})

    def clip(_: Iterable[nn.Parameter], most: float) -> torch.Tensor:
        return optimizer.clip_grad_norm_(most)

    found = train(model, optimizer, run, clip)
    found.status = hetero.status(model)
    _, plain = hetero.release(model, optimizer)
    after = found_in(model, plain)
    assert not differing(found.weights, after.weights)
    assert not any(differing(state, after.states[n]) for n, state in found.states.items())
    return found


def micro_batches_by_torch(run: TensorRun) -> Trained:
    """Train on the ranks of one tensor, with the micro-batches of all that have other ones."""
    model, optimizer = built(run)
    norms = []
    for step in range(run.steps):
        for micro in range(step * run.passes, (step + 1) * run.passes):
            for dp in range(run.dp):
                with around(run):
                    (loss_of(model, run, micro, dp) * (1 / run.dp)).backward()
        if run.clip is not None:
            norms.append(float(torch_clip(model.parameters(), run.clip)))
        optimizer.step()
        optimizer.zero_grad()
    found = found_in(model, optimizer)
    found.norms = norms
    return found


def masters_by_torch(run: TensorRun) -> Trained:
    """Train fp32 masters with gradients of a bf16 model, which shows them rounded.

    The rule is SGD with momentum, each product and sum rounded by itself.
    """
    (masters, _), (model, _) = built(run), built(run)

    def loss(micro: int) -> torch.Tensor:
        with around(run):
            found = loss_of(model, run, micro)
            found.backward()
        return found

    return train_masters(masters, model, loss, run.steps, run.passes, run.clip)


def train_masters(
    masters: nn.Module,
    model: nn.Module,
    loss_after_backward: Callable[[int], torch.Tensor],
    steps: int,
    passes: int,
    clip: float | None,
    scale: LossScale | None = None,
) -> Trained:
    """Train masters with the gradients of a model of the same weights, in bf16, or in fp16 of a
    scaled loss: a step is skipped if any rank's part of a gradient is not finite."""
    moments: dict[int, torch.Tensor] = {}
    model.to(torch.float16 if scale else torch.bfloat16)
    losses, norms = [], []
    for step in range(steps):
        with torch.no_grad():
            for param, master in zip(model.parameters(), masters.parameters(), strict=True):
                inside(param).copy_(inside(master) if scale else rounded(inside(master)))
        for micro in range(step * passes, (step + 1) * passes):
            losses.append(float(whole(loss_after_backward(micro).detach())))
            for param, master in zip(model.parameters(), masters.parameters(), strict=True):
                assert param.grad is not None
                grad = param.grad.float()
                grad = grad * (1 / scale.value) if scale else grad
                master.grad = grad if master.grad is None else master.grad + grad
                param.grad = None
        if clip is not None:
            norms.append(float(torch_clip(masters.parameters(), clip)))
        if scale and not all_finite(masters):
            scale.value *= 0.5
            masters.zero_grad()
            continue
        with torch.no_grad():
            for number, master in enumerate(masters.parameters()):
                grad = inside(as_placed(master.grad, master))
                moment = grad if number not in moments else moments[number] * 0.9 + grad
                moments[number] = moment.clone()
                inside(master).add_(moment * -0.1)
                master.grad = None
    return Trained(losses, norms, weights_of(masters), {})


@dataclass
class LossScale:
    """The factor of the next loss."""

    value: float = 2.0**16


def all_finite(model: nn.Module) -> bool:
    """Whether all gradients are, on all ranks."""
    grads = [inside(param.grad) for param in model.parameters() if param.grad is not None]
    found = torch.tensor(float(all(bool(grad.isfinite().all()) for grad in grads)))
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MIN)
    return bool(found)


def rounded(master: torch.Tensor) -> torch.Tensor:
    """Return the working weight of a master: nearest, ties away from zero."""
    bits = master.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    high = ((bits + 0x8000) >> 16) & 0xFFFF
    return torch.where(high >= 0x8000, high - 0x10000, high).to(torch.int16).view(torch.bfloat16)


def as_placed(grad: Any, param: torch.Tensor) -> torch.Tensor:
    """Return a gradient with the placements of its parameter."""
    placements = getattr(param, "placements", None)
    found: torch.Tensor = grad if placements is None else grad.redistribute(placements=placements)
    return found


def inside(tensor: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found.detach()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    run: TensorRun,
    clip: Clip | None = None,
    *,
    dp: int = 0,
    first: int = 0,
) -> Trained:
    losses, norms = [], []
    for step in range(first, first + run.steps):
        for micro in range(step * run.passes, (step + 1) * run.passes):
            with around(run):
                loss = loss_of(model, run, micro, dp)
                loss.backward()
            losses.append(float(whole(loss.detach())))
        if run.clip is not None and clip is not None:
            norms.append(float(clip(model.parameters(), run.clip)))
        optimizer.step()
        optimizer.zero_grad()
    found = found_in(model, optimizer)
    found.losses, found.norms = losses, norms
    return found


def torch_clip(params: Iterable[nn.Parameter], most: float) -> torch.Tensor:
    """Clip as trainers do with torch, which refuses to mix meshes: under one norm of all."""
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for param in params:
        if param.grad is not None:
            by_mesh.setdefault(getattr(param, "device_mesh", None), []).append(param)
    grads = [[param.grad for param in group] for group in by_mesh.values()]
    totals = [whole(nn.utils.get_total_norm(group)) for group in grads]
    total = totals[0] if len(totals) == 1 else torch.linalg.vector_norm(torch.stack(totals))
    for group in by_mesh.values():
        nn.utils.clip_grads_with_norm_(group, most, total)
    return total


def found_in(model: nn.Module, optimizer: torch.optim.Optimizer) -> Trained:
    states = {
        number: {k: whole(v).clone() for k, v in state.items() if isinstance(v, torch.Tensor)}
        for number, state in optimizer.state_dict()["state"].items()
    }
    return Trained([], [], weights_of(model), states)


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(value).clone() for name, value in model.state_dict().items()}


def whole(value: torch.Tensor) -> torch.Tensor:
    gather = getattr(value, "full_tensor", None)
    found: torch.Tensor = value if gather is None else gather()
    return found.detach()


def differing(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors whose bits differ, or that one side lacks."""
    odd = [*(one.keys() ^ other.keys())]
    return odd + [k for k in one if k in other and not torch.equal(one[k], other[k])]


def difference(found: Trained, expected: Trained) -> list[str]:
    """Return in what two runs differ."""
    odd = differing(found.weights, expected.weights)
    for number in expected.states.keys() | found.states.keys():
        there, here = found.states.get(number, {}), expected.states.get(number, {})
        odd += [f"state {number} {key}" for key in differing(there, here)]
    if found.losses != expected.losses:
        odd.append(f"losses {found.losses} {expected.losses}")
    if found.norms != expected.norms:
        odd.append(f"norms {found.norms} {expected.norms}")
    return odd


TINY: dict[str, int] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""Of models of transformers."""


def tiny_llama(**changes: int) -> Any:
    """Return a Llama of transformers, the same one on all ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**TINY, "intermediate_size": 64, **changes}))


def tiny_mixtral() -> Any:
    """Return a mixture of experts of transformers, the same one on all ranks."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    experts = {"intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(**TINY, **experts))
