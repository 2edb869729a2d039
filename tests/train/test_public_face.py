"""The public face, as a user of torch would expect it to behave."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetero
from hetero.api import engine_of
from hetero.device import SimDevice
from hetero.train.activations.meter import LiveBytes
from tests.equivalence.harness import adamw, same, values
from tests.equivalence.zoo import Stack, loss_of, tokens

HBM = 120_000


def data(number: int = 0) -> Tensor:
    return tokens(torch.Generator().manual_seed(number))


def pair(device: Any = "cpu", hbm: int | None = HBM, **settings: Any) -> tuple[Any, ...]:
    """Return a plain model and optimizer, and the same prepared."""
    torch.manual_seed(3)
    plain = Stack(tied=True)
    twin = copy.deepcopy(plain)
    settings.setdefault("chunk_bytes", 256)
    model, optimizer = hetero.prepare(twin, adamw(twin), device=device, hbm=hbm, **settings)
    return plain, adamw(plain), model, optimizer


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for number in steps:
        loss_of(model, data(number)).backward()
        optimizer.step()
        optimizer.zero_grad()


DEVICES: dict[str, Callable[[], Any]] = {
    "cpu": lambda: "cpu",
    "sim": lambda: SimDevice(seed=2, checked=True),
}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Any:
    return DEVICES[request.param]()


def test_prepare_returns_the_same_model_and_a_torch_optimizer() -> None:
    model = Stack()
    inner = adamw(model)
    prepared, optimizer = hetero.prepare(model, inner, device="cpu", hbm=HBM)
    assert prepared is model
    assert isinstance(optimizer, torch.optim.Optimizer) and isinstance(optimizer, hetero.Optimizer)
    assert optimizer.param_groups is inner.param_groups


def test_state_dicts_go_both_ways_between_hetero_and_torch(device: Any) -> None:
    plain, po, model, optimizer = pair(device)
    train(plain, po, range(3))
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(po.state_dict())
    train(plain, po, range(3, 6))
    train(model, optimizer, range(3, 6))
    same(values(plain), values(model), "after loading torch's states")
    other = Stack(tied=True)
    oo = adamw(other)
    other.load_state_dict(model.state_dict())
    oo.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch aliases what it loads
    train(other, oo, range(6, 8))
    train(model, optimizer, range(6, 8))
    same(values(other), values(model), "after loading hetero's states")


def test_a_saved_state_dict_holds_a_tensors_own_bytes_only() -> None:
    *_, model, optimizer = pair()
    train(model, optimizer, range(2))
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    n_bytes = sum(p.nbytes for p in Stack(tied=True).parameters())
    assert buffer.tell() < 2 * n_bytes + 20_000
    buffer.seek(0)
    same(list(torch.load(buffer).values()), values(model), "reloaded")


def test_a_state_dict_reads_no_frame() -> None:
    *_, model, optimizer = pair()
    train(model, optimizer, range(2))
    before = engine_of(model).residence.manager.counts.copy()
    state = model.state_dict()
    assert engine_of(model).residence.manager.counts == before
    assert not any(v.isnan().any() for v in state.values())


def test_a_write_through_a_state_dict_reaches_the_model(device: Any) -> None:
    plain, po, model, optimizer = pair(device)
    train(plain, po, range(2))
    train(model, optimizer, range(2))
    for side in (plain, model):
        side.state_dict()["blocks.1.up.weight"].mul_(0.5)
    train(plain, po, range(2, 4))
    train(model, optimizer, range(2, 4))
    same(values(plain), values(model), "after writing through a state dict")


def test_a_kept_state_dict_follows_the_updates() -> None:
    plain, po, model, optimizer = pair()
    kept, mine = plain.state_dict(), model.state_dict()
    train(plain, po, range(2))
    train(model, optimizer, range(2))
    same(list(kept.values()), list(mine.values()), "kept state dicts")


def test_a_failed_load_leaves_the_model_working() -> None:
    plain, po, model, optimizer = pair()
    wrong = {**plain.state_dict(), "head.weight": torch.zeros(2, 2)}
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(wrong)
    plain.load_state_dict({k: v for k, v in wrong.items() if k != "head.weight"}, strict=False)
    train(plain, po, range(2))
    train(model, optimizer, range(2))
    same(values(plain), values(model), "after a refused load")


def test_gathered_shows_full_values_and_keeps_writes(device: Any) -> None:
    plain, po, model, optimizer = pair(device)
    weight = model.blocks[2].up.weight
    with hetero.gathered(weight):
        assert torch.equal(weight.clone(), plain.blocks[2].up.weight)
    for side in (plain, model):
        with hetero.gathered(side.blocks[2], write=True), torch.no_grad():
            side.blocks[2].up.weight.mul_(2.0)
            side.blocks[2].down.weight.data.add_(0.5)
    train(plain, po, range(3))
    train(model, optimizer, range(3))
    same(values(plain), values(model), "after gathered writes")


def test_a_write_under_gathered_without_leave_is_undone_and_named() -> None:
    plain, _, model, _ = pair()
    undone = pytest.raises(hetero.StateError, match=r"blocks\.2\.up\.weight.*undone")
    with undone, hetero.gathered(model.blocks[2]), torch.no_grad():
        model.blocks[2].up.weight.zero_()
    same(values(plain), values(model), "after the undone write")


def test_gathering_more_than_fits_is_a_budget_error() -> None:
    plain, _, model, _ = pair(hbm=30_000)
    with pytest.raises(hetero.BudgetError) as caught, hetero.gathered(model):
        pass
    assert "gather fewer parameters at a time" in caught.value.advice
    with torch.no_grad():
        assert torch.equal(plain(data()), model(data()))


@pytest.mark.parametrize("steps", [0, 3])
def test_the_budget_that_a_gather_asks_for_is_enough_at_once(steps: int) -> None:
    _, _, small, optimizer = pair(hbm=40_000)
    train(small, optimizer, range(steps))
    with pytest.raises(hetero.BudgetError) as caught, hetero.gathered(small):
        pass
    assert f"hbm= to at least {caught.value.needed_bytes} bytes" in caught.value.advice

    plain, plain_optimizer, model, optimizer = pair(hbm=caught.value.needed_bytes)
    train(plain, plain_optimizer, range(steps))
    train(model, optimizer, range(steps))
    with hetero.gathered(model):
        same([*plain.parameters()], [p.clone() for p in model.parameters()], "all gathered")


def test_release_gives_back_a_plain_model_and_optimizer(device: Any) -> None:
    plain, po, model, optimizer = pair(device)
    train(plain, po, range(3))
    train(model, optimizer, range(3))
    loss_of(plain, data(9)).backward()
    loss_of(model, data(9)).backward()
    model, inner = hetero.release(model, optimizer)
    assert type(inner) is torch.optim.AdamW
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert all(type(p.grad) is Tensor for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    for side, opt in ((plain, po), (model, inner)):
        opt.step()
        opt.zero_grad()
        train(side, opt, range(3, 6))
    same(values(plain), values(model), "after release")
    copy.deepcopy(model)
    pickle.dumps(model)
    again, optimizer = hetero.prepare(model, inner, device="cpu", hbm=HBM, chunk_bytes=512)
    train(plain, po, range(6, 8))
    train(again, optimizer, range(6, 8))
    same(values(plain), values(again), "prepared again, with states")


def test_a_closure_is_evaluated_and_its_loss_returned() -> None:
    plain, po, model, optimizer = pair()
    losses = []
    for side, opt in ((plain, po), (model, optimizer)):

        def closure(side: nn.Module = side, opt: Any = opt) -> Tensor:
            opt.zero_grad()
            loss = loss_of(side, data())
            loss.backward()
            return loss

        losses.append([opt.step(closure) for _ in range(3)])
    same(losses[0], losses[1], "closure losses")
    same(values(plain), values(model), "closure steps")


def test_schedulers_built_before_and_after_prepare_steer_the_steps(
    recwarn: pytest.WarningsRecorder,
) -> None:
    torch.manual_seed(3)
    plain = Stack(tied=True)
    twin = copy.deepcopy(plain)
    po, inner = adamw(plain), adamw(twin)
    make = torch.optim.lr_scheduler
    first = [make.StepLR(o, 2, 0.5) for o in (po, inner)]
    model, optimizer = hetero.prepare(twin, inner, device="cpu", hbm=HBM, chunk_bytes=256)
    second = [make.LambdaLR(o, lambda n: 1 / (n + 1)) for o in (po, optimizer)]
    for number in range(5):
        for i, (side, opt) in enumerate(((plain, po), (model, optimizer))):
            train(side, opt, range(number, number + 1))
            first[i].step()
            second[i].step()
    assert po.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    same(values(plain), values(model), "scheduled")
    assert not [w for w in recwarn if "lr_scheduler.step" in str(w.message)]


def test_a_group_added_later_is_trained() -> None:
    torch.manual_seed(3)
    plain = Stack()
    twin = copy.deepcopy(plain)
    sides = []
    for side in (plain, twin):
        side.head.requires_grad_(False)
        opt: Any = torch.optim.Adam([p for p in side.parameters() if p.requires_grad], lr=1e-2)
        if side is twin:
            side, opt = hetero.prepare(side, opt, device="cpu", hbm=HBM, chunk_bytes=256)
        train(side, opt, range(2))
        side.head.requires_grad_(True)
        opt.add_param_group({"params": side.head.parameters(), "lr": 3e-3})
        train(side, opt, range(2, 5))
        sides.append(side)
    same(values(sides[0]), values(sides[1]), "added group")
    with pytest.raises(hetero.ConfigError, match="not of the prepared model"):
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})


def test_states_reset_by_the_user_start_afresh() -> None:
    plain, po, model, optimizer = pair()
    for side, opt in ((plain, po), (model, optimizer)):
        train(side, opt, range(2))
        opt.state.clear()
        opt_state = opt.state
        assert not opt_state
        train(side, opt, range(2, 4))
        opt.state[side.head.weight]["exp_avg"].zero_()
        train(side, opt, range(4, 6))
    same(values(plain), values(model), "reset states")


def test_gradients_held_over_zero_grad_keep_their_numbers(device: Any) -> None:
    plain, po, model, optimizer = pair(device)
    held = []
    for side, opt in ((plain, po), (model, optimizer)):
        loss_of(side, data(0)).backward()
        first = [p.grad for p in side.parameters()]
        opt.zero_grad()
        loss_of(side, data(1)).backward()
        held.append([g.clone() for g in first] + [p.grad.clone() for p in side.parameters()])
    same(held[0], held[1], "held gradients")


def test_zero_grad_to_zeros_accumulates_from_zero() -> None:
    plain, po, model, optimizer = pair()
    for side, opt in ((plain, po), (model, optimizer)):
        train(side, opt, range(1))
        loss_of(side, data(1)).backward()
        opt.zero_grad(set_to_none=False)
        assert all(p.grad.abs().sum() == 0 for p in side.parameters())
        train(side, opt, range(2, 4))
    same(values(plain), values(model), "zeroed gradients")


def test_a_gradient_set_by_the_user_is_stepped() -> None:
    plain, po, model, optimizer = pair()
    for side, opt in ((plain, po), (model, optimizer)):
        for p in side.parameters():
            p.grad = torch.linspace(-1, 1, p.numel()).view_as(p)
        opt.step()
    same(values(plain), values(model), "own gradients")


def test_stepping_the_optimizer_that_was_given_away_is_refused() -> None:
    model = Stack()
    inner = adamw(model)
    model, optimizer = hetero.prepare(model, inner, device="cpu", hbm=HBM, chunk_bytes=256)
    loss_of(model, data()).backward()
    with pytest.raises(hetero.StateError, match="prepare returned"):
        inner.step()
    optimizer.step()
    _, inner = hetero.release(model, optimizer)
    inner.step()


def test_two_prepared_models_work_side_by_side() -> None:
    first = pair()
    second = pair(SimDevice(seed=4))
    for number in range(3):
        logits = [side[2](data(number)) for side in (first, second)]
        (logits[0] - logits[1].detach()).pow(2).mean().backward()
        mixed = torch.nn.functional.linear(
            logits[1], second[2].head.weight @ first[2].head.weight.T
        )
        mixed.pow(2).mean().backward()
        for side in (first, second):
            side[3].step()
            side[3].zero_grad()
    plains = [first[0], second[0]]
    optimizers = [first[1], second[1]]
    for number in range(3):
        logits = [side(data(number)) for side in plains]
        (logits[0] - logits[1].detach()).pow(2).mean().backward()
        weight = plains[1].head.weight @ plains[0].head.weight.T
        torch.nn.functional.linear(logits[1], weight).pow(2).mean().backward()
        for opt in optimizers:
            opt.step()
            opt.zero_grad()
    same(values(plains[0]), values(first[2]), "first")
    same(values(plains[1]), values(second[2]), "second")


def test_inference_without_an_optimizer_streams_under_the_budget() -> None:
    torch.manual_seed(3)
    plain = Stack(tied=True).eval()
    model = hetero.prepare(copy.deepcopy(plain), device="cpu", hbm=30_000, chunk_bytes=256)
    evictions = 0
    with torch.no_grad():
        for number in range(4):
            assert torch.equal(plain(data(number)), model(data(number)))
            evictions += hetero.status(model).evictions
    status = hetero.status(model)
    assert evictions >= 3
    assert status.activation_bytes > 0 and status.steps == 4 and "FETCH" in status.schedule
    assert hetero.release(model) is model


def test_status_tells_where_things_are_and_what_moved() -> None:
    *_, model, optimizer = pair()
    train(model, optimizer, range(4))
    status = hetero.status(model)
    assert status.mode == "paged" and status.steps == 4
    assert status.h2d_bytes > 0 and status.d2h_bytes > 0 and status.activation_bytes > 0
    assert status.tiers["HBM"]["budget"] == HBM
    assert status.tiers["HBM"]["used"] <= HBM
    params = sum(p.numel() * 4 for p in model.parameters())
    for kind in ("param", "grad"):
        assert params <= status.tiers["HOST"][kind] < 1.2 * params
    assert 2 * params <= status.tiers["HOST"]["state"] < 2.4 * params
    assert set(status.units) == {"embed", "norm", "head", "model (own parameters)"} | {
        f"blocks.{i}" for i in range(6)
    }
    assert "FETCH" in status.schedule


def test_metadata_of_an_unbound_parameter_moves_no_bytes() -> None:
    plain, _, model, _ = pair()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert (q.shape, q.dtype, q.device) == (p.shape, p.dtype, p.device)
        assert (q.stride(), q.is_contiguous(), q.numel()) == (p.stride(), True, p.numel())
        assert q.requires_grad and q.is_leaf and q.grad is None and isinstance(q, nn.Parameter)
        assert (len(q), q.dim(), q.type(), q.nbytes) == (len(p), p.dim(), p.type(), p.nbytes)
    assert engine_of(model).residence.manager.counts["fetch"] == 0
    assert "Parameter containing" in repr(model.norm.weight)


def test_a_compiled_block_trains_as_its_compiled_twin() -> None:
    torch.manual_seed(3)
    plain = Stack(layers=3)
    sides = []
    for side in (plain, copy.deepcopy(plain)):
        side.blocks[0].compile(backend="aot_eager")
        side.blocks[1] = torch.compile(side.blocks[1], backend="aot_eager")
        side.blocks[2].forward = torch.compile(side.blocks[2].forward, backend="aot_eager")
        opt: Any = adamw(side)
        if sides:
            side, opt = hetero.prepare(side, opt, device="cpu", hbm=90_000, chunk_bytes=256)
        for number in range(4):
            loss_of(side, data(number)).backward()
            opt.step()
            opt.zero_grad()
        sides.append(side)
    same(values(sides[0]), values(sides[1]), "compiled blocks")
    assert hetero.status(sides[1]).mode == "paged"


def test_the_compiler_does_not_compile_how_we_count() -> None:
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    torch._dynamo.reset()
    model = Stack(layers=3)
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend="eager")
    model, opt = hetero.prepare(model, adamw(model), device="cpu:sim", hbm=90_000, chunk_bytes=256)
    for number in range(3):
        loss_of(model, data(number)).backward()
        opt.step()
        opt.zero_grad()
    assert not _debug_get_cache_entry_list(LiveBytes.__torch_dispatch__.__code__)


def test_a_write_between_forward_and_backward_is_torchs_own_error() -> None:
    _, _, model, _ = pair()
    loss = loss_of(model, data())
    with torch.no_grad():
        model.blocks[1].up.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_step_between_forward_and_backward_is_torchs_own_error() -> None:
    *_, model, optimizer = pair(hbm=250_000)
    early = loss_of(model, data(1))
    loss_of(model, data(2)).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        early.backward()


def test_an_activation_changed_in_place_is_torchs_own_error() -> None:
    *_, model, _ = pair()
    x = torch.randn(2, 7, 16, requires_grad=True)
    hidden: list[Tensor] = []
    handle = model.blocks[0].down.register_forward_pre_hook(lambda m, a: hidden.append(a[0]))
    out = model.blocks[0](x)
    handle.remove()
    hidden[0].detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_an_unused_parameter_has_no_gradient_and_does_not_age() -> None:
    *_, model, optimizer = pair()
    used = model.blocks[0]
    used(torch.randn(2, 7, 16)).sum().backward()
    optimizer.step()
    assert model.blocks[3].up.weight.grad is None
    assert model.blocks[3].up.weight not in optimizer.state
    assert optimizer.state[used.up.weight]["step"] == 1
