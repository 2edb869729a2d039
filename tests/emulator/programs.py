"""Programs that train, or run, on the emulated device: plain, and prepared."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hetero
from hetero.jobs import Worker
from hetero.train.engine.tuning import Tuning
from tests.campaigns.harness import VOCAB, Net, tokens_of
from tests.emulator import fake
from tests.emulator.harness import Program, Side, adamw, sgd
from tests.equivalence import test_micro_batch
from tests.equivalence.harness import MakeOptimizer, values

STEPS = 5
PROGRAMS: dict[str, tuple[Program, dict[str, Any]]] = {}


def program(**settings: Any) -> Callable[[Program], Program]:
    """Let a program run with these settings of the prepared side."""

    def enter(function: Program) -> Program:
        PROGRAMS[function.__name__] = function, settings
        return function

    return enter


def net(side: Side, make: MakeOptimizer = sgd, blocks: int = 6, **settings: Any) -> tuple[Any, Any]:
    torch.manual_seed(11)
    return side.prepare(Net(blocks), make, **settings)


def loss_of(model: nn.Module, number: int) -> Tensor:
    tokens = tokens_of(number).to(fake.PLACE)
    logits = model(tokens)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def train(side: Side, model: Any, optimizer: Any, steps: int = STEPS, first: int = 0) -> None:
    for number in range(first, first + steps):
        loss = loss_of(model, number)
        loss.backward()
        side.record(f"loss of step {number}", loss)
        side.close_step(model, optimizer, number)
    side.record_states(model, optimizer)


def trains(make: MakeOptimizer, **settings: Any) -> tuple[Program, dict[str, Any]]:
    return lambda side: train(side, *net(side, make)), settings


# -- where an update runs ----------------------------------------------------------------------

PROGRAMS["updates_without_threads"] = trains(adamw, tuning=Tuning(worker=Worker(0)))
PROGRAMS["updates_on_four_threads"] = trains(adamw, tuning=Tuning(worker=Worker(4)))
PROGRAMS["updates_by_torchs_blocks"] = trains(adamw, tuning=Tuning(native=False))
PROGRAMS["updates_streamed_through_the_device"] = trains(sgd, tuning=Tuning(update_on_device=True))
PROGRAMS["updates_that_begin_in_backward"] = trains(adamw, updates="backward")
PROGRAMS["no_look_ahead"] = trains(sgd, tuning=Tuning(depth=0))
PROGRAMS["a_single_access_of_look_ahead"] = trains(sgd, tuning=Tuning(depth=1))
PROGRAMS["what_leaves_first_is_wrong"] = trains(sgd, tuning=Tuning(victim=float))


@program()
def clipped_in_the_step(side: Side) -> None:
    model, optimizer = net(side, adamw, **({} if side.is_plain else {"max_grad_norm": 0.05}))
    for number in range(STEPS):
        loss_of(model, number).backward()
        if side.is_plain:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05, foreach=False)
        optimizer.step()
        optimizer.zero_grad()
        side.record(f"weights after step {number}", *values(model))


@program()
def accumulated_over_three_backwards(side: Side) -> None:
    model, optimizer = net(side, adamw)
    for number in range(STEPS):
        for part in range(3):
            (loss_of(model, 10 * number + part) / 3).backward()
        side.close_step(model, optimizer, number)
    side.record_states(model, optimizer)


@program(micro_batch=2, hbm="80KiB")
def slices_of_a_batch(side: Side) -> None:
    sliced(side, 2)


@program(micro_batch=1, hbm="80KiB")
def single_samples_of_a_batch(side: Side) -> None:
    sliced(side, 1)


def sliced(side: Side, size: int) -> None:
    torch.manual_seed(0)
    model, optimizer = side.prepare(test_micro_batch.make(), adamw)
    for number in range(STEPS):
        if side.is_plain:
            test_micro_batch.accumulated(model, number, size, fake.PLACE)
            optimizer.step()
            optimizer.zero_grad()
        else:
            test_micro_batch.one_step(model, optimizer, number, fake.PLACE)
        side.record(f"weights after step {number}", *values(model))


# -- the life of a prepared model --------------------------------------------------------------


@program()
def state_dicts_that_are_held(side: Side) -> None:
    """They show the weights of each step, and a write to one reaches the next forward."""
    model, optimizer = net(side)
    held = model.state_dict()
    train(side, model, optimizer, 3)
    side.record("what the state dict shows", *held.values())
    held["head.bias"].fill_(0.125)
    held["blocks.1.up.weight"].mul_(0.5)
    train(side, model, optimizer, 2, first=3)


@program()
def loaded_in_the_middle(side: Side) -> None:
    model, optimizer = net(side, adamw)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    train(side, model, optimizer, 3)
    model.load_state_dict(saved)
    train(side, model, optimizer, 2, first=3)


@program()
def written_under_gathered(side: Side) -> None:
    model, optimizer = net(side)
    train(side, model, optimizer, 2)
    block = model.blocks[2]
    with torch.no_grad():
        with nullcontext_or(side, hetero.gathered, block, write=True):
            block.up.weight.mul_(0.5)
        block.down.bias.add_(0.125)
    train(side, model, optimizer, 3, first=2)


def nullcontext_or(side: Side, what: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return contextlib.nullcontext() if side.is_plain else what(*args, **kwargs)


class Mlp(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


@program(hbm=40_000_000)  # each sees what is allocated for the other
def two_models_at_once(side: Side) -> None:
    """A GAN's loop: each has its own budget, and gradients of one pass through the other."""
    torch.manual_seed(3)
    maker, its = side.prepare(nn.Sequential(*(Mlp() for _ in range(4))), adamw)
    critic, others = side.prepare(nn.Sequential(*(Mlp() for _ in range(4))), adamw)
    for number in range(STEPS):
        noise = torch.randn(3, 32, generator=torch.Generator().manual_seed(number)).to(fake.PLACE)
        loss = critic(maker(noise).detach()).square().mean()
        loss.backward()
        side.record("loss of the critic", loss)
        side.close_step(critic, others, number)
        loss = (critic(maker(noise)) - 1).square().mean()
        loss.backward()
        side.record("loss of the maker", loss)
        side.close_step(maker, its, number)
        others.zero_grad()


@program()
def a_teacher_beside_it(side: Side) -> None:
    """Another model of the device, not prepared, is used in each step."""
    torch.manual_seed(5)
    teacher = fake.on_device(Net(4)).requires_grad_(False)
    model, optimizer = net(side, blocks=4)
    for number in range(STEPS):
        tokens = tokens_of(number).to(fake.PLACE)
        loss = F.mse_loss(model(tokens), teacher(tokens))
        loss.backward()
        side.record("loss", loss)
        side.close_step(model, optimizer, number)


@program()
def released_and_trained_on(side: Side) -> None:
    """After release the plain model and optimizer go on; prepared again, they do so, too."""
    model, optimizer = net(side)
    train(side, model, optimizer, 3)
    if not side.is_plain:
        model, optimizer = hetero.release(model, optimizer)
        model = fake.on_device(model)
        for state in optimizer.state.values():
            moved = {
                key: value.to(fake.PLACE) for key, value in state.items() if torch.is_tensor(value)
            }
            state.update(moved)
    train(side, model, optimizer, 2, first=3)
    if not side.is_plain:
        model, optimizer = side.prepared(model, optimizer)
    train(side, model, optimizer, 2, first=5)


@program()
def dropped_in_the_middle_of_a_step(side: Side) -> None:
    """A model goes between backward and step, without release; the next one trains."""
    model, optimizer = net(side)
    train(side, model, optimizer, 2)
    loss_of(model, 2).backward()
    side.models.clear()
    del model, optimizer
    gc.collect()
    train(side, *net(side), 3)


@program()
def evaluated_between_steps(side: Side) -> None:
    model, optimizer = net(side, adamw)
    for number in range(3):
        train(side, model, optimizer, 1, first=number)
        with torch.no_grad():
            side.record(f"evaluation {number}", loss_of(model, 50 + number))


# -- inference ---------------------------------------------------------------------------------


class Remembering(nn.Module):
    """A block that attends to all that it has seen."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
        q, *new = self.qkv(x).chunk(3, -1)
        if cache:
            new = [torch.cat([old, more], 1) for old, more in zip(cache, new, strict=True)]
        cache[:] = new
        keys, seen = cache
        weights = (q @ keys.transpose(1, 2)).softmax(-1)
        return x + self.out(weights @ seen)


class Generator(nn.Module):
    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32)
        self.blocks = nn.ModuleList(Remembering() for _ in range(layers))
        self.head = nn.Linear(32, VOCAB)

    def forward(self, tokens: Tensor, caches: list[list[Tensor]]) -> Tensor:
        x = self.embed(tokens)
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, cache)
        return self.head(x[:, -1])


@torch.no_grad()
def generated(side: Side) -> None:
    """Record a prefill and thirty tokens, without waits of the host between them."""
    torch.manual_seed(2)
    model: Any = Generator().eval()
    model = fake.on_device(model) if side.is_plain else side.prepared(model, None)
    caches: list[list[Tensor]] = [[] for _ in range(6)]
    logits = [model(tokens_of(1).to(fake.PLACE), caches)]
    for _ in range(30):
        logits.append(model(logits[-1].argmax(-1, keepdim=True), caches))
    side.record("logits", *logits)


PROGRAMS["a_cache_that_grows"] = generated, {"hbm": 300_000}
PROGRAMS["a_cache_that_grows_on_little_memory"] = generated, {"hbm": 100_000}


# -- failures ----------------------------------------------------------------------------------


class Boom(Exception):
    """On purpose."""


def boom(*_: Any) -> None:
    raise Boom


@contextlib.contextmanager
def hooked(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


FAILING: dict[str, Callable[[Any, Any], Any]] = {
    "before the model": lambda model, _: model.register_forward_pre_hook(boom),
    "before a unit": lambda model, _: model.blocks[2].register_forward_pre_hook(boom),
    "in a unit": lambda model, _: model.blocks[2].up.register_forward_hook(boom),
    "after a unit": lambda model, _: model.blocks[2].register_forward_hook(boom),
    "after the model": lambda model, _: model.register_forward_hook(boom),
    "before a unit's backward": (
        lambda model, _: model.blocks[3].register_full_backward_pre_hook(boom)
    ),
    "after a unit's backward": lambda model, _: model.blocks[3].register_full_backward_hook(boom),
    "at a gradient": lambda model, _: model.blocks[3].up.weight.register_hook(boom),
    "after a gradient": (
        lambda model, _: model.blocks[1].up.weight.register_post_accumulate_grad_hook(boom)
    ),
    "before a step": lambda _, optimizer: optimizer.register_step_pre_hook(boom),
    "after a step": lambda _, optimizer: optimizer.register_step_post_hook(boom),
}


def fail(side: Side, model: Any, optimizer: Any, where: str, number: int) -> None:
    """Run one step that raises."""
    raised = True
    with hooked(FAILING[where](model, optimizer)), contextlib.suppress(Boom):
        loss_of(model, number).backward()
        optimizer.step()
        raised = False
    side.record(f"whether it failed {where}", raised)
    optimizer.zero_grad()


def fails(where: str) -> Program:
    def run(side: Side) -> None:
        model, optimizer = net(side)
        for round in range(3):
            train(side, model, optimizer, 2, first=3 * round)
            fail(side, model, optimizer, where, 3 * round + 2)
        train(side, model, optimizer, 2, first=9)

    return run


for where in FAILING:
    for way in ("keep", "recompute", "offload"):
        PROGRAMS[f"failed_{where}_{way}".replace(" ", "_")] = fails(where), {"activations": way}
