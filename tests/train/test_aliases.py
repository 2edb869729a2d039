"""Aliases, interruptions and other people's hooks: each of these has once been silently wrong."""

from __future__ import annotations

import copy
import functools
import gc
import os
import signal
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import hetero
from hetero import StateError
from hetero.api import engine_of
from hetero.train.update.rules import Rule
from tests.equivalence.harness import adamw, compare, measure, same, sgd, smallest, values
from tests.equivalence.zoo import Block, Case, Loop, Stack, loss_of, tokens

HBM = 120_000


def data(number: int = 0) -> Tensor:
    return tokens(torch.Generator().manual_seed(number))


def both(
    action: Callable[[nn.Module, Any, int], Any],
    *,
    steps: int = 4,
    make: Callable[[nn.Module], Any] = sgd,
    build: Callable[[], nn.Module] = Stack,
    hbm: int | None = HBM,
) -> nn.Module:
    """Run ``action(model, optimizer, step)`` in a plain and a prepared loop and compare weights."""
    torch.manual_seed(3)
    plain = build()
    twin = copy.deepcopy(plain)
    sides = [
        (plain, make(plain)),
        hetero.prepare(twin, make(twin), hbm=hbm, chunk_bytes=256, device="cpu"),
    ]
    for number in range(steps):
        for model, optimizer in sides:
            torch.manual_seed(number)
            action(model, optimizer, number)
        same(values(sides[0][0]), values(sides[1][0]), f"step {number}")
    return sides[1][0]


def step(model: nn.Module, optimizer: Any, number: int) -> None:
    loss_of(model, data(number)).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_flat_gradient_buffer_of_the_users_stays_the_gradient() -> None:
    buffers: dict[int, Tensor] = {}

    def action(model: nn.Module, optimizer: Any, number: int) -> None:
        params = list(model.parameters())
        if id(model) not in buffers:
            buffers[id(model)] = torch.zeros(sum(p.numel() for p in params))
            at = 0
            for p in params:
                p.grad = buffers[id(model)][at : at + p.numel()].view_as(p)
                at += p.numel()
        loss_of(model, data(number)).backward()
        buffers[id(model)].mul_(0.5)
        optimizer.step()
        buffers[id(model)].zero_()

    both(action)


def test_gradients_swapped_between_parameters_are_stepped_as_assigned() -> None:
    def action(model: nn.Module, optimizer: Any, number: int) -> None:
        loss_of(model, data(number)).backward()
        a, b = model.blocks[0].up.weight, model.blocks[1].up.weight
        a.grad, b.grad = b.grad, a.grad
        optimizer.step()
        optimizer.zero_grad()

    both(action)


def test_a_gradient_computes_like_a_tensor_outside_torch_too() -> None:
    model, _ = prepared()
    loss_of(model, data()).backward()
    grad = model.head.weight.grad
    assert np.array_equal(grad.numpy(), grad.clone().numpy())
    assert np.asarray(grad).sum() == grad.clone().numpy().sum()
    assert grad.tolist() == grad.clone().tolist()
    assert torch.equal(copy.deepcopy(grad), grad.clone())
    assert torch.equal(torch.from_dlpack(grad), grad.clone()) and grad.data_ptr() != 0


def prepared(hbm: int = HBM) -> tuple[Any, Any]:
    torch.manual_seed(3)
    model = Stack()
    return hetero.prepare(model, sgd(model), hbm=hbm, chunk_bytes=256, device="cpu")


def test_assigning_data_while_the_old_value_is_held_is_refused() -> None:
    model, _ = prepared()
    weight = model.blocks[0].up.weight
    backup = weight.data
    with pytest.raises(StateError, match=r"blocks\.0\.up\.weight.*view of its old value"):
        weight.data = torch.zeros_like(weight)
    assert torch.equal(backup, weight)


def test_assigning_a_piece_of_a_flat_buffer_is_refused() -> None:
    model, _ = prepared()
    flat = torch.zeros(model.head.weight.numel())
    with pytest.raises(StateError, match="view of the new one"):
        model.head.weight.data = flat.view_as(model.head.weight)


def test_writing_to_a_tensor_that_was_assigned_is_refused_at_the_next_use() -> None:
    model, _ = prepared()
    source = torch.zeros(16)
    model.norm.bias.data = source
    model(data())
    source.add_(1.0)
    with pytest.raises(StateError, match=r"norm\.bias.*written afterwards"):
        model(data())


class OffloadingBlock(Block):
    """A unit with saved-tensor hooks of its own."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return super().forward(x * self.norm.weight)


class Offloading(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OffloadingBlock() for _ in range(4))


def test_saved_tensor_hooks_inside_a_unit_see_numbers_and_not_placeholders() -> None:
    both(step, build=Offloading)


def test_saved_tensor_hooks_around_a_functional_use_see_numbers() -> None:
    def action(model: nn.Module, optimizer: Any, number: int) -> None:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            (model.norm.weight * torch.randn(16)).pow(2).sum().backward()
        step(model, optimizer, number)

    both(action)


@pytest.mark.parametrize("hbm", [HBM, None], ids=["paged", "resident"])
def test_a_forked_child_does_not_touch_its_parents_weights(hbm: int | None) -> None:
    def action(model: nn.Module, optimizer: Any, number: int) -> None:
        if isinstance(optimizer, hetero.Optimizer):
            child = os.fork()
            if child == 0:
                with torch.no_grad():
                    for p in model.parameters():
                        p.zero_()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        step(model, optimizer, number)

    both(action, steps=2, hbm=hbm)


def test_an_alias_held_while_the_model_becomes_resident_stays_one() -> None:
    kept: dict[int, Tensor] = {}

    def action(model: nn.Module, optimizer: Any, number: int) -> None:
        if number == 0:
            kept[id(model)] = model.blocks[1].up.weight.detach()
        step(model, optimizer, number)
        kept[id(model)].clamp_(-0.05, 0.05)

    both(action, hbm=1 << 24)
    same([kept[k] for k in list(kept)[:1]], [kept[k] for k in list(kept)[1:]], "aliases")


def test_data_pointed_elsewhere_while_resident_survives_release() -> None:
    torch.manual_seed(3)
    model = Stack()
    model, optimizer = hetero.prepare(model, sgd(model), device="cpu")
    model.norm.bias.data = torch.full((16,), 5.0)
    model, _ = hetero.release(model, optimizer)
    assert torch.equal(model.norm.bias, torch.full((16,), 5.0))


def test_a_module_of_a_resident_model_cannot_be_prepared_again() -> None:
    model = Stack()
    hetero.prepare(model, sgd(model), device="cpu")
    with pytest.raises(StateError, match="part of a model that is"):
        hetero.prepare(model.blocks[0])


def test_a_step_that_cannot_be_made_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Embedding(9, 4, sparse=True))
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters()}]
    inner = torch.optim.SGD(groups, lr=0.1)
    model, optimizer = hetero.prepare(model, inner, device="cpu", hbm=4000, chunk_bytes=64)
    before = values(model)
    (model[0](torch.ones(1, 4)).sum() + model[1](torch.tensor([1])).sum()).backward()
    with pytest.raises(hetero.ConfigError, match="sparse"):
        optimizer.step()
    same(before, values(model), "after the refused step")
    assert torch.equal(
        model[0](torch.eye(4)), torch.nn.functional.linear(torch.eye(4), *before[:2])
    )


def test_an_interrupt_waits_until_the_update_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Stack()
    model, optimizer = prepared()
    plain.load_state_dict(model.state_dict())
    theirs = sgd(plain)
    loss_of(model, data()).backward()
    loss_of(plain, data()).backward()
    calls, run = iter(range(99)), Rule.run

    def interrupted(*args: Any) -> Any:
        if next(calls) == 5:
            signal.raise_signal(signal.SIGINT)
        return run(*args)

    monkeypatch.setattr(Rule, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    monkeypatch.undo()
    theirs.step()
    assert next(calls) > 5
    for ours, torchs in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(ours, torchs)


def test_a_write_and_a_step_inside_gathered_both_count() -> None:
    def action(model: nn.Module, optimizer: Any, number: int) -> None:
        loss_of(model, data(number)).backward()
        with hetero.gathered(model.blocks[1], write=True), torch.no_grad():
            model.blocks[1].up.weight.mul_(0.5)
            optimizer.step()
            model.blocks[1].down.bias.add_(1.0)
        optimizer.zero_grad()

    both(action)


def test_writes_to_both_sides_of_a_state_dict_are_kept() -> None:
    def action(model: nn.Module, optimizer: Any, number: int) -> None:
        state = model.state_dict()
        with torch.no_grad():
            model.blocks[1].up.weight.add_(0.5)
        state["blocks.1.up.bias"].mul_(2.0)
        model.blocks[2].up.weight.data.mul_(0.5)
        state["blocks.2.down.bias"].add_(1.0)
        step(model, optimizer, number)

    both(action)


def test_step_hooks_registered_before_prepare_go_on() -> None:
    model = Stack()
    inner = sgd(model)
    seen: list[str] = []
    inner.register_step_pre_hook(lambda *_: seen.append("pre"))
    inner.register_step_post_hook(lambda *_: seen.append("post"))
    model, optimizer = hetero.prepare(model, inner, hbm=HBM, chunk_bytes=256, device="cpu")
    step(model, optimizer, 0)
    assert seen == ["pre", "post"]


def test_inference_mode_before_training_does_no_harm() -> None:
    def action(model: nn.Module, optimizer: Any, number: int) -> None:
        with torch.inference_mode():
            loss_of(model, data(number))
        step(model, optimizer, number)

    both(action)


def test_a_keyboard_interrupt_in_forward_leaves_nothing_pinned() -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def action(model: nn.Module, optimizer: Any, number: int) -> None:
        handle = model.blocks[2].up.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            loss_of(model, data(number))
        handle.remove()
        step(model, optimizer, number)

    model = both(action)
    assert all(r.pins == 0 for r in engine_of(model).residence.manager.replicas.values())


def test_a_graph_from_before_release_says_so() -> None:
    model, optimizer = prepared()
    loss = loss_of(model, data())
    hetero.release(model, optimizer)
    with pytest.raises(StateError, match=r"before hetero\.release"):
        loss.backward()


def test_a_dropped_model_is_freed() -> None:
    def scope() -> list[Any]:
        model, optimizer = prepared()
        step(model, optimizer, 0)
        assert hetero.status(model).mode == "paged"
        return [weakref.ref(x) for x in (model, optimizer, engine_of(model), model.head.weight)]

    refs = scope()
    gc.collect()
    assert [ref() for ref in refs] == [None] * 4


class Keeps(Stack):
    """Keeps what it made last, with its graph, as an attribute of its own and of a unit."""

    def forward(self, tokens: Tensor) -> Any:
        self.last = self.blocks[1].last = super().forward(tokens)
        return self.last


@pytest.mark.campaign(seconds=3)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"activations": "keep"},
        {"activations": "recompute"},
        {"micro_batch": 1},
        {"precision": "bf16"},
        {"optimizer": None},
        {"updates": "backward"},
    ],
    ids=str,
)
def test_a_dropped_model_that_keeps_its_output_is_freed(settings: dict[str, Any]) -> None:
    def scope() -> list[Any]:
        model = Keeps()
        given = {"optimizer": sgd(model), "hbm": HBM, "chunk_bytes": 256, "device": "cpu"}
        hetero.prepare(model, **{**given, **settings})
        optimizer = engine_of(model).optimizer
        for number in range(3):
            loss_of(model, data(number)).backward()
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
        assert hetero.status(model).mode == "paged"
        model.state_dict()  # waits for the updates
        return [weakref.ref(x) for x in (model, engine_of(model), model.head.weight)]

    refs = scope()
    gc.collect()
    assert [ref() for ref in refs[:2]] == [None] * 2
    gc.collect()  # the graph went with the module; what only the graph held is free now
    assert refs[2]() is None


class Listed(Stack):
    """Holds parameters where no module looks for them, as `nn.LSTM` does."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for block in self.blocks:
            block.flat = list(block.parameters())


def test_a_dropped_model_is_freed_whose_units_list_their_parameters() -> None:
    """What is known of a class that only this model has goes with it."""

    def scope() -> list[Any]:
        model = Listed()
        given = {"hbm": HBM, "chunk_bytes": 256, "device": "cpu", "activations": "recompute"}
        _, optimizer = hetero.prepare(model, sgd(model), **given)
        for number in range(3):
            loss_of(model, data(number)).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.state_dict()  # waits for the updates
        return [weakref.ref(x) for x in (model, engine_of(model), model.head.weight)]

    refs = scope()
    gc.collect()
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3


class OnCpu(nn.Linear):
    """Saves by torch's own hooks, which hand on what is in RAM as it is."""

    def forward(self, x: Tensor) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return torch.tanh(super().forward(x))


def test_a_dropped_model_is_freed_whose_units_were_tried_under_hooks() -> None:
    """No backward frees what the graph of a trial has saved."""

    def scope() -> list[Any]:
        model = nn.Sequential(*(nn.Sequential(OnCpu(48, 48)) for _ in range(6)))
        _, optimizer = hetero.prepare(model, adamw(model), hbm="200KiB", device="cpu:sim")
        for _ in range(3):
            model(torch.randn(4, 48)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        model.state_dict()  # waits for the updates
        return [weakref.ref(x) for x in (model, engine_of(model), model[5][0].weight)]

    refs = scope()
    gc.collect()
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3


class Scores(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).square().mean()


def alone(*, paged: bool) -> tuple[Tensor, Tensor, dict[str, nn.Parameter]]:
    """Return an input, its score and the weights of a model that is gone."""
    torch.manual_seed(3)
    model = Scores()
    if paged:
        hetero.prepare(model, hbm=HBM, chunk_bytes=256, device="cpu", activations="keep")
        assert hetero.status(model).mode == "paged"
    x = torch.randn(2, 7, model.norm.weight.numel(), requires_grad=True)
    return x, model(x), dict(model.named_parameters())


def test_a_graph_and_parameters_outlive_their_model() -> None:
    expected, found = alone(paged=False), alone(paged=True)
    gc.collect()
    for _, score, _ in (expected, found):
        score.backward()
    same([expected[0].grad], [found[0].grad], "gradient of the input")
    for name, param in expected[2].items():
        theirs = found[2][name]
        same([param * 2, param.grad], [theirs * 2, theirs.grad], name)
    del found
    x, score = alone(paged=True)[:2]
    gc.collect()
    score.backward()
    same([expected[0].grad], [x.grad], "without parameters")


def test_a_padded_transformer_encoder_evaluates_as_in_torch() -> None:
    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        return nn.TransformerEncoder(layer, 4)

    torch.manual_seed(3)
    plain = build().eval()
    twin = copy.deepcopy(plain)
    model = hetero.prepare(twin, hbm=40_000, chunk_bytes=256, device="cpu")
    x, mask = torch.randn(3, 5, 16), torch.zeros(3, 5, dtype=torch.bool)
    mask[1, 3:] = True
    with torch.no_grad():
        a, b = plain(x, src_key_padding_mask=mask), model(x, src_key_padding_mask=mask)
    assert a.shape == b.shape and torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_two_byte_parameters_step_as_in_torch(dtype: torch.dtype) -> None:
    def cast(g: torch.Generator) -> Tensor:
        return torch.randn(2, 16, generator=g).to(dtype)

    def run(loop: Loop) -> list[Tensor]:
        loss = loop.model(loop.data).float().pow(2).mean()
        loss.backward()
        return [loss]

    build = lambda: nn.Sequential(*(Block() for _ in range(4))).to(dtype)  # noqa: E731
    case = Case(str(dtype), build, run, cast)
    for make in (sgd, adamw):
        budget = measure(case, make, 256)

        def attempt(hbm: int, make: Any = make) -> Any:
            return compare(case, make, hbm=hbm, chunk_bytes=256)

        assert smallest(case, budget, attempt).mode == "paged"


def test_long_passes_without_a_step_do_not_pile_up() -> None:
    model, _ = prepared()
    fetches = engine_of(model).residence.runtime.fetches
    with torch.no_grad():
        for _ in range(30):
            model(data())
    assert len(fetches.evaluate._seen) <= 20 and len(fetches.train._seen) == 0


def rounded(tensor: Tensor) -> Tensor:
    return tensor.bfloat16() if tensor.is_floating_point() else tensor


def widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


@pytest.mark.parametrize("activations", ["auto", "keep", "offload"])
def test_hooks_that_round_what_is_saved_round_weights_too(activations: str) -> None:
    """A user's own pair around the model: torch saves weights through it."""
    plain = Stack()
    model, reference = copy.deepcopy(plain), sgd(plain)
    given = {"hbm": 4 * HBM, "chunk_bytes": 256, "device": "cpu", "activations": activations}
    model, optimizer = hetero.prepare(model, sgd(model), **given)
    for number in range(4):
        for m, o in ((plain, reference), (model, optimizer)):
            with torch.autograd.graph.saved_tensors_hooks(rounded, widened):
                loss = loss_of(m, data(number))
            loss.backward()
            o.step()
            o.zero_grad()
        same(values(plain), values(model), f"step {number}")


PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default]


class Selective(Block):
    """Keeps what products made, and computes all else again."""

    def forward(self, x: Tensor) -> Any:
        keeps = functools.partial(create_selective_checkpoint_contexts, PRODUCTS)
        plain = functools.partial(Block.forward, self)
        return checkpoint(plain, x, use_reentrant=False, context_fn=keeps)


@pytest.mark.parametrize("device", ["cpu", "cpu:sim"])
def test_modes_of_the_program_see_none_of_our_copies(device: str) -> None:
    """torch's selective checkpoints count the operations that come by."""
    plain = Stack()
    plain.blocks = nn.ModuleList(Selective() for _ in range(6))
    twin, reference = copy.deepcopy(plain), sgd(plain)
    given = {"hbm": HBM, "chunk_bytes": 256, "device": device, "activations": "keep"}
    model, optimizer = hetero.prepare(twin, sgd(twin), **given)
    for number in range(4):
        for m, o in ((plain, reference), (model, optimizer)):
            step(m, o, number)
        same(values(plain), values(model), f"step {number}")
    assert hetero.status(model).mode == "paged"
