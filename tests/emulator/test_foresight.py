"""A model whose states fit a CUDA device stays there, whether or not its activations fit."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hetero
from hetero.api import engine_of
from hetero.errors import OutOfMemory, StateError
from hetero.train.activations import proof
from hetero.train.engine import foresight
from hetero.types import Tier
from tests.campaigns.core_trials import Decays
from tests.campaigns.harness import VOCAB, Block, Net
from tests.emulator import fake
from tests.emulator.harness import adamw, sgd
from tests.equivalence.harness import MakeOptimizer, values

LENGTH = 64
PIECE = 2**14


@pytest.fixture(autouse=True)
def small(emulator: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests take as little, next to these activations, as they do next to real ones."""
    monkeypatch.setattr(proof, "PIECE", PIECE)
    monkeypatch.setattr(foresight, "DIGEST_BYTES", 2 * 8 * PIECE)


def tokens(number: int, samples: int) -> Tensor:
    drawn = torch.Generator().manual_seed(number)
    return torch.randint(0, VOCAB, (samples, LENGTH), generator=drawn).to(fake.PLACE)


def net(blocks: int = 6, block: Callable[[], nn.Module] = Block) -> nn.Module:
    torch.manual_seed(11)
    return Net(blocks, block=block)


def loss_of(model: Any, number: int, samples: int) -> Tensor:
    x = tokens(number, samples)
    return F.cross_entropy(model(x).flatten(0, 1), x.flatten())


def step(model: Any, optimizer: Any, number: int, sizes: Sequence[int] = (16,)) -> list[Tensor]:
    """Train one step of micro-batches; return the losses."""
    found = []
    for part, samples in enumerate(sizes):
        loss = loss_of(model, 100 * number + part, samples)
        loss.backward()
        found.append(loss.detach().cpu())
    optimizer.step()
    optimizer.zero_grad()
    return found


Steps = Sequence[Sequence[int]]


class Plain:
    """What plain torch makes of a program, on a device with room."""

    def __init__(
        self, steps: Steps, make: MakeOptimizer = adamw, build: Callable[[], nn.Module] = net
    ) -> None:
        model = fake.on_device(build())
        optimizer = make(model)
        fake.load().reset_peak()
        before = fake.allocated_bytes()
        self.losses = [step(model, optimizer, n, sizes) for n, sizes in enumerate(steps)]
        self.peak_bytes = fake.cuda().max_memory_allocated() - before
        self.weights = [value.cpu().clone() for value in values(model)]


def prepared(
    make: MakeOptimizer = adamw, build: Callable[[], nn.Module] = net, **settings: Any
) -> tuple[Any, Any]:
    gc.collect()
    model = build()
    device = fake.device()
    return hetero.prepare(model, make(model), device=device, chunk_bytes=4096, **settings)


def check(plain: Plain, model: Any, losses: list[list[Tensor]]) -> None:
    for left, right in zip(plain.losses, losses, strict=True):
        assert all(map(torch.equal, left, right))
    assert all(map(torch.equal, plain.weights, [value.cpu() for value in values(model)]))


def used(model: Any) -> set[str]:
    residence = engine_of(model).residence
    assert residence.name == "resident"
    return set(map(str, residence.activations.policies.values()))


def bracketed(model: nn.Module) -> list[str]:
    """Return the modules whose forward is not their own."""
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


# -- what gives way ------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.45, pytest.param(0.6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [adamw, pytest.param(sgd, marks=pytest.mark.slow)])
def test_activations_without_room_are_computed_again_and_the_bits_are_torchs(
    make: MakeOptimizer, share: float, watched: None
) -> None:
    plain = Plain([[16]] * 4, make)
    model, optimizer = prepared(make)
    losses, policies = [], set()
    with fake.limit(hbm=fake.allocated_bytes() + int(share * plain.peak_bytes)):
        for number in range(4):
            losses.append(step(model, optimizer, number))
            policies |= used(model)
    check(plain, model, losses)
    assert "recompute" in used(model) and "offload" in policies  # before it was proven


def test_a_budget_below_the_device_is_kept_to(watched: None) -> None:
    """`hbm=` means everything on the device, also of a model that stays."""
    plain = Plain([[16]] * 4)
    given = int(0.6 * plain.peak_bytes)
    model, optimizer = prepared(hbm=given)
    fake.load().reset_peak()
    losses = [step(model, optimizer, number) for number in range(4)]
    check(plain, model, losses)
    assert fake.cuda().max_memory_allocated() <= given and used(model) == {"keep", "recompute"}


def test_the_watch_ends_where_all_fits_and_begins_again_with_a_larger_batch(watched: None) -> None:
    steps = [[2]] * 10 + [[16]] * 3 + [[2]] * 4
    plain = Plain(steps)
    model, optimizer = prepared()
    losses = []
    with fake.limit(hbm=fake.allocated_bytes() + int(0.6 * plain.peak_bytes)):
        for number, sizes in enumerate(steps):
            losses.append(step(model, optimizer, number, sizes))
            is_watched = len(bracketed(model)) > 1
            assert is_watched == (number < 1 or 10 <= number < 15)
            # units of the first smaller batch are expected to leave as much as before
            assert (used(model) != {"keep"}) == (10 <= number < 14)
    check(plain, model, losses)
    assert bracketed(model) == [""]  # which looks at the size of a batch


@pytest.mark.slow
def test_accumulated_gradients_and_forwards_that_wait_find_room(watched: None) -> None:
    plain = Plain([[8, 16, 8]] * 4)
    model, optimizer = prepared()
    with fake.limit(hbm=fake.allocated_bytes() + plain.peak_bytes // 2):
        losses = [step(model, optimizer, number, [8, 16, 8]) for number in range(4)]
    check(plain, model, losses)
    assert "recompute" in used(model)


@pytest.mark.slow
def test_two_models_on_a_device_leave_each_other_room(watched: None) -> None:
    plain = Plain([[16]] * 4)
    pairs = [prepared(), prepared()]
    losses: list[list[list[Tensor]]] = [[], []]
    with fake.limit(hbm=fake.allocated_bytes() + plain.peak_bytes // 2):
        for number in range(4):
            for at, (model, optimizer) in enumerate(pairs):
                losses[at].append(step(model, optimizer, number))
    for (model, _), found in zip(pairs, losses, strict=True):
        check(plain, model, found)


@pytest.mark.slow
def test_masters_that_stay_are_watched_too(watched: None) -> None:
    def trained(share: float) -> tuple[list[Tensor], set[str]]:
        model, optimizer = prepared(sgd, precision="bf16")
        with fake.limit(hbm=fake.allocated_bytes() + int(share * peak_bytes)):
            for number in range(4):
                step(model, optimizer, number)
        return [value.cpu() for value in values(model)], used(model)

    peak_bytes = Plain([[16]], sgd).peak_bytes // 2  # of weights, and so activations, of 2 bytes
    (expected, kept), (found, policies) = trained(10), trained(0.6)
    assert all(map(torch.equal, expected, found))
    assert kept == {"keep"} and "recompute" in policies


class Counting(Block):
    """It scales by a number that no snapshot holds."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + next(self.numbers) / 1024)


@pytest.mark.slow
@pytest.mark.parametrize("block", [Counting, Decays])
def test_units_that_cannot_be_computed_again_go_down(
    watched: None, block: Callable[[], nn.Module]
) -> None:
    def build() -> nn.Module:
        return net(block=block)

    plain = Plain([[16]] * 4, build=build)
    model, optimizer = prepared(build=build)
    with fake.limit(hbm=fake.allocated_bytes() + int(0.7 * plain.peak_bytes)):
        losses = [step(model, optimizer, number) for number in range(4)]
        engine = engine_of(model)
        policies = {
            str(engine.residence.activations.policies[at])
            for at, unit in enumerate(engine.setup.blueprint.units)
            if isinstance(unit.module, (Counting, Decays))
        }
        assert policies == {"keep", "offload"}
    check(plain, model, losses)


# -- no room -------------------------------------------------------------------------------------


def refused(run: Callable[[], object]) -> OutOfMemory:
    with pytest.raises(OutOfMemory) as caught:
        run()
    assert not isinstance(caught.value, torch.OutOfMemoryError)
    return caught.value


@pytest.mark.parametrize("activations", ["keep", "auto"])
def test_what_finds_no_room_is_an_error_with_advice_and_weights_are_of_the_last_step(
    activations: str, watched: None
) -> None:
    plain = Plain([[4]] * 3)
    model, optimizer = prepared(activations=activations)
    losses = [step(model, optimizer, 0, [4])]
    with fake.limit(hbm=fake.allocated_bytes() + plain.peak_bytes // 2):
        error = refused(lambda: step(model, optimizer, 1, [64]))
        gc.collect()
    assert error.tier == "HBM" and error.needed_bytes > plain.peak_bytes // 2
    assert "hbm=" in error.advice and ("activations='auto'" in error.advice) == (
        activations == "keep"
    )
    optimizer.zero_grad()
    losses += [step(model, optimizer, number, [4]) for number in (1, 2)]
    check(plain, model, losses)


def test_a_lack_of_room_in_backward_is_an_error_too_and_the_next_step_gives_way(
    watched: None,
) -> None:
    plain = Plain([[8]] * 4)
    model, optimizer = prepared()
    losses = [step(model, optimizer, number, [8]) for number in range(3)]
    assert bracketed(model) == [""]
    loss = loss_of(model, 300, 8)
    with fake.limit(hbm=fake.allocated_bytes() + 4096):
        error = refused(loss.backward)
    assert "in backward" in str(error)
    del loss, error
    optimizer.zero_grad()
    losses.append(step(model, optimizer, 3, [8]))
    assert used(model) & {"recompute", "offload"}
    check(plain, model, losses)


@pytest.mark.slow
def test_forwards_without_gradients_are_not_watched_and_refused_in_the_same_words(
    watched: None,
) -> None:
    plain = Plain([[4]] * 3)
    model, optimizer = prepared()
    losses = []
    for number in range(3):
        losses.append(step(model, optimizer, number, [4]))
        with torch.no_grad():
            model(tokens(number, 32))
    assert bracketed(model) == [""]
    x = tokens(0, 32)
    with torch.no_grad(), fake.limit(hbm=fake.allocated_bytes() + 4096):
        refused(lambda: model(x))
    check(plain, model, losses)


@pytest.mark.slow
def test_backwards_of_other_models_are_left_alone(watched: None) -> None:
    model, optimizer = prepared()
    other = fake.on_device(net())
    loss = loss_of(other, 0, 16)
    with fake.limit(hbm=fake.allocated_bytes() + 4096), pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    hetero.release(model, optimizer)


# -- what it leaves alone ------------------------------------------------------------------------


@pytest.mark.slow
def test_a_model_that_is_released_while_it_is_watched_is_plain(watched: None) -> None:
    plain = Plain([[16]] * 2)
    model, optimizer = prepared()
    with fake.limit(hbm=fake.allocated_bytes() + plain.peak_bytes // 2):
        losses = [step(model, optimizer, number) for number in range(2)]
        assert len(bracketed(model)) > 1
        model, optimizer = hetero.release(model, optimizer)
    assert bracketed(model) == []
    check(plain, model, losses)


@pytest.fixture
def compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.slow
def test_a_model_that_is_compiled_as_a_whole_compiles_without_our_wrappers(
    watched: None, compiler: None
) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    plain = Plain([[4]] * 4)
    model, optimizer = prepared()
    losses = [step(model, optimizer, 0, [4])]  # it is watched
    whole = torch.compile(model, backend=backend, fullgraph=True)
    losses += [step(whole, optimizer, number, [4]) for number in (1, 2, 3)]
    check(plain, model, losses)
    assert len(graphs) <= 2


# -- no room for a step --------------------------------------------------------------------------


def bits(model: nn.Module) -> list[Tensor]:
    return [value.detach().cpu().clone() for value in values(model)]


def short_of(n_bytes: int, step: Callable[[], object]) -> OutOfMemory:
    """Make a step while so many bytes are free, and return its error."""
    with fake.limit(hbm=fake.allocated_bytes() + n_bytes):
        return refused(step)


WEIGHTS = sum(p.nbytes for p in net().parameters())


def as_lists(model: nn.Module) -> torch.optim.Optimizer:
    """It makes a copy of all weights after it has written averages."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)


@pytest.mark.parametrize(
    ("free", "steps"),
    [
        pytest.param(WEIGHTS, 0, marks=pytest.mark.slow),  # states do not fit
        (int(2.5 * WEIGHTS), 0),  # they do: averages are written when copies do not
        (WEIGHTS // 2, 2),  # it is known what a step takes
    ],
)
def test_a_step_without_room_is_an_error_and_weights_and_states_are_of_the_last_one(
    free: int, steps: int, watched: None
) -> None:
    plain = Plain([[4]] * 4, as_lists)
    model, optimizer = prepared(as_lists, activations="keep")
    losses = [step(model, optimizer, number, [4]) for number in range(steps)]
    before = bits(model)
    n_states = len(optimizer.state)
    loss = loss_of(model, 100 * steps, 4)
    loss.backward()
    error = short_of(free, optimizer.step)
    assert "those of the last step" in str(error) and "foreach=False" in error.advice
    assert ("at least" in error.advice) == (not steps)
    assert error.tier == "HBM" and error.needed_bytes > fake.allocated_bytes() + free
    assert all(map(torch.equal, before, bits(model))) and len(optimizer.state) == n_states
    optimizer.step()  # gradients are still there
    optimizer.zero_grad()
    losses.append([loss.detach().cpu()])
    losses += [step(model, optimizer, number, [4]) for number in range(steps + 1, 4)]
    check(plain, model, losses)


def test_a_step_that_cannot_be_undone_says_so_and_the_model_is_refused(watched: None) -> None:
    model, optimizer = prepared(as_lists, activations="keep")
    loss_of(model, 0, 4).backward()
    engine_of(model).setup.ledger.budgets[Tier.HOST] = 0  # for copies of weights
    error = short_of(int(2.5 * WEIGHTS), optimizer.step)
    assert "must not be used" in str(error)
    with pytest.raises(StateError, match="found no room"):
        loss_of(model, 0, 4)
    with pytest.raises(StateError, match="found no room"):
        optimizer.step()


def test_a_step_of_masters_without_room_for_states_can_be_made_later(watched: None) -> None:
    def trained(*, short: bool) -> list[Tensor]:
        model, optimizer = prepared(precision="bf16", activations="keep")
        for number in range(3):
            loss_of(model, number, 4).backward()
            if short and not number:
                error = short_of(WEIGHTS // 4, optimizer.step)
                assert "those of the last step" in str(error)
            optimizer.step()
            optimizer.zero_grad()
        return bits(model)

    assert all(map(torch.equal, trained(short=False), trained(short=True)))


def test_an_update_of_masters_that_fails_half_way_says_what_is_left(watched: None) -> None:
    """A rule without a written formula makes copies of masters while it steps them."""
    model, optimizer = prepared(
        lambda model: torch.optim.ASGD(model.parameters()), precision="bf16", activations="keep"
    )
    step(model, optimizer, 0, [4])
    loss_of(model, 1, 4).backward()
    error = short_of(0, optimizer.step)
    assert "anew" in str(error) and "those of the last step" not in str(error)
    with pytest.raises(StateError, match="found no room"):
        loss_of(model, 2, 4)
