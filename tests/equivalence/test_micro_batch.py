"""Units that take a batch slice by slice, against plain torch that accumulates."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hetero
from hetero.api import engine_of
from hetero.errors import StateError
from hetero.train.activations.slices import laid_out_like

D, VOCAB, LENGTH, BATCH = 16, 23, 7, 8


@dataclasses.dataclass
class Hidden:
    """What a block may be given and return."""

    value: Tensor
    mask: Tensor
    scale: float = 1.0


class Block(nn.Module):
    """Takes a tensor of the batch, one that is not, and hands on a dataclass."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.up = nn.Linear(D, 3 * D)
        self.down = nn.Linear(3 * D, D)
        self.drop = nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, hidden: Hidden, *, place: Tensor) -> Hidden:
        self.calls += 1
        x = hidden.value
        y = self.down(F.gelu(self.up(self.norm(x + place.to(x.dtype)))))
        return Hidden(
            x + self.drop(y) * hidden.mask[..., None].to(x.dtype), hidden.mask, hidden.scale
        )


class Model(nn.Module):
    def __init__(self, layers: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D)
        self.register_buffer("place", torch.randn(LENGTH, D))
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.head = nn.Linear(D, VOCAB)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        hidden = Hidden(self.embed(tokens), mask)
        for block in self.blocks:
            hidden = block(hidden, place=self.place)
        return self.head(hidden.value)


def make(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return Model(**options)


def batch(step: int, place: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator)
    labels = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator)
    return tokens.to(place), torch.ones(BATCH, LENGTH, device=place), labels.to(place)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """A sum over samples, divided by all there are: what a slice adds does not depend on others."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / labels.numel()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def accumulated(model: nn.Module, step: int, size: int, place: str = "cpu") -> None:
    """Plain torch: one backward for each micro-batch, in the order of the batch."""
    tokens, mask, labels = batch(step, place)
    for rows in (slice(i, i + size) for i in range(0, BATCH, size)):
        logits = model(tokens[rows], mask[rows])
        count = labels.numel()
        (
            F.cross_entropy(logits.flatten(0, 1), labels[rows].flatten(), reduction="sum") / count
        ).backward()


def prepared(model: nn.Module, size: int | None, **settings: Any) -> tuple[nn.Module, Any]:
    given: dict[str, Any] = {"device": "cpu", "hbm": "90KiB", "chunk_bytes": 512, **settings}
    return hetero.prepare(model, optimizer_of(model), micro_batch=size, **given)


def one_step(model: nn.Module, optimizer: Any, step: int, place: str = "cpu") -> Tensor:
    tokens, mask, labels = batch(step, place)
    loss = loss_of(model(tokens, mask), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("where", ["cpu", "cpu:sim", "resident"])
def test_slices_add_up_bitwise_as_micro_batches_do_in_plain_torch(size: int, where: str) -> None:
    plain = make()
    reference = optimizer_of(plain)
    settings: dict[str, Any] = {"hbm": None} if where == "resident" else {"device": where}
    model, optimizer = prepared(copy.deepcopy(plain), size, **settings)

    for step in range(4):
        accumulated(plain, step, size)
        reference.step()
        reference.zero_grad()
        one_step(model, optimizer, step)
        assert same(model, plain), step
    assert engine_of(model).residence.name == ("resident" if where == "resident" else "paged")


def test_updates_begin_in_backward_where_units_take_slices() -> None:
    plain = make()
    reference = optimizer_of(plain)
    model, optimizer = prepared(copy.deepcopy(plain), 2, updates="backward")
    begun = []

    for step in range(4):
        accumulated(plain, step, 2)
        reference.step()
        reference.zero_grad()
        tokens, mask, labels = batch(step)
        loss_of(model(tokens, mask), labels).backward()
        stepper = engine_of(model).steps.stepper
        begun.append(0 if stepper is None else len(stepper.early))
        optimizer.step()
        optimizer.zero_grad()
        assert same(model, plain), step
    assert begun[0] == 0 and min(begun[1:]) >= 4, "a step is watched before anything is early"


def same(model: nn.Module, plain: nn.Module) -> bool:
    """Whether all weights are the same, and so are the buffers: recomputation counts no calls."""
    ours, theirs = model.state_dict(), plain.state_dict()
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


def layer_major(model: nn.Module, tokens: Tensor, mask: Tensor, size: int) -> Tensor:
    """Plain torch, each module on one slice after another, with all graphs kept."""
    parts = [slice(i, i + size) for i in range(0, BATCH, size)]
    hidden = [Hidden(model.embed(tokens[rows]), mask[rows]) for rows in parts]
    for block in model.blocks:
        value = torch.cat([block(h, place=model.place).value for h in hidden])
        hidden = [Hidden(value[rows], mask[rows]) for rows in parts]
    return torch.cat([model.head(h.value) for h in hidden])


def test_dropout_is_drawn_slice_by_slice_and_drawn_again_for_backward() -> None:
    plain = make(dropout=0.3)
    reference = optimizer_of(plain)
    model, optimizer = prepared(copy.deepcopy(plain), 4)

    for step in range(4):  # with two slices the order of sums is nobody's
        tokens, mask, labels = batch(step)
        torch.manual_seed(step)
        theirs = loss_of(layer_major(plain, tokens, mask, 4), labels)
        theirs.backward()
        reference.step()
        reference.zero_grad()
        torch.manual_seed(step)
        ours = one_step(model, optimizer, step)

        assert torch.equal(ours, theirs.detach())
        assert same(model, plain)
    assert torch.equal(torch.get_rng_state(), after_plain_step(make(dropout=0.3), step))


def after_plain_step(plain: nn.Module, step: int) -> Tensor:
    """Return where the generator stands behind a plain step."""
    tokens, mask, labels = batch(step)
    torch.manual_seed(step)
    loss_of(layer_major(plain, tokens, mask, 4), labels).backward()
    return torch.get_rng_state()


def test_two_byte_gradients_are_rounded_once() -> None:
    """Three hundred ones are 300; added up in bf16 they would stay at 256."""
    plain = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).bfloat16()
    with torch.no_grad():
        for param in plain.parameters():
            param.fill_(1.0)
    model, _ = prepared(plain, 1, hbm=None)

    model(torch.ones(300, 1, dtype=torch.bfloat16)).sum().backward()

    assert [float(p.grad) for p in model.parameters()] == [300.0, 300.0]


def test_two_byte_weights_learn_from_slices_as_from_the_whole_batch() -> None:
    found = {}
    for size in (None, 1, 4):
        model, optimizer = prepared(make(), size, precision="bf16", hbm="120KiB")
        tokens, mask, labels = batch(0)
        hetero.backward(loss_of(model(tokens, mask), labels))
        found[size] = [p.grad.float().clone() for p in model.parameters() if p.grad is not None]
        hetero.release(model, optimizer)

    for one, two, whole in zip(found[1], found[4], found[None], strict=True):
        scale = float(whole.abs().max())
        assert float((one - whole).abs().max()) <= 0.02 * scale
        assert float((two - whole).abs().max()) <= 0.02 * scale


def test_fp16_scales_its_loss_through_slices() -> None:
    model, optimizer = prepared(make(), 2, precision="fp16", hbm="120KiB")
    losses = []
    for _ in range(12):
        tokens, mask, labels = batch(0)
        loss = loss_of(model(tokens, mask).float(), labels)
        hetero.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))

    assert losses[-1] < 0.9 * losses[0]


def test_a_step_fetches_each_weight_twice_however_many_slices_there_are() -> None:
    fetched = {}
    for size in (BATCH, BATCH // 2, 1):
        model, optimizer = prepared(make(layers=8), size, hbm="112KiB", activations="recompute")
        for step in range(4):
            one_step(model, optimizer, step)
        fetched[size] = fetches(model)
    model, optimizer = prepared(make(layers=8), None, hbm="72KiB")
    for step in range(4):
        accumulated(model, step, 1)
        optimizer.step()
        optimizer.zero_grad()

    n_units = len(engine_of(model).setup.blueprint.units)
    assert all(n_units < count <= 2 * n_units for count in fetched.values()), fetched
    assert fetches(model) > 4 * max(fetched.values())  # plain accumulation


def fetches(model: nn.Module) -> int:
    """Return how many fetches the last step took."""
    engine = engine_of(model)
    engine.finish()
    assert engine.residence.name == "paged"
    return engine.setup.stats.counts["fetch"]


class Mixing(Model):
    """A model whose last block is another one."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__(layers=3)
        self.blocks[-1] = last


class Normed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(LENGTH)

    def forward(self, hidden: Hidden, *, place: Tensor) -> Hidden:
        return Hidden(self.batch(hidden.value), hidden.mask)


class Auxiliary(Block):
    def forward(self, hidden: Hidden, *, place: Tensor) -> Any:
        return Hidden(self.up(hidden.value)[..., :D], hidden.value.square().mean())


class Foreign(Block):
    def __init__(self, other: Tensor) -> None:
        super().__init__()
        self.others = [other]

    def forward(self, hidden: Hidden, *, place: Tensor) -> Hidden:
        return Hidden(hidden.value * self.others[0], hidden.mask)


class Writing(Block):
    def forward(self, hidden: Hidden, *, place: Tensor) -> Hidden:
        hidden.value.mul_(2)
        return Hidden(self.up(hidden.value)[..., :D], hidden.mask)


class Dropping(Block):
    """Keeps samples apart, though dropout makes each call differ."""

    def forward(self, hidden: Hidden, *, place: Tensor) -> Hidden:
        return Hidden(F.dropout(self.up(hidden.value)[..., :D], 0.5), hidden.mask)


class Blurring(Block):
    """Mixes samples beside dropout, with which one sample alone gives other numbers anyway."""

    def forward(self, hidden: Hidden, *, place: Tensor) -> Hidden:
        return Hidden(F.dropout(hidden.value + hidden.value.mean(0), 0.5), hidden.mask)


@pytest.mark.parametrize(
    ("block", "what"),
    [
        (Normed, "mixes samples"),
        (Blurring, "mixes samples"),
        (Auxiliary, "one row for each"),
        (None, "not its own"),
        (Writing, "in place"),
    ],
)
def test_a_unit_that_has_no_slices_is_refused_and_changes_nothing(block: Any, what: str) -> None:
    torch.manual_seed(0)
    plain = Mixing(Block())
    plain.blocks[-1] = Foreign(plain.blocks[0].norm.weight) if block is None else block()
    model, _ = prepared(plain, 2)
    before = {k: v.clone() for k, v in model.state_dict().items() if "batch" in k}
    tokens, mask, _ = batch(0)
    torch.manual_seed(5)
    model.blocks[0](Hidden(model.embed(tokens), mask), place=model.place)

    with pytest.raises(StateError, match=what) as refused:
        model(tokens, mask)

    assert "blocks.2" in str(refused.value) and "micro_batch" in refused.value.advice
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in before.items())


def test_dropout_does_not_pass_for_mixing() -> None:
    model, optimizer = prepared(Mixing(Dropping()), 2)

    for step in range(3):
        assert torch.isfinite(one_step(model, optimizer, step))


def test_a_batch_that_is_small_enough_and_evaluation_are_not_cut() -> None:
    plain = make()
    model, _ = prepared(copy.deepcopy(plain), 8)
    tokens, mask, labels = batch(0)
    expected = loss_of(plain(tokens, mask), labels)
    ours = loss_of(model(tokens, mask), labels)
    with torch.no_grad():
        quiet = model(tokens, mask)

    assert torch.equal(ours, expected)
    assert torch.equal(quiet, plain(tokens, mask))


def test_what_no_gradient_goes_through_asks_for_none() -> None:
    model, _ = prepared(make(), 2)
    seen = []
    model.head.register_forward_pre_hook(lambda *_: seen.append(model.last.mask.requires_grad))
    tokens, mask, _ = batch(0)
    block = model.blocks[-1]
    before = block.forward

    def noted(*args: Any, **kwargs: Any) -> Hidden:
        model.last = before(*args, **kwargs)
        return model.last

    block.forward = noted  # as users patch

    model(tokens, mask)

    assert seen == [False]
    assert model.last.value.requires_grad


def test_a_second_derivative_through_slices_is_refused_not_wrong() -> None:
    model, _ = prepared(make(), 2)
    tokens, mask, labels = batch(0)
    loss = loss_of(model(tokens, mask), labels)
    weight = model.blocks[0].up.weight

    (grad,) = torch.autograd.grad(loss, weight, create_graph=True)

    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.square().sum().backward()


def test_what_comes_out_of_slices_lies_as_a_slice_does() -> None:
    image = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    heads = torch.randn(2, 6, 3, 4).transpose(1, 2)
    for output in (image, heads, torch.randn(2, 4), torch.randn(2)):
        whole = laid_out_like(output, 8)
        assert whole.shape == (8, *output.shape[1:])
        assert whole[:2].stride() == output.stride()
