"""Gradients that are shared, held, replaced or looked at: each of these has once been wrong."""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hetero
from hetero.api import engine_of, prepare_tuned
from hetero.config import Config, HostLimit
from hetero.cores import torch_threads
from hetero.device import CpuDevice, SimDevice
from hetero.errors import BudgetError
from hetero.jobs import Worker
from hetero.memory.home import Home
from hetero.train.engine.tuning import Tuning
from hetero.train.gradients.slot import GradSlot, whole_norm
from tests.equivalence.harness import same, stay_paged, values

PLACES: dict[str, dict[str, Any]] = {
    "resident": {"device": "cpu", "hbm": None},
    "cpu": {"device": "cpu", "hbm": 20_000},
    "sim": {"device": "cpu:sim", "hbm": 20_000},
}
PART = Home.part
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
each_place = pytest.mark.parametrize("place", PLACES)


def prepare(
    model: nn.Module, *, place: str, tuning: Tuning | None = None, lr: float = 1.0, **settings: Any
) -> tuple[Any, Any]:
    given = {**PLACES[place], **settings}
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    config = Config.load(chunk_bytes=256, **given)
    model, optimizer = prepare_tuned(model, optimizer, config, tuning)
    engine = engine_of(model)
    stay_paged(engine)
    return model, optimizer


def masters(model: nn.Module, optimizer: Any) -> list[Tensor]:
    optimizer.state_dict()
    engine = engine_of(model)
    return [engine.setup.masters.value(engine.setup.segment(p)) for p in engine.setup.params]


def late() -> Tuning:
    """Threads that come to every slice too late for whoever does not wait."""
    return Tuning(worker=Worker(1), pause=lambda: time.sleep(0.002))


def linears(n: int = 2, width: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(n)))


def batch(number: int, width: int = 6) -> Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(number))


class Joined(nn.Module):
    """Two parameters to which autograd hands one and the same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(300)), nn.Parameter(torch.randn(300))

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return (self.a + self.b if both else self.a) * x


def test_a_sum_takes_one_of_torchs_threads_and_its_norm_as_many_as_the_launcher_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bits of a norm depend on their number; two teams at once hinder each other."""
    adding: list[int] = []
    norming: list[int] = []

    def note(found: list[int]) -> None:
        if threading.current_thread().name.startswith("hetero-update"):
            found.append(torch.get_num_threads())

    def part(home: Home, run: slice) -> Tensor:
        note(adding)
        return PART(home, run)

    def norm(*args: Any, **kwargs: Any) -> Tensor:
        note(norming)
        return whole_norm(*args, **kwargs)

    with torch_threads(2):
        plain, theirs = linears(2, 512), linears(2, 512)
        tuning = Tuning(worker=Worker(2))
        model, optimizer = prepare(theirs, place="sim", hbm=2**23, tuning=tuning)
        inner = torch.optim.SGD(plain.parameters(), lr=1.0)
        for step in range(3):
            for number in range(3):
                for m in (plain, model):
                    m(batch(3 * step + number, 512)).square().mean().backward()
                if step == 2 and number == 1:
                    engine_of(model).residence.quiesce()
                    monkeypatch.setattr(Home, "part", part)
                    monkeypatch.setattr("hetero.train.gradients.sums.whole_norm", norm)
            for job in list(engine_of(model).residence.trained.grads.jobs.values()):
                while not job.done:
                    time.sleep(0.001)
            monkeypatch.undo()
            theirs_norm = nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
            assert torch.equal(theirs_norm, optimizer.clip_grad_norm_(1e-3))
            for o in (inner, optimizer):
                o.step()
                o.zero_grad()
    assert set(adding) == {1} and set(norming) == {2}


@each_place
@pytest.mark.parametrize("checked", [False, True])
def test_a_gradient_that_two_parameters_share_is_added_as_it_was(place: str, checked: bool) -> None:
    torch.manual_seed(0)
    plain = Joined()
    settings = {"device": SimDevice(seed=3, checked=True)} if checked and place == "sim" else {}
    model, ours = prepare(copy.deepcopy(plain), place=place, tuning=late(), **settings)
    theirs = torch.optim.SGD(plain.parameters(), lr=1.0)
    for step in range(3):
        for part in range(6):
            x = torch.randn(300, generator=torch.Generator().manual_seed(10 * step + part))
            for m in (plain, model):
                m(x, part > 0).square().mean().mul(100).backward()
        for o in (theirs, ours):
            o.step()
            o.zero_grad()
        same(values(plain), values(model), f"step {step}")


@each_place
def test_a_gradient_that_its_user_writes_after_backward_was_added_before(place: str) -> None:
    plain = linears(1)
    model, ours = prepare(copy.deepcopy(plain), place=place, tuning=late())
    theirs = torch.optim.SGD(plain.parameters(), lr=1.0)
    for step in range(3):
        for m, o in ((plain, theirs), (model, ours)):
            for part in range(3):
                x = torch.zeros(6, requires_grad=True)
                ((m[0].bias + x) * batch(part)[0]).square().sum().backward()
                x.grad.sign_()  # the very tensor that the bias was given
            o.step()
            o.zero_grad()
        same(values(plain), values(model), f"step {step}")


class Kept(torch.autograd.Function):
    """Refers to a gradient from C++ alone, as a collective under way does."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, anchor: Tensor) -> Tensor:
        ctx.save_for_backward(grad)
        return anchor * 1

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, grads[0]


@each_place
def test_what_code_of_torch_that_keeps_a_gradient_writes_to_it_counts(place: str) -> None:
    plain, theirs = linears(), linears()
    model, optimizer = prepare(theirs, place=place)
    inner, anchor = torch.optim.SGD(plain.parameters(), lr=1.0), torch.ones(1, requires_grad=True)
    kept: list[Any] = []

    def keep(param: Tensor) -> None:
        with torch.enable_grad():
            kept.append(Kept.apply(param.grad, anchor))

    for number, (m, opt) in enumerate([(plain, inner), (model, optimizer)] * 3):
        hooks = [p.register_post_accumulate_grad_hook(keep) for p in m.parameters()]
        m(batch(number // 2)).square().mean().backward()
        for each in kept:
            each.grad_fn.saved_tensors[0].mul_(0.5)
        kept.clear()
        opt.step()
        opt.zero_grad()
        for hook in hooks:
            hook.remove()
    same(values(plain), values(model), "weights")


@each_place
def test_what_a_hook_adds_to_a_gradient_is_added_at_once(place: str) -> None:
    plain = linears()
    model, ours = prepare(copy.deepcopy(plain), place=place, tuning=late())
    theirs = torch.optim.SGD(plain.parameters(), lr=1.0)
    buffers = [torch.empty(100), torch.empty(100)]
    for m, buffer in zip((plain, model), buffers, strict=True):
        draw = torch.Generator()
        draw.manual_seed(5)

        def noise(p: Any, buffer: Tensor = buffer, draw: torch.Generator = draw) -> None:
            p.grad.add_(buffer[: p.numel()].view(p.shape).normal_(generator=draw))

        for p in m.parameters():
            p.register_post_accumulate_grad_hook(noise)
    for step in range(4):
        for m, o in ((plain, theirs), (model, ours)):
            for part in range(3):
                m(batch(10 * step + part)).square().mean().backward()
            o.step()
            o.zero_grad()
        same(values(plain), values(model), f"step {step}")


@each_place
def test_a_plain_gradient_beside_one_that_was_looked_at_is_stepped(place: str) -> None:
    model, optimizer = prepare(linears(1), place=place, precision="bf16")
    before = masters(model, optimizer)
    model(batch(0).bfloat16()).square().mean().backward()
    model[0].weight.grad = model[0].weight.grad.clone()
    model[0].bias.grad.view(-1)[0]
    wanted = [b - p.grad.float() for b, p in zip(before, model.parameters(), strict=True)]
    optimizer.step()
    same(masters(model, optimizer), wanted, "masters")


@each_place
def test_fp32_parts_of_an_fp16_model_are_unscaled_in_every_micro_step(place: str) -> None:
    model, _ = prepare(linears(), place=place, precision="fp16", keep_fp32=["1"])
    engine_of(model).scaler.scale = 2.0**10

    def backward() -> None:
        hetero.backward(model[1](model[0](batch(0).half()).float()).square().mean())

    backward()
    once = [p.grad.float().clone() for p in model.parameters()]
    backward()
    for p, grad in zip(model.parameters(), once, strict=True):
        assert torch.allclose(p.grad.float(), 2 * grad, rtol=1e-3)


@each_place
def test_a_clip_reaches_gradients_that_no_optimizer_steps(place: str) -> None:
    plain = linears()
    prepared = copy.deepcopy(plain)
    theirs, inner = (torch.optim.SGD([m[0].weight, m[1].weight], lr=1.0) for m in (plain, prepared))
    config = Config.load(chunk_bytes=256, **PLACES[place])
    model, ours = prepare_tuned(prepared, inner, config, None)
    for step in range(3):
        for m, o in ((plain, theirs), (model, ours)):
            m(batch(step)).square().mean().backward()
            nn.utils.clip_grad_norm_(m.parameters(), 1e-2)
            o.step()
            o.zero_grad()  # the biases go on adding up
        kept = [[m[0].bias.grad.clone(), m[1].bias.grad.clone()] for m in (plain, model)]
        same(*kept, f"gradients of step {step}")
        same(values(plain), values(model), f"step {step}")


class Fused(nn.Module):
    """Its gradients are views of one buffer, as those of fused projections are."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(5, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.cat([self.a, self.b]).T


@each_place
def test_gradients_made_in_one_piece_add_up_in_fp32(place: str) -> None:
    torch.manual_seed(0)
    model, optimizer = prepare(Fused(), place=place, precision="bf16")
    before = masters(model, optimizer)
    sums = [torch.zeros_like(b) for b in before]
    for part in range(4):
        leaves = [p.detach().clone().requires_grad_() for p in model.parameters()]
        (batch(part).bfloat16() @ torch.cat(leaves).T).square().mean().backward()
        for total, leaf in zip(sums, leaves, strict=True):
            total += leaf.grad.float()
        model(batch(part).bfloat16()).square().mean().backward()
    optimizer.step()
    wanted = [b - total for b, total in zip(before, sums, strict=True)]
    same(masters(model, optimizer), wanted, "masters")


@each_place
def test_norms_under_loss_scaling_are_those_of_unscaled_gradients(place: str) -> None:
    torch.manual_seed(0)
    model, optimizer = prepare(Fused(), place=place, precision="fp16")
    kept: list[Any] = []
    model.a.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))
    engine_of(model).scaler.scale = 2.0**8
    leaves = [p.detach().clone().requires_grad_() for p in model.parameters()]
    (batch(0).half() @ torch.cat(leaves).T).float().square().mean().backward()
    hetero.backward(model(batch(0).half()).float().square().mean())
    truth = nn.utils.get_total_norm([leaf.grad.float() for leaf in leaves])
    assert torch.allclose(optimizer.clip_grad_norm_(1.0), truth, rtol=1e-3)


@each_place
def test_a_gradient_that_a_user_replaces_between_scaled_passes_is_not_scaled(place: str) -> None:
    model, optimizer = prepare(linears(1), place=place, precision="fp16")
    engine_of(model).scaler.scale = 2.0**8
    before = masters(model, optimizer)
    hetero.backward(model(batch(0).half()).float().square().mean())
    once = [p.grad.clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    hetero.backward(model(batch(0).half()).float().square().mean())
    optimizer.step()
    for now, b, grad in zip(masters(model, optimizer), before, once, strict=True):
        assert torch.allclose(now, b - 1 - grad.float(), atol=1e-5)


@each_place
def test_a_pass_that_failed_leaves_unscaled_gradients_to_which_the_next_adds(place: str) -> None:
    model, optimizer = prepare(linears(3), place=place, precision="fp16")
    engine_of(model).scaler.scale = 2.0**8
    before = masters(model, optimizer)
    first, second = (scaled_gradients(model, batch(number).half()) for number in (0, 1))
    hook = model[0].weight.register_hook(raise_interrupted)
    with pytest.raises(InterruptedError):
        hetero.backward(model(batch(0).half()).float().square().mean())
    hook.remove()
    shown = [p.grad.float() for p in list(model.parameters())[2:]]
    same(shown, [g.half().float() for g in first[2:]], "what the pass left")
    hetero.backward(model(batch(1).half()).float().square().mean())
    optimizer.step()
    first[0].zero_()  # the hook came before it
    wanted = [b - (one + two) for b, one, two in zip(before, first, second, strict=True)]
    now = masters(model, optimizer)
    same([now[0], *now[2:]], [wanted[0], *wanted[2:]], "masters")


def raise_interrupted(grad: Tensor) -> None:
    raise InterruptedError


def scaled_gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """What plain autograd makes of the model's weights under a scale of 256, unscaled in fp32."""
    plain = linears(3).half()
    plain.load_state_dict(model.state_dict())
    (plain(x).float().square().mean() * 2.0**8).backward()
    return [p.grad.float() * 2.0**-8 for p in plain.parameters()]


class Twice(nn.Module):
    """A layer used plainly and under a reentrant checkpoint: its gradients come twice in a pass."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(checkpoint(self.layer, x, use_reentrant=True))


@pytest.mark.parametrize("bias", [True, False])
@each_place
def test_gradients_that_come_twice_in_a_pass_add_up_in_fp32(place: str, bias: bool) -> None:
    torch.manual_seed(0)
    model, optimizer = prepare(Twice(bias), place=place, precision="bf16")
    before = masters(model, optimizer)
    uses = [[p.detach().clone().requires_grad_() for p in model.parameters()] for _ in range(2)]
    x = batch(0).bfloat16().requires_grad_()
    F.linear(F.linear(x, *uses[0]), *uses[1]).square().mean().backward()
    model(x).square().mean().backward()
    optimizer.step()
    wanted = [
        b - (two.grad.float() + one.grad.float()) for b, one, two in zip(before, *uses, strict=True)
    ]
    same(masters(model, optimizer), wanted, "masters")


@each_place
def test_gradients_of_a_pass_that_failed_and_of_the_next_add_up_in_fp32(place: str) -> None:
    model, optimizer = prepare(linears(2), place=place, precision="bf16")
    before = masters(model, optimizer)
    sums = [torch.zeros_like(b) for b in before]
    for number in range(2):
        plain = linears(2).bfloat16()
        plain.load_state_dict(model.state_dict())
        plain(batch(number).bfloat16()).square().mean().backward()
        for total, p in zip(sums[2:], list(plain.parameters())[2:], strict=True):
            total += p.grad.float()
    hook = model[0].weight.register_hook(raise_interrupted)
    with pytest.raises(InterruptedError):
        model(batch(0).bfloat16()).square().mean().backward()
    hook.remove()
    model(batch(1).bfloat16()).square().mean().backward()
    optimizer.step()
    wanted = [b - total for b, total in zip(before, sums, strict=True)]
    same(masters(model, optimizer)[2:], wanted[2:], "masters")


def test_a_loss_that_leads_outside_the_fp16_models_is_refused() -> None:
    model, _ = prepare(linears(), place="sim", precision="fp16")
    head = nn.Linear(6, 1)
    with pytest.raises(hetero.StateError, match="outside the models"):
        hetero.backward(head(model(batch(0).half()).float()).sum())
    assert head.weight.grad is None


def test_two_fp16_models_share_one_scale() -> None:
    first, one = prepare(linears(), place="sim", precision="fp16")
    second, two = prepare(linears(), place="resident", precision="fp16")
    engine_of(first).scaler.scale, engine_of(second).scaler.scale = 2.0**6, 2.0**9
    hetero.backward(second(first(batch(0).half())).float().square().mean())
    for model in (first, second):
        assert all(p.grad.abs().max() < 5 for p in model.parameters())
    one.step(), two.step()


def test_a_weight_that_was_frozen_at_prepare_does_not_join_without_a_master() -> None:
    model = linears()
    model[0].requires_grad_(False)
    inner = torch.optim.SGD(model[1].parameters(), lr=1e-4)
    model, optimizer = hetero.prepare(model, inner, device="cpu", hbm=20_000, precision="bf16")
    with pytest.raises(hetero.ConfigError, match=r"0\.weight.*no fp32 master"):
        optimizer.add_param_group({"params": list(model[0].parameters())})


def test_masters_of_another_precision_are_refused() -> None:
    model, optimizer = prepare(linears(), place="sim", precision="bf16")
    saved = optimizer.state_dict()
    other, fresh = prepare(linears(), place="sim", precision="fp16")
    other.load_state_dict(model.state_dict())
    with pytest.raises(hetero.StateError, match=r"masters of torch\.int16"):
        fresh.load_state_dict(saved)


def train_bf16(
    place: str, between: Callable[[Any, Any], Any], *, lr: float = 0.01, steps: int = 3
) -> list[Tensor]:
    model, optimizer = prepare(linears(), place=place, precision="bf16", lr=lr)
    for step in range(steps):
        model(batch(step).bfloat16()).square().mean().backward()
        between(model, optimizer)
        optimizer.zero_grad()
    return masters(model, optimizer)


@each_place
@pytest.mark.parametrize("write", [True, False])
def test_a_step_inside_gathered_is_nobody_s_write(place: str, write: bool) -> None:
    def inside(model: nn.Module, optimizer: Any) -> None:
        with hetero.gathered(model, write=write):
            optimizer.step()

    plainly = train_bf16("resident", lambda model, optimizer: optimizer.step())
    same(train_bf16(place, inside), plainly, "masters")


@each_place
def test_a_saved_master_knows_of_the_last_write(place: str) -> None:
    model, optimizer = prepare(linears(), place=place, precision="bf16", lr=0.01)
    for step in range(2):
        model(batch(step).bfloat16()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model[0].weight.mul_(0.5)
    saved = copy.deepcopy(optimizer.state_dict()["masters"])
    assert not saved[0].any() and saved[1].any()


@each_place
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_a_load_after_a_write_is_the_load(place: str, order: str) -> None:
    model, optimizer = prepare(linears(), place=place, precision="bf16", lr=0.01)
    for step in range(2):
        model(batch(step).bfloat16()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    truth = masters(model, optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()
    for part in (0, 1) if order == "model first" else (1, 0):
        (model, optimizer)[part].load_state_dict(saved[part])
    same(masters(model, optimizer), truth, "masters")
    with torch.no_grad():
        model[0].weight.zero_()
    optimizer.step()  # without gradients: closes what was loaded
    assert not masters(model, optimizer)[0].any()


@pytest.mark.parametrize("clip", ["ours", "torch's"])
def test_a_clip_of_known_norms_neither_waits_for_gradients_nor_reads_them(
    clip: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = prepare(linears(), place="sim")

    def run() -> None:
        model(batch(0)).square().sum().backward()
        if clip == "ours":
            optimizer.clip_grad_norm_(0.1)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    run()  # from here on norms are taken as gradients leave
    optimizer.step()
    optimizer.zero_grad()
    with monkeypatch.context() as patch:
        patch.setattr(GradSlot, "stored", lambda slot: pytest.fail("a gradient is read"))
        run()
    optimizer.step()


@each_place
def test_a_value_clip_does_not_depend_on_the_step_before(place: str) -> None:
    found = []
    for parts in (1, 2):
        model, optimizer = prepare(linears(), place=place, precision="bf16", lr=0.5)
        for _ in range(parts):
            model(batch(0).bfloat16()).square().mean().backward()
        optimizer.zero_grad()
        optimizer.step()
        model(batch(1).bfloat16()).square().mean().backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        found.append(masters(model, optimizer))
    same(*found, "masters")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_a_forked_child_can_use_the_model_right_after_a_step() -> None:
    model, optimizer = prepare(linears(), place="sim", tuning=late())
    for step in range(2):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        good = bool(torch.isfinite(model(batch(3))).all())
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.isfinite(model(batch(3))).all()


@each_place
def test_a_gradient_that_no_step_takes_waits_from_step_to_step(place: str) -> None:
    def train(prepared: bool) -> list[Tensor]:
        model = linears(4)
        weights, biases = [m.weight for m in model], [m.bias for m in model]
        optimizer: Any = torch.optim.SGD(weights, lr=0.5)
        if prepared:
            config = Config.load(chunk_bytes=256, **PLACES[place])
            model, optimizer = prepare_tuned(model, optimizer, config, late())
            stay_paged(engine_of(model))
        for step in range(5):
            for bias in biases:  # two steps in turn read their buckets and bring nothing new
                bias.requires_grad_(step not in (2, 3))
            model(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [*values(model), *(bias.grad.clone() for bias in biases)]

    same(train(True), train(False), "weights and the gradients of biases")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("place", ["cpu", "sim"])
def test_gradients_of_the_first_step_go_with_their_updates(place: str, precision: str) -> None:
    model = linears()
    optimizer = torch.optim.AdamW(model.parameters())
    config = Config.load(chunk_bytes=256, precision=precision, **PLACES[place])
    model, optimizer = prepare_tuned(model, optimizer, config, None)
    stay_paged(engine_of(model))
    x = batch(0).to(next(model.parameters()).dtype)
    model(x).sum().backward()
    model(x)  # all gradients are home
    slots = [weakref.ref(param.grad.slot) for param in model.parameters()]
    assert all(slot() is not None for slot in slots)
    optimizer.step()
    optimizer.zero_grad()
    model(x)  # waits for every update
    # a gradient that lives is brought to the device when the next one takes its home
    assert [slot() for slot in slots] == [None] * len(slots)


def test_sums_that_ram_cannot_hold_are_refused_before_they_are_made() -> None:
    def prepared(n_bytes: int) -> tuple[Any, Any]:
        device = CpuDevice()
        device.host_limit = lambda: HostLimit(n_bytes, "a small machine")
        model = linears(4)
        optimizer = torch.optim.AdamW(model.parameters())
        return hetero.prepare(
            *(model, optimizer), device=device, precision="bf16", hbm=100_000, chunk_bytes=256
        )

    def accumulate(model: Any) -> None:
        for number in range(2):
            model(batch(number).bfloat16()).float().square().mean().backward()

    roomy, optimizer = prepared(1_000_000)
    plan = engine_of(roomy).setup.blueprint
    held = sum(p.nbytes for p in linears(4).parameters())
    accumulate(roomy)
    tight, optimizer = prepared(100_000 + plan.home_bytes - held + 100)
    tight(batch(0).bfloat16()).float().square().mean().backward()
    optimizer.step()  # one backward pass a step needs no sum
    optimizer.zero_grad()
    with pytest.raises(BudgetError, match="summed in fp32") as caught:
        accumulate(tight)
    assert caught.value.advice and "nvme=" in caught.value.advice


@each_place
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_gradients_that_came_before_prepare_are_part_of_the_first_sum(
    place: str, precision: str
) -> None:
    """In fp32, also where the weights are not: as the sum goes on."""

    def first(model: nn.Module) -> None:
        for number, param in enumerate(model.parameters()):
            if number != 1:
                param.grad = torch.randn(
                    param.shape, generator=torch.Generator().manual_seed(number)
                )

    def train(given: bool) -> tuple[list[Tensor], list[Tensor | None]]:
        model = linears(3)
        if given:
            first(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        config = Config.load(chunk_bytes=256, precision=precision, **PLACES[place])
        ours, steps = prepare_tuned(model, optimizer, config, None)
        stay_paged(engine_of(ours))
        before = [None if p.grad is None else p.grad.float().clone() for p in ours.parameters()]
        weights = masters(ours, steps) if precision != "fp32" else values(ours)
        dtype = next(ours.parameters()).dtype
        for number in range(2):
            hetero.backward(ours(batch(number).to(dtype)).float().square().mean())
        steps.step()
        after = masters(ours, steps) if precision != "fp32" else values(ours)
        return [a - b for a, b in zip(weights, after, strict=True)], before

    with_first, shown = train(True)
    without, none = train(False)
    twin = linears(3)
    first(twin)
    assert none == [None] * len(none)
    for ours, plain, seen, param in zip(with_first, without, shown, twin.parameters(), strict=True):
        if param.grad is None:
            assert seen is None and torch.equal(ours, plain)
            continue
        assert torch.allclose(ours, plain + param.grad, atol=1e-6)  # no 2-byte number is near
        assert torch.equal(seen, param.grad.to(DTYPES[precision]).float())
