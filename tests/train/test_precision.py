"""bf16 and fp16 training against plain references: fp32 masters, working copies, fp32 sums."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hetero
from hetero.api import engine_of, prepare_tuned
from hetero.config import Config
from hetero.device import SimDevice
from hetero.errors import StorageError
from hetero.jobs import Worker
from hetero.train.engine.tuning import Tuning
from tests.equivalence.harness import stay_paged

F32 = np.float32
WORKING = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Net(nn.Module):
    """Blocks of odd sizes with norms, a tied matrix and a parameter that is used now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(4))
        self.spare = nn.Linear(9, 9)
        self.last = nn.Linear(9, 9)
        self.last.weight = self.blocks[0].tie.weight

    def forward(self, x: Tensor, *, spare: bool = False) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(self.spare(x) if spare else x)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(9)
        self.up = nn.Linear(9, 33)
        self.down = nn.Linear(33, 9)
        self.tie = nn.Linear(9, 9, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.tie(self.down(torch.tanh(self.up(self.norm(x)))))


def rounded(master: Tensor, precision: str) -> Tensor:
    """The working weight of a master, written independently of the library (numpy)."""
    if precision == "fp16":
        return master.half()
    bits = master.detach().numpy().view(np.uint32).astype(np.uint64)
    high = ((bits + 0x8000) >> 16).astype(np.uint16)  # nearest, ties away from zero
    return torch.from_numpy(high.view(np.int16).copy()).view(torch.bfloat16)


def np_adamw(p: Any, g: Any, s: dict[str, Any], step: int, lr: float, decay: float = 0.01) -> Any:
    b1, b2, eps = 0.9, 0.999, 1e-8
    m, v = s.setdefault("m", np.zeros_like(p)), s.setdefault("v", np.zeros_like(p))
    p = p * F32(1 - lr * decay)
    m += (g - m) * F32(1 - b1)
    v *= F32(b2)
    v += F32(1 - b2) * g * g
    root = np.sqrt(v) / F32((1 - b2**step) ** 0.5)
    return p + F32(-(lr / (1 - b1**step))) * m / (root + F32(eps))


def np_sgd(p: Any, g: Any, s: dict[str, Any], step: int, lr: float) -> Any:
    return p + F32(-lr) * g


def np_momentum(p: Any, g: Any, s: dict[str, Any], step: int, lr: float) -> Any:
    s["b"] = g.copy() if step == 1 else s["b"] * F32(0.9) + g
    return p + F32(-lr) * s["b"]


RULES: dict[str, tuple[Callable[..., Any], Callable[..., torch.optim.Optimizer]]] = {
    "adamw": (np_adamw, lambda ps, lr: torch.optim.AdamW(ps, lr=lr)),
    "sgd": (np_sgd, lambda ps, lr: torch.optim.SGD(ps, lr=lr)),
    "momentum": (np_momentum, lambda ps, lr: torch.optim.SGD(ps, lr=lr, momentum=0.9)),
}


class Reference:
    """A model of working weights, its fp32 masters and sums, and a rule in numpy."""

    def __init__(
        self, model: nn.Module, rule: str, precision: str, lr: float, place: str = "cpu"
    ) -> None:
        self.precision, self.lr, self.place = precision, lr, place
        self.model = copy.deepcopy(model).to(place)
        self.rule = RULES[rule][0]
        self.params = list(self.model.parameters())
        self.masters = [p.detach().cpu().clone() for p in self.params]
        self.sums: list[Tensor | None] = [None] * len(self.params)
        self.states: list[dict[str, Any]] = [{} for _ in self.params]
        self.steps = [0] * len(self.params)
        self.scale = 1.0
        for param, master in zip(self.params, self.masters, strict=True):
            param.data = rounded(master, precision).to(place)

    def backward(self, loss: Tensor) -> None:
        (loss.float() * self.scale).backward()
        for i, param in enumerate(self.params):
            if param.grad is not None:
                grad = param.grad.cpu().float() * (1.0 / self.scale)
                self.sums[i] = grad if self.sums[i] is None else self.sums[i] + grad
                param.grad = None

    def step(self, max_norm: float | None = None) -> Tensor | None:
        """Clip as torch does, update by numpy, round."""
        held = [nn.Parameter(m) for m in self.masters]
        for p, total in zip(held, self.sums, strict=True):
            p.grad = total
        norm = None if max_norm is None else nn.utils.clip_grad_norm_(held, max_norm)
        for i, p in enumerate(held):
            if p.grad is None:
                continue
            self.steps[i] += 1
            after = self.rule(
                self.masters[i].numpy(), p.grad.numpy(), self.states[i], self.steps[i], self.lr
            )
            self.masters[i] = torch.from_numpy(after)
            self.params[i].data = rounded(self.masters[i], self.precision).to(self.place)
        self.sums = [None] * len(self.params)
        return norm


def start(
    precision: str,
    rule: str = "adamw",
    *,
    lr: float = 0.01,
    hbm: int | None = 40_000,
    device: Any = "cpu:sim",
    tuning: Tuning | None = None,
    place: str = "cpu",
    **settings: Any,
) -> tuple[Reference, Any, Any]:
    torch.manual_seed(0)
    model = Net()
    reference = Reference(model, rule, precision, lr, place)
    config = Config.load(device=device, hbm=hbm, precision=precision, chunk_bytes=256, **settings)
    plain = RULES[rule][1](model.parameters(), lr)
    model, optimizer = prepare_tuned(model, plain, config, tuning)
    if precision == "fp16":
        engine_of(model).scaler.scale = 2.0**8  # what this model bears without overflow
    return reference, model, optimizer


def data(number: int, precision: str) -> Tensor:
    g = torch.Generator().manual_seed(number)
    return torch.randn(5, 9, generator=g).to(WORKING[precision])


def loss_of(model: nn.Module, x: Tensor, **flags: Any) -> Tensor:
    return model(x, **flags).square().mean()


def same(reference: Reference, model: nn.Module, what: str) -> None:
    """Working weights and masters, bit by bit."""
    engine = engine_of(model)
    weights = [v for k, v in model.state_dict().items() if k != "last.weight"]
    for i, (param, ours) in enumerate(zip(reference.params, weights, strict=True)):
        assert ours.dtype is param.dtype
        left, right = ours.cpu().view(torch.int16), param.detach().cpu().view(torch.int16)
        assert torch.equal(left, right), (what, i)
    engine.finish()
    for i, (_, segment) in enumerate(engine.setup.blueprint.layout.home):
        ours = engine.setup.masters.value(segment)
        assert torch.equal(ours.view(torch.int32), reference.masters[i].view(torch.int32)), (
            what,
            i,
        )


def train(
    reference: Reference,
    model: Any,
    optimizer: Any,
    *,
    steps: int = 6,
    micro: int = 1,
    clip: float | None = None,
) -> None:
    for number in range(steps):
        for part in range(micro):
            x = data(10 * number + part, reference.precision).to(reference.place)
            flags = {"spare": number in (1, 4)}
            reference.scale = optimizer.loss_scale
            left = loss_of(reference.model, x, **flags)
            right = loss_of(model, x, **flags)
            assert torch.equal(left, right), (number, part)
            reference.backward(left / micro)
            hetero.backward(right / micro)
        norm = reference.step(clip)
        if clip is not None:
            assert torch.equal(optimizer.clip_grad_norm_(clip).cpu(), norm), number
        optimizer.step()
        optimizer.zero_grad()
        same(reference, model, f"step {number}")


@pytest.mark.campaign(seconds=1)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_training_equals_the_plain_reference(precision: str, rule: str) -> None:
    reference, model, optimizer = start(precision, rule)
    stay_paged(engine_of(model))
    train(reference, model, optimizer, clip=0.05)
    assert engine_of(model).setup.stats.counts["fetch"] > 3


@pytest.mark.campaign(seconds=1.5)
@pytest.mark.parametrize("micro", [2, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_micro_steps_add_up_in_fp32(precision: str, micro: int) -> None:
    reference, model, optimizer = start(precision, "sgd", lr=0.5)
    train(reference, model, optimizer, micro=micro, clip=0.05)


@pytest.mark.campaign(seconds=1)
@pytest.mark.parametrize(
    "settings",
    [
        {"device": "cpu", "hbm": None},
        {"device": "cpu", "hbm": 25_000},
        {"device": "cpu", "hbm": 400_000},
        {"device": SimDevice(seed=5, lazy=0.0), "hbm": 30_000},
        {"device": SimDevice(seed=6, checked=True), "hbm": 30_000},
        {"tuning": Tuning(native=False)},
        {"tuning": Tuning(update_on_device=True)},
        {"tuning": Tuning(worker=Worker(0))},
    ],
    ids=[
        "resident",
        "cpu",
        "becomes-resident",
        "sim",
        "checked",
        "blocks",
        "streamed",
        "synchronous",
    ],
)
def test_placement_changes_nothing(settings: dict[str, Any]) -> None:
    reference, model, optimizer = start("bf16", **settings)
    train(reference, model, optimizer, micro=2, clip=0.05)


def test_a_clip_inside_step_is_the_same_clip() -> None:
    reference, model, optimizer = start("bf16", max_grad_norm=0.05)
    for number in range(4):
        x = data(number, "bf16")
        reference.backward(loss_of(reference.model, x))
        loss_of(model, x).backward()
        reference.step(0.05)
        optimizer.step()
        optimizer.zero_grad()
        same(reference, model, f"step {number}")


@pytest.mark.parametrize("place", ["paged", "resident"])
def test_what_is_written_inside_gathered_is_its_own_master(place: str) -> None:
    hbm, device = (40_000, "cpu:sim") if place == "paged" else (None, "cpu")
    reference, model, optimizer = start("bf16", hbm=hbm, device=device)
    train(reference, model, optimizer, steps=2)
    with hetero.gathered(model.blocks[1].up, write=True), torch.no_grad():
        model.blocks[1].up.weight.mul_(0.5)
    index = [n for n, _ in reference.model.named_parameters()].index("blocks.1.up.weight")
    reference.params[index].data.mul_(0.5)
    reference.masters[index] = reference.params[index].detach().float()
    train(reference, model, optimizer, steps=2)


@pytest.mark.parametrize("place", ["paged", "resident"])
def test_a_written_weight_is_its_own_master(place: str) -> None:
    hbm, device = (40_000, "cpu:sim") if place == "paged" else (None, "cpu")
    reference, model, optimizer = start("bf16", hbm=hbm, device=device)
    train(reference, model, optimizer, steps=2)
    with torch.no_grad():
        model.blocks[1].up.weight.clamp_(-0.1, 0.1)  # counted: the whole tensor is its own master
        model.blocks[2].up.weight.data[3] = 0.25  # not counted: what changed is
    index = {n: i for i, (n, _) in enumerate(reference.model.named_parameters())}
    one, two = index["blocks.1.up.weight"], index["blocks.2.up.weight"]
    with torch.no_grad():
        reference.params[one].data.clamp_(-0.1, 0.1)
        reference.masters[one] = reference.params[one].detach().float()
        reference.params[two].data[3] = 0.25
        reference.masters[two][3] = 0.25
    train(reference, model, optimizer, steps=2)


@pytest.mark.parametrize("when", ["before a step", "between steps", "after a forward"])
@pytest.mark.parametrize("place", ["paged", "resident", "home"])
def test_a_weight_written_through_a_view_is_its_own_master_as_a_whole(
    place: str, when: str
) -> None:
    hbm, device = (None, "cpu") if place == "resident" else (40_000, "cpu:sim")
    tuning = Tuning(homes_on_hbm=True) if place == "home" else None
    reference, model, optimizer = start("bf16", hbm=hbm, device=device, tuning=tuning)
    train(reference, model, optimizer, steps=2)
    index = {n: i for i, (n, _) in enumerate(reference.model.named_parameters())}

    def write(side: Any) -> None:
        with torch.no_grad():
            side.blocks[1].up.weight.view(-1)[:3].mul_(0.5)
            view = side.blocks[2].up.weight.detach()
            loss_of(side, data(7, "bf16"))  # others take its place
            view[1] += 0.25

    x = data(5, "bf16")
    if when != "after a forward":
        write(model)
        write(reference.model)
    if when == "between steps":
        with torch.no_grad():
            loss_of(model, x)
    left, right = loss_of(reference.model, x), loss_of(model, x)
    if when == "after a forward":
        write(model)
        write(reference.model)
        left, right = loss_of(reference.model, x), loss_of(model, x)
    reference.backward(left)
    right.backward()
    for name in ("blocks.1.up.weight", "blocks.2.up.weight"):
        at = index[name]
        reference.masters[at] = reference.params[at].detach().float()
    reference.step(None)
    optimizer.step()
    optimizer.zero_grad()
    same(reference, model, "a step later")
    train(reference, model, optimizer, steps=2)


@pytest.mark.campaign(seconds=1)
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
@pytest.mark.parametrize("place", ["paged", "resident"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_state_dicts_resume_a_run_exactly(precision: str, place: str, order: str) -> None:
    reference, model, optimizer = start(precision)
    train(reference, model, optimizer, steps=3)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    hbm, device = (30_000, "cpu:sim") if place == "paged" else (None, "cpu")
    torch.manual_seed(9)
    fresh, other = hetero.prepare(
        (net := Net()),
        torch.optim.AdamW(net.parameters(), lr=0.01),
        device=device,
        hbm=hbm,
        precision=precision,
        chunk_bytes=512,
    )
    for what in ("model", "optimizer") if order == "model first" else ("optimizer", "model"):
        if what == "model":
            fresh.load_state_dict(saved[0])
        else:
            other.load_state_dict(saved[1])
    train(reference, fresh, other, steps=3)


def test_a_plain_state_dict_of_fp32_weights_loads_exactly() -> None:
    reference, model, _ = start("bf16")
    torch.manual_seed(4)
    plain = Net()
    model.load_state_dict(plain.state_dict())
    reference.masters = [p.detach().clone() for p in plain.parameters()]
    for param, master in zip(reference.params, reference.masters, strict=True):
        param.data = rounded(master, "bf16")
    same(reference, model, "loaded")


def test_release_gives_the_masters_back_in_fp32() -> None:
    reference, model, optimizer = start("bf16")
    train(reference, model, optimizer, steps=3, micro=2)
    plain, torchs = hetero.release(model, optimizer)
    for param, master in zip(plain.parameters(), reference.masters, strict=True):
        assert param.dtype is torch.float32 and torch.equal(param, master)
    assert type(torchs) is torch.optim.AdamW and len(torchs.state) > 0


def test_named_modules_stay_fp32_and_step_as_in_torch() -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = [n for n, _ in model.named_parameters() if ".norm." in n]
    model, optimizer = hetero.prepare(
        model,
        optimizer,
        device="cpu:sim",
        hbm=40_000,
        precision="bf16",
        keep_fp32=["blocks.*.norm"],
        chunk_bytes=256,
    )
    kinds = {n: p.dtype for n, p in model.named_parameters()}
    assert names and all(kinds[n] is torch.float32 for n in names)
    assert all(k is torch.bfloat16 for n, k in kinds.items() if n not in names)
    with pytest.raises(hetero.ConfigError, match="router"):
        hetero.prepare(Net(), device="cpu", precision="bf16", keep_fp32=["router"])


def test_a_step_with_an_infinite_gradient_changes_only_the_scale() -> None:
    reference, model, optimizer = start("fp16")
    train(reference, model, optimizer, steps=2)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    scale = optimizer.loss_scale
    x = data(1, "fp16")
    x[0, 0] = float("inf")
    hetero.backward(loss_of(model, x))
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.step_was_skipped and optimizer.loss_scale == scale / 2
    for key, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(v, before[key][k]) for k, v in state.items())
    same(reference, model, "skipped")
    train(reference, model, optimizer, steps=2)
    assert not optimizer.step_was_skipped


def test_a_step_with_one_infinite_gradient_among_finite_ones_is_skipped() -> None:
    _, model, optimizer = start("fp16", "sgd")
    hetero.backward(loss_of(model, data(0, "fp16")))
    param = next(model.parameters())
    param.grad = torch.full(param.shape, float("inf"), dtype=param.dtype)

    optimizer.step()

    assert optimizer.step_was_skipped


def test_the_loss_scale_follows_torch_s_scaler() -> None:
    torch.manual_seed(0)
    _, model, optimizer = start("fp16", "sgd")
    engine_of(model).scaler.growth_interval = 3
    param = nn.Parameter(torch.zeros(4))
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    plain = torch.optim.SGD([param], lr=0.1)
    for number, bad in enumerate([0, 0, 0, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1]):
        x = data(number, "fp16")
        if bad:
            x[0, 0] = float("nan")
        hetero.backward(loss_of(model, x))
        optimizer.step()
        optimizer.zero_grad()
        param.grad = torch.full((4,), float("nan") if bad else 1.0)
        theirs.scale(torch.zeros(()))
        theirs.step(plain)
        theirs.update()
        assert optimizer.loss_scale == theirs.get_scale(), number
        assert optimizer.step_was_skipped == bool(bad)


def test_a_backward_without_scaling_is_refused_under_fp16() -> None:
    _, model, _ = start("fp16")
    with pytest.raises(hetero.StateError, match=r"loss scaling.*\n.*hetero\.backward"):
        loss_of(model, data(0, "fp16")).backward()


def test_gradients_under_loss_scaling_look_unscaled() -> None:
    reference, model, optimizer = start("fp16")
    x = data(0, "fp16")
    hetero.backward(loss_of(model, x))
    reference.scale = optimizer.loss_scale
    reference.backward(loss_of(reference.model, x))
    for ours, sums in zip(model.parameters(), reference.sums, strict=True):
        if sums is None:
            assert ours.grad is None
        else:
            assert torch.equal(ours.grad.float(), sums.half().float())


def test_looking_at_a_gradient_changes_nothing() -> None:
    reference, model, optimizer = start("bf16", "sgd", lr=0.5)
    for number in range(3):
        for part in range(2):
            x = data(10 * number + part, "bf16")
            reference.backward(loss_of(reference.model, x) / 2)
            (loss_of(model, x) / 2).backward()
            for param in model.parameters():
                if param.grad is not None:
                    param.grad.norm(), param.grad.clone(), param.grad.view(-1)[0]
        reference.step(0.05)
        optimizer.clip_grad_norm_(0.05)
        for param in model.parameters():
            if param.grad is not None:
                param.grad.abs().max(), param.grad.view(-1)[:1]
        optimizer.step()
        optimizer.zero_grad()
        same(reference, model, f"step {number}")


def test_two_clips_and_a_value_clip_round_as_in_fp32() -> None:
    reference, model, optimizer = start("bf16", "sgd", lr=0.5)
    for number in range(3):
        x = data(number, "bf16")
        reference.backward(loss_of(reference.model, x))
        loss_of(model, x).backward()
        held = [nn.Parameter(torch.zeros_like(m)) for m in reference.masters]
        for p, total in zip(held, reference.sums, strict=True):
            p.grad = total
        for group in (held, list(model.parameters())):
            nn.utils.clip_grad_norm_(group, 0.3)
            nn.utils.clip_grad_norm_(group, 0.05, norm_type=float("inf"))
            nn.utils.clip_grad_value_(group, 0.01)
        reference.step()
        optimizer.step()
        optimizer.zero_grad()
        same(reference, model, f"step {number}")


@pytest.mark.parametrize("steps", [300, pytest.param(2000, marks=pytest.mark.slow)])
def test_many_steps_do_not_drift(steps: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    reference = Reference(model, "adamw", "bf16", 0.01)
    model, optimizer = hetero.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.01),
        device="cpu:sim",
        hbm=20_000,
        precision="bf16",
        chunk_bytes=64,
    )
    for number in range(steps):
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(number)).bfloat16()
        reference.backward(reference.model(x).square().mean())
        model(x).square().mean().backward()
        reference.step()
        optimizer.step()
        optimizer.zero_grad()
    engine = engine_of(model)
    engine.finish()
    for i, (_, segment) in enumerate(engine.setup.blueprint.layout.home):
        assert torch.equal(engine.setup.masters.value(segment), reference.masters[i])


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("failures", [1, 3])
def test_a_weight_that_came_home_before_its_master_failed_to_follow_is_its_own_master(
    monkeypatch: pytest.MonkeyPatch, failures: int, whole: bool
) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = hetero.prepare(
        *(model, optimizer), device="cpu:sim", hbm=20_000, precision="bf16", chunk_bytes=256
    )
    engine = engine_of(model)
    stay_paged(engine)
    for _ in range(2):  # masters come to differ from their weights
        model(torch.ones(2, 16, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    param = model[1].weight
    segment, masters = engine.setup.segment(param), engine.setup.masters
    model.state_dict()
    before = masters.value(segment)
    name = "reset" if whole else "_follow"
    follow, left = getattr(masters, name), [None] * failures

    def fails(*args: Any) -> None:
        if left:
            left.pop()
            raise StorageError("the drive was away")
        follow(*args)

    monkeypatch.setattr(masters, name, fails)
    with torch.no_grad():
        (param if whole else param.data)[3:5] += 1
    for _ in range(failures):
        with pytest.raises(StorageError):
            engine.residence.quiesce()
            masters.follow()
    engine.residence.quiesce()
    expected = param.detach().float()
    if not whole:  # what was not written keeps its master
        expected[:3], expected[5:] = before[:3], before[5:]
    assert not torch.equal(expected, before)
    assert torch.equal(masters.value(segment), expected)
