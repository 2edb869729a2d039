"""A budget that is too small: the error names one that works, and no step is made or lost by it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hetero
from hetero.api import engine_of
from hetero.config import HostLimit
from hetero.device import SimDevice
from hetero.errors import BudgetError
from hetero.types import Tier
from tests.campaigns.harness import VOCAB, Net, adamw, tokens_of
from tests.equivalence.harness import same, values

STEPS = 5
SILLY = 1.15  # times the smallest budget that works: a number as large is no answer
DEVICES = ("cpu", "cpu:sim")
POLICIES = ("auto", "keep", "offload", "recompute")


class Attention(nn.Module):
    def __init__(self, d: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, d = x.shape
        parts = self.qkv(self.before(x)).view(batch, length, 3, self.heads, d // self.heads)
        mixed = F.scaled_dot_product_attention(*parts.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), 0.1)
        return x + self.down(F.gelu(self.up(self.between(x))))


class Again(nn.Module):
    """ALBERT's way: one block, as often as there are layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(VOCAB, 32), Attention()
        self.head = nn.Linear(32, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for _ in range(4):
            x = self.block(x)
        out: Tensor = self.head(x)
        return out


def tied() -> nn.Module:
    net = Net(6)
    net.head.weight = net.embed.weight
    return net


def layers() -> nn.Module:
    return nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(64, 64), nn.ReLU())))


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def of_tokens(model: nn.Module, number: int, batch: int, length: int) -> Tensor:
    tokens = tokens_of(number, batch, length)
    logits = model(tokens)
    logits = getattr(logits, "logits", logits)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def of_numbers(model: nn.Module, number: int, batch: int, length: int) -> Tensor:
    rows = torch.randn(batch, length, generator=torch.Generator().manual_seed(number))
    return model(rows).square().mean()


@dataclass(frozen=True)
class Model:
    """A model, its loss, and a batch."""

    name: str
    build: Callable[[], nn.Module]
    loss_of: Callable[[nn.Module, int, int, int], Tensor] = of_tokens
    batch: int = 4
    length: int = 16


MODELS = [
    Model("layers", layers, of_numbers, 16, 64),
    Model("layers of a large batch", layers, of_numbers, 64, 64),
    Model("net", lambda: Net(6)),
    Model("net of long sequences", lambda: Net(6), batch=4, length=48),
    Model("attention", lambda: Net(4, block=Attention)),
    Model("tied", tied),
    Model("llama", llama),
]


def trained(model: Model, **settings: Any) -> BudgetError | None:
    """Train a few steps; returns the error that ended them."""
    torch.manual_seed(0)
    module = model.build()
    try:
        ours, optimizer = hetero.prepare(module, adamw(module), chunk_bytes=4096, **settings)
        for number in range(STEPS):
            torch.manual_seed(number)
            model.loss_of(ours, number, model.batch, model.length).backward()
            optimizer.step()
            optimizer.zero_grad()
    except BudgetError as error:
        return error
    return None


def followed(model: Model, hbm: int, **settings: Any) -> list[int]:
    """Return the budgets that errors named until the model trains, from ``hbm`` on."""
    named: list[int] = []
    while (error := trained(model, hbm=hbm, **settings)) is not None:
        assert error.tier == "HBM" and error.needed_bytes > hbm
        assert f"hbm= to {error.needed_bytes} bytes" in error.advice or not named
        hbm = error.needed_bytes
        named.append(hbm)
        assert len(named) <= 2, f"{named}: {error}"
    return named


@pytest.mark.campaign(seconds=4)
@pytest.mark.parametrize("activations", POLICIES)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_the_budget_that_an_error_names_works_and_is_not_much_too_large(
    model: Model, device: str, activations: str
) -> None:
    settings = {"device": device, "activations": activations}
    *_, enough = followed(model, 1_000, **settings)

    *_, again = followed(model, enough // 4, **settings)

    assert again == enough
    assert trained(model, hbm=int(enough / SILLY), **settings) is not None


def test_a_larger_budget_than_enough_is_enough_where_activations_go_down() -> None:
    """What is still on its way down when backward begins is no third load on the device."""
    model = Model("net", lambda: Net(6), batch=2, length=7)
    settings: dict[str, Any] = {"device": "cpu:sim", "activations": "offload"}
    *_, enough = followed(model, 1_000, **settings)

    for part in (0.08, 0.12):
        assert trained(model, hbm=int((1 + part) * enough), **settings) is None


@pytest.mark.campaign(seconds=1)
@pytest.mark.parametrize("activations", ["auto", "offload"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("below", ["host", "nvme_bytes"])
def test_the_budgets_below_that_errors_name_work_too(
    below: str, device: str, activations: str, disk: Path
) -> None:
    """Of HOST with a drive and without one, and of what goes to the drive."""
    model = Model("net", lambda: Net(6), batch=4, length=32)
    settings: dict[str, Any] = {"device": device, "activations": activations, "hbm": 2_000_000}
    if below == "nvme_bytes":
        settings.update(nvme=disk, host=500_000)
    settings[below] = 1_000
    named: list[int] = []
    while (error := trained(model, **settings)) is not None:
        assert f"{below}=" in error.advice and error.needed_bytes > settings[below]
        settings[below] = error.needed_bytes
        named.append(error.needed_bytes)
        assert len(named) <= 2, f"{named}: {error}"

    assert trained(model, **{**settings, below: int(named[-1] / SILLY)}) is not None


def added_up(order: str, **settings: Any) -> list[Tensor]:
    """Train steps of several passes each, F a forward and B the backward of the oldest one; return
    the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Attention() for _ in range(8)))
    model, optimizer = hetero.prepare(model, adamw(model), precision="bf16", **settings)
    for step in range(3):
        losses = []
        for number, what in enumerate(order):
            torch.manual_seed(100 * step + number)
            if what == "F":
                losses.append(model(torch.randn(2, 32, 32).bfloat16()).float().square().mean())
            else:
                losses.pop(0).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@pytest.mark.parametrize("order", ["FBFB", "FFBB", "FFFBBB"])
def test_gradients_that_add_up_have_room_in_ram_where_activations_go_down(order: str) -> None:
    """Activations take what RAM homes leave; sums are fp32, twice as large as one gradient."""
    settings: dict[str, Any] = {"device": "cpu:sim", "hbm": 700_000, "host": 1_000}
    for when in ("prepare", "the first step"):
        with pytest.raises(BudgetError) as caught:
            added_up(order, **settings)
        assert caught.value.tier == "HOST", when
        settings["host"] = caught.value.needed_bytes

    tight = added_up(order, **settings)
    same(tight, added_up(order, **{**settings, "host": 100_000_000}), "weights")


@pytest.mark.parametrize("activations", POLICIES)
def test_a_unit_that_is_used_several_times_in_a_forward_trains_at_the_budget_that_is_named(
    activations: str,
) -> None:
    model, hbm = Model("again", Again), 1_000
    settings: dict[str, Any] = {"device": "cpu:sim", "activations": activations}
    for _ in range(3):
        error = trained(model, hbm=hbm, **settings)
        hbm = hbm if error is None else error.needed_bytes

    assert trained(model, hbm=hbm, **settings) is None


def skips(optimizer: Any) -> None:
    optimizer.zero_grad()


def retries(optimizer: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()


def adds_up(optimizer: Any) -> None:
    """The batch's gradients are part of the next step."""


LARGE = 2  # the number of the batch that is too large


def loss_at(model: nn.Module, number: int) -> Tensor:
    torch.manual_seed(number)
    return of_tokens(model, number, 2, 300 if number == LARGE else 6)


def losses_of(
    model: nn.Module, optimizer: Any, refused: Callable[[Any], None], at: list[int] | None = None
) -> list[Tensor]:
    """Train; ``refused`` is what the caller does about a refusal, which is added to ``at``.

    On the plain side, of which ``at`` is None, there is one, of the large batch.
    """
    losses = []
    for number in range(8):
        losses.append(loss_at(model, number))
        losses[-1].backward()
        try:
            if at is None and number == LARGE:
                raise BudgetError("not on the plain side")
            optimizer.step()
            optimizer.zero_grad()
        except BudgetError:
            if at is not None:
                at.append(number)
            refused(optimizer)
    return [loss.detach() for loss in losses]


def prepared(model: nn.Module, **settings: Any) -> tuple[Any, Any]:
    return hetero.prepare(model, adamw(model), chunk_bytes=1024, **settings)


def trains_alike(
    plain: nn.Module, optimizer: Any, tight: tuple[Any, Any], refused: Callable[[Any], None]
) -> None:
    """Train both sides; of the tight one the large batch is refused, and nothing else."""
    at: list[int] = []
    model, tight_optimizer = tight
    losses = losses_of(plain, optimizer, refused)
    same(losses, losses_of(model, tight_optimizer, refused, at), "losses")
    same(values(plain), values(model), "weights")
    assert at == [LARGE]
    assert hetero.status(model).steps == (8 if refused is retries else 7)


@pytest.mark.campaign(seconds=3)
@pytest.mark.parametrize("refused", [skips, retries, adds_up])
@pytest.mark.parametrize("activations", POLICIES)
@pytest.mark.parametrize("device", DEVICES)
def test_after_a_batch_that_was_too_large_training_goes_on_and_no_step_is_made_twice(
    device: str, activations: str, refused: Callable[[Any], None]
) -> None:
    torch.manual_seed(0)
    plain = Net(6)
    tight = prepared(copy.deepcopy(plain), device=device, hbm=160_000, activations=activations)
    trains_alike(plain, adamw(plain), tight, refused)


def test_masters_are_those_of_a_model_with_room_after_a_batch_that_was_too_large() -> None:
    torch.manual_seed(0)
    nets = Net(6), Net(6)
    nets[1].load_state_dict(nets[0].state_dict())
    roomy, tight = (
        prepared(net, device="cpu", hbm=hbm, activations="keep", precision="bf16")
        for net, hbm in zip(nets, (None, 100_000), strict=True)
    )
    trains_alike(*roomy, tight, retries)


def test_homes_of_a_model_that_became_resident_are_not_set_aside_once_more() -> None:
    model, optimizer = prepared(Net(6), device="cpu", hbm=2_000_000, host=1_200_000)
    engine = engine_of(model)
    for number in range(2):
        loss_at(model, number).backward()
        optimizer.step()
    assert engine.residence.name == "resident"
    setup = engine.setup
    to_come = setup.unclaimed.bytes_on(Tier.HOST)
    assert to_come == setup.budget.host_bytes - setup.ledger.used(Tier.HOST)


def anchored(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """Train; from the fifth step on the loss holds weights near those of the fourth."""
    losses: list[Tensor] = []
    anchors: list[Tensor] = []
    for number in range(8):
        if number == 4:
            anchors = [p.detach().clone() for p in model.parameters()]
        loss = of_tokens(model, number, 16, 16)
        near = zip(model.parameters(), anchors, strict=False)
        loss = loss + 5.0 * sum((p - anchor).square().sum() for p, anchor in near)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("device", DEVICES)
def test_units_give_way_where_a_later_loss_takes_more(device: str) -> None:
    """Where the choice is free it was made for less; what it leaves is mended, not refused."""
    torch.manual_seed(0)
    plain = Net(6, 64)
    model, optimizer = prepared(copy.deepcopy(plain), device=device, hbm=1_700_000)

    same(anchored(plain, adamw(plain)), anchored(model, optimizer), "losses")
    same(values(plain), values(model), "weights")
    assert engine_of(model).residence.name == "paged"


def test_a_model_that_became_resident_stays_where_a_later_loss_takes_more() -> None:
    torch.manual_seed(0)
    plain = Net(6, 64)
    model, optimizer = prepared(copy.deepcopy(plain), device="cpu:sim", hbm=4_000_000)

    same(anchored(plain, adamw(plain)), anchored(model, optimizer), "losses")
    same(values(plain), values(model), "weights")
    assert engine_of(model).residence.name == "resident"


def test_what_ram_does_not_hold_to_the_end_of_a_step_is_an_error_at_once() -> None:
    model, _ = prepared(Net(6), device=SimDevice(), hbm=30_000)
    engine_of(model).setup.device.host_limit = lambda: HostLimit(20_000, "a small machine")
    with pytest.raises(BudgetError, match=r"unit 'embed' saves") as caught:
        of_tokens(model, 0, 8, 64).backward()
    assert f"to at least {caught.value.needed_bytes} bytes" in caught.value.advice


def test_an_error_before_any_unit_is_known_reads_well() -> None:
    model, optimizer = prepared(nn.Linear(64, 64), device="cpu:sim", hbm=20_000)
    with pytest.raises(BudgetError) as caught:
        of_numbers(model, 0, 64, 64).backward()
        optimizer.step()
    assert "  " not in str(caught.value) and ";  (" not in str(caught.value)
