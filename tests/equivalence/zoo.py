"""The models that must train unmodified, each with the loop a user would write for it.

A case builds a model, makes a batch from a generator, and runs the part of a step before
``optimizer.step()``; it sees only torch. The same functions run the plain and the prepared model.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

D = 16
VOCAB = 23


class Block(nn.Module):
    def __init__(self, d: int = D, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up = nn.Linear(d, 3 * d)
        self.down = nn.Linear(3 * d, d)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, layers: int = 6, *, tied: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D)
        self.place = nn.Parameter(torch.randn(7, D) * 0.1)
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def embedded(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens) + self.place

    def forward(self, tokens: Tensor) -> Any:
        x = self.embedded(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Reused(Stack):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedded(tokens)
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        return self.head(self.norm(x))


class Functional(Stack):
    """Parameters used without calling their module, inside and outside of units."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.embed.weight) + self.place
        for block, other in zip(self.blocks, [*self.blocks[1:], self.blocks[0]], strict=True):
            x = block(x)
            x = x + 0.1 * F.linear(F.linear(x, other.up.weight), other.up.weight.T)
        return F.linear(self.norm(x), self.embed.weight)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D)
        layer = nn.TransformerEncoderLayer(D, 4, 2 * D, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.attention = nn.MultiheadAttention(D, 4, batch_first=True)
        self.head = nn.Linear(D, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.encoder(self.embed(tokens))
        y, _ = self.attention(x, x, x, need_weights=False)
        return self.head(x + y)


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D)
        self.core = nn.Transformer(D, 4, 2, 2, 2 * D, dropout=0.0, batch_first=True)
        self.head = nn.Linear(D, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(self.core(x, x.flip(1)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D)
        self.lstm = nn.LSTM(D, D, num_layers=2, batch_first=True)
        self.gru = nn.GRU(D, D, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * D, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x, _ = self.lstm(self.embed(tokens))
        x, _ = self.gru(x)
        return self.head(x)


class Residual(nn.Module):
    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(a, b, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(b)
        self.short = nn.Sequential(nn.Conv2d(a, b, 1), nn.BatchNorm2d(b)) if a != b else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        return F.relu(y.add_(x if self.short is None else self.short(x)))


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layer1 = nn.Sequential(Residual(8, 8), Residual(8, 8))
        self.layer2 = nn.Sequential(Residual(8, 12), Residual(12, 12))
        self.head = nn.Linear(12, VOCAB)

    def forward(self, images: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.stem(images)))
        return self.head(x.mean((2, 3)))


class Experts(nn.Module):
    """Top-1 routing over experts, some of which get no token."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, 5)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        weight, choice = scores[..., :3].max(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mask = choice == i
            if mask.any():
                out[mask] = expert(x[mask]) * weight[mask].unsqueeze(-1)
        return x + out


class Mixture(Stack):
    def __init__(self) -> None:
        super().__init__(layers=2)
        self.blocks = nn.ModuleList(m for _ in range(3) for m in (Block(), Experts()))


class LayerDrop(Stack):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedded(tokens)
        for block in self.blocks:
            if torch.rand(()) > 0.4:
                x = block(x)
        return self.head(self.norm(x))


class DictOut(Stack):
    def forward(self, tokens: Tensor) -> dict[str, Any]:
        x = super().forward(tokens)
        return {"logits": x, "aux": (x.mean(), [x.std()])}


@dataclass
class Output:
    logits: Tensor
    hidden: Tensor


class TupleBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()
        self.bias = nn.Parameter(torch.zeros(D))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Output:
        y = self.inner(x) * scale
        return Output(logits=y + self.bias, hidden=y)


class DataclassOut(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TupleBlock() for _ in range(5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedded(tokens)
        for block in self.blocks:
            out = block(x, scale=0.9)
            x = out.logits + 0.1 * out.hidden
        return self.head(self.norm(x))


class InPlaceViews(Stack):
    """Units whose outputs are views, changed in place by the caller."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedded(tokens)
        for block in self.blocks:
            y = block(x).view(-1, D)
            y.mul_(0.5).add_(0.1)
            x = y.view_as(x)
        return self.head(self.norm(x))


class Latents(nn.Module):
    """A unit that returns a view of its own weight (the view outlives the access)."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(7, D))
        self.mix = nn.Linear(D, D)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.latents.expand(x.shape[0], -1, -1), self.mix(x)


class EscapedViews(Stack):
    def __init__(self) -> None:
        super().__init__(layers=4)
        self.sources = nn.ModuleList(Latents() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedded(tokens)
        views = []
        for source in self.sources:
            view, x = source(x)
            views.append(view)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x + sum(views)))


class Frozen(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        for i in (0, 2, 4):
            self.blocks[i].requires_grad_(False)
        self.blocks[1].up.requires_grad_(False)


class Tables(Stack):
    """Parameters that are not floats, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.order = nn.Parameter(torch.arange(D).flip(0), requires_grad=False)
        self.mask = nn.Parameter(torch.rand(D) > 0.3, requires_grad=False)
        self.register_buffer("scale", torch.rand(D))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedded(tokens)[..., self.order] * self.mask * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Checkpointed(Stack):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__(dropout=0.1)
        self.reentrant = reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedded(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


class InnerCheckpointBlock(Block):
    """A unit that checkpoints a part of itself."""

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.body, self.norm(x), use_reentrant=False)

    def body(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class InnerCheckpoint(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(InnerCheckpointBlock() for _ in range(6))


class SharedCheckpointed(Reused):
    """Blocks used twice under reentrant checkpointing: gradients arrive twice."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedded(tokens)
        for _ in range(2):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
        return self.head(self.norm(x))


class Scaled(torch.autograd.Function):
    """Saves a weight that its forward does not read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad * 2 + weight.mean(), weight * x.mean() * grad.sum()


class CustomFunction(Stack):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedded(tokens)
        for block in self.blocks:
            x = Scaled.apply(block(x), block.norm.weight)
        return self.head(self.norm(x))


class WritesInForward(Stack):
    """A model that clamps a weight in its own forward, as some GANs do."""

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            self.head.weight.clamp_(-0.2, 0.2)
            self.blocks[0].up.bias.data.clamp_(-0.05, 0.05)
        return super().forward(tokens)


class DoubleParams(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.double()


Step = Callable[["Loop"], list[Tensor]]


@dataclass
class Loop:
    """One side of a comparison: a model, its optimizer and the step's data."""

    model: nn.Module
    optimizer: Any
    data: Tensor
    number: int
    prepared: bool


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], nn.Module]
    step: Step
    data: Callable[[torch.Generator], Tensor]


def tokens(g: torch.Generator) -> Tensor:
    return torch.randint(0, VOCAB, (3, 7), generator=g)


def images(g: torch.Generator) -> Tensor:
    return torch.randn(3, 3, 6, 6, generator=g)


def loss_of(model: nn.Module, data: Tensor) -> Tensor:
    out = model(data)
    logits = out["logits"] if isinstance(out, dict) else out
    numbers = torch.arange(len(data), device=data.device)
    target = data if data.dtype == torch.long else numbers % VOCAB
    loss = F.cross_entropy(logits.flatten(0, -2), target.flatten())
    return loss + 0.1 * out["aux"][0] + 0.1 * out["aux"][1][0] if isinstance(out, dict) else loss


def plain_step(loop: Loop) -> list[Tensor]:
    loss = loss_of(loop.model, loop.data)
    loss.backward()
    return [loss]


def accumulate(loop: Loop) -> list[Tensor]:
    losses = []
    for k in range(3):
        loss = loss_of(loop.model, loop.data.roll(k, 0)) / 3
        loss.backward()
        losses.append(loss)
    return losses


def several_losses(loop: Loop) -> list[Tensor]:
    logits = loop.model(loop.data)
    first = F.cross_entropy(logits.flatten(0, -2), loop.data.flatten())
    second = logits.pow(2).mean()
    first.backward(retain_graph=True)
    second.backward()
    return [first, second]


def eval_between(loop: Loop) -> list[Tensor]:
    loop.model.eval()
    with torch.no_grad():
        before = loss_of(loop.model, loop.data.flip(1))
    loop.model.train()
    return [before, *plain_step(loop)]


def penalty(loop: Loop) -> list[Tensor]:
    loss = loss_of(loop.model, loop.data)
    loss = loss + 0.01 * sum(p.pow(2).sum() for p in loop.model.parameters())
    loss = loss + 0.01 * torch.cat([p.flatten() for p in loop.model.head.parameters()]).norm()
    loss.backward()
    return [loss]


def double_backward(loop: Loop) -> list[Tensor]:
    loss = loss_of(loop.model, loop.data)
    weights = [loop.model.head.weight, loop.model.blocks[1].up.weight]
    grads = torch.autograd.grad(loss, weights, create_graph=True)
    total = loss + 0.1 * sum(g.pow(2).sum() for g in grads)
    total.backward()
    return [loss, total]


def create_graph_step(loop: Loop) -> list[Tensor]:
    loss = loss_of(loop.model, loop.data)
    loss.backward(create_graph=True)
    extra = sum(p.grad.pow(2).sum() for p in loop.model.blocks[2].parameters())
    for p in loop.model.parameters():
        p.grad = p.grad.detach() if p.grad is not None else None
    extra.backward()
    return [loss, extra]


def clip_value(loop: Loop) -> list[Tensor]:
    losses = plain_step(loop)
    nn.utils.clip_grad_value_(loop.model.parameters(), 0.01)
    return losses


def clip_norm_by_torch(loop: Loop) -> list[Tensor]:
    losses = plain_step(loop)
    norm = nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)
    return [*losses, norm]


def clip_norm(loop: Loop) -> list[Tensor]:
    losses = plain_step(loop)
    if loop.prepared:
        return [*losses, loop.optimizer.clip_grad_norm_(0.1)]
    return [*losses, nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)]


def grads_edited(loop: Loop) -> list[Tensor]:
    losses = plain_step(loop)
    for p in loop.model.parameters():
        if p.grad is not None and p.grad.dim() > 1:
            p.grad[0] = 0.0
            p.grad.view(-1)[1:3].mul_(0.5)
            p.grad.data.add_(1e-3)
    loop.model.head.weight.grad = loop.model.head.weight.grad * 2
    kept = loop.model.blocks[0].up.weight.grad
    losses.append(kept.norm())
    return losses


def unscaled(loop: Loop) -> list[Tensor]:
    scaler = torch.amp.GradScaler(loop.data.device.type, init_scale=1024.0)
    loss = loss_of(loop.model, loop.data)
    scaler.scale(loss).backward()
    scaler.unscale_(loop.optimizer)
    return [loss]


def autocast(loop: Loop) -> list[Tensor]:
    with torch.autocast(loop.data.device.type, dtype=torch.bfloat16):
        loss = loss_of(loop.model, loop.data)
    loss.backward()
    return [loss]


def thawing(loop: Loop) -> list[Tensor]:
    loop.model.blocks[1].requires_grad_(loop.number % 2 == 0)
    loop.model.blocks[3].up.weight.requires_grad_(loop.number % 3 != 0)
    return plain_step(loop)


def user_hooks(loop: Loop) -> list[Tensor]:
    seen: list[Tensor] = []
    block = loop.model.blocks[2]
    handles = [
        block.register_forward_hook(lambda m, a, out: seen.append(m.up.weight.sum()) or out * 1.01),
        block.up.weight.register_hook(lambda g: g * 0.5),
        block.down.weight.register_post_accumulate_grad_hook(lambda p: None),
        loop.model.blocks[3].register_full_backward_hook(lambda m, gi, go: (gi[0] * 1.5,)),
    ]
    losses = plain_step(loop)
    for handle in handles:
        handle.remove()
    return [*losses, *seen]


def failing(loop: Loop) -> list[Tensor]:
    """An exception in forward, then one in backward, then a good step."""

    def boom(*_: Any) -> None:
        raise ArithmeticError("on purpose")

    handle = loop.model.blocks[3].up.register_forward_hook(boom)
    try:
        loss_of(loop.model, loop.data)
    except ArithmeticError:
        pass
    handle.remove()
    handle = loop.model.blocks[2].up.weight.register_hook(boom)
    try:
        loss_of(loop.model, loop.data).backward()
    except ArithmeticError:
        pass
    handle.remove()
    loop.model.zero_grad()
    return plain_step(loop)


def ema(loop: Loop) -> list[Tensor]:
    losses = plain_step(loop)
    average = [torch.zeros_like(p) for p in loop.model.parameters()]
    with torch.no_grad():
        for a, p in zip(average, loop.model.parameters(), strict=True):
            a.mul_(0.9).add_(p.detach(), alpha=0.1).add_(p.data)
    flat = nn.utils.parameters_to_vector(loop.model.parameters())
    return [*losses, *(a.norm() for a in average), flat.norm()]


def written_outside(loop: Loop) -> list[Tensor]:
    losses = plain_step(loop)
    with torch.no_grad():
        loop.model.blocks[1].up.weight.mul_(0.99)
        loop.model.blocks[2].up.weight.data.clamp_(-0.1, 0.1)
        loop.model.blocks[3].norm.weight[2:5] = 0.5
        loop.model.head.weight.copy_(loop.model.head.weight.flip(0))
    loop.model.blocks[4].down.bias.data = torch.full((D,), 0.25, device=loop.data.device)
    return losses


def random_drop(loop: Loop) -> list[Tensor]:
    random.seed(loop.number)
    return plain_step(loop)


def kept_views(loop: Loop) -> list[Tensor]:
    """A logger that keeps an alias of a weight over the step."""
    alias = loop.model.blocks[1].up.weight.detach()
    losses = plain_step(loop)
    loop.optimizer.step()
    return [*losses, alias.sum()]


CASES = [
    Case("tied", lambda: Stack(tied=True), plain_step, tokens),
    Case("untied", Stack, plain_step, tokens),
    Case("reused", Reused, plain_step, tokens),
    Case("functional", Functional, plain_step, tokens),
    Case("attention", Attention, plain_step, tokens),
    Case("encoder_decoder", EncoderDecoder, plain_step, tokens),
    Case("recurrent", Recurrent, plain_step, tokens),
    Case("convolutional", Convolutional, plain_step, images),
    Case(
        "channels_last",
        lambda: Convolutional().to(memory_format=torch.channels_last),
        clip_norm,
        lambda g: images(g).to(memory_format=torch.channels_last),
    ),
    Case("mixture", Mixture, plain_step, tokens),
    Case("layer_drop", LayerDrop, random_drop, tokens),
    Case("dict_out", DictOut, plain_step, tokens),
    Case("dataclass_out", DataclassOut, plain_step, tokens),
    Case("in_place_views", InPlaceViews, plain_step, tokens),
    Case("escaped_views", EscapedViews, plain_step, tokens),
    Case("frozen", Frozen, plain_step, tokens),
    Case("thawing", Stack, thawing, tokens),
    Case("tables", Tables, plain_step, tokens),
    Case("checkpoint", lambda: Checkpointed(reentrant=False), plain_step, tokens),
    Case("checkpoint_reentrant", lambda: Checkpointed(reentrant=True), plain_step, tokens),
    Case("checkpoint_inside", InnerCheckpoint, plain_step, tokens),
    Case("checkpoint_shared", SharedCheckpointed, plain_step, tokens),
    Case("custom_function", CustomFunction, plain_step, tokens),
    Case("writes_in_forward", WritesInForward, plain_step, tokens),
    Case("double", DoubleParams, plain_step, tokens),
    Case("dropout", lambda: Stack(dropout=0.2), plain_step, tokens),
    Case("accumulate", lambda: Stack(tied=True), accumulate, tokens),
    Case("several_losses", Stack, several_losses, tokens),
    Case("eval_between", lambda: Stack(dropout=0.2), eval_between, tokens),
    Case("penalty", Stack, penalty, tokens),
    Case("double_backward", Stack, double_backward, tokens),
    Case("create_graph", Stack, create_graph_step, tokens),
    Case("clip_value", Stack, clip_value, tokens),
    Case("clip_norm_by_torch", lambda: Stack(tied=True), clip_norm_by_torch, tokens),
    Case("clip_norm", lambda: Stack(tied=True), clip_norm, tokens),
    Case("grads_edited", Stack, grads_edited, tokens),
    Case("unscaled", Stack, unscaled, tokens),
    Case("autocast", Stack, autocast, tokens),
    Case("autocast_reused", Reused, autocast, tokens),
    Case("user_hooks", Stack, user_hooks, tokens),
    Case("failing", Stack, failing, tokens),
    Case("ema", Stack, ema, tokens),
    Case("written_outside", Stack, written_outside, tokens),
    Case("kept_views", Stack, kept_views, tokens),
]
BY_NAME = {case.name: case for case in CASES}
