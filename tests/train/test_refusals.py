"""What cannot be right is refused by name, and nothing half-done is left behind."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hetero
from hetero import BudgetError, ConfigError, StateError
from hetero.train.engine import handover
from tests.equivalence.harness import adamw, same, values
from tests.equivalence.zoo import Stack, loss_of, tokens

DATA = tokens(torch.Generator().manual_seed(0))


def snapshot(model: nn.Module) -> tuple[Any, ...]:
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    own = [sorted(m.__dict__) for m in model.modules()]
    grads = [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]
    return hooks, own, grads, [type(p) for p in model.parameters()]


def refused(
    error: type[Exception], words: str, model: nn.Module, optimizer: Any = None, **settings: Any
) -> Exception:
    """Prepare, expect a refusal with ``words`` and an untouched model."""
    before = snapshot(model)
    plain = [p for p in model.parameters() if type(p) is nn.Parameter and not p.is_sparse]
    plain = [p for p in plain if not p.is_meta]
    bits = [p.detach().clone() for p in plain]
    with pytest.raises(error, match=f"(?s){words}") as caught:
        hetero.prepare(model, optimizer, **{"device": "cpu", **settings})
    assert snapshot(model) == before
    same(bits, [p.detach() for p in plain], "untouched")
    assert isinstance(caught.value, hetero.HeteroError) and caught.value.advice
    return caught.value


SETTINGS = [
    ({"chunk_bytse": 64}, "chunk_bytse.*did you mean chunk_bytes"),
    ({"chunk_bytse": 64, "hbmm": 1, "hbm": "8 GiBB"}, "chunk_bytse.*hbmm.*8 GiBB"),
    *(({"hbm": v}, "hbm=.*is not a size") for v in ("8gb ", "8 GiBB", -1, 0, True, 1.5)),
    *(({"host": v}, "host=.*is not a size") for v in (float("nan"), float("inf"), "", [])),
    ({"chunk_bytes": 0}, "chunk_bytes=0"),
    ({"chunk_bytes": -64}, "chunk_bytes=-64"),
    ({"chunk_bytes": 100}, "multiple of 64.*128"),
    ({"precision": "fp8"}, "precision='fp8'"),
    ({"max_grad_norm": -1.0}, "max_grad_norm=-1.0 is not a norm"),
    ({"keep_fp32": "norm"}, "keep_fp32='norm'"),
    ({"device": "tpu"}, "device='tpu' is unknown"),
    ({"units": "blocks.*"}, "units takes a list"),
    ({"units": ["blok.*"]}, "'blok.*' matches no module"),
    ({"nvme": 3}, "nvme takes a path"),
    ({"nvme": "nowhere", "hbm": "1MiB", "host": "64KiB"}, "cannot be opened"),
    ({"micro_batch": 0}, "micro_batch=0"),
    ({"micro_batch": True}, "micro_batch=True"),
    ({"activations": "some"}, "activations='some' is unknown"),
    ({"activations": "swap"}, "activations='swap' is unknown"),
    ({"mesh": (2,)}, "mesh=.2,.*mesh takes .world"),
    ({"mesh": {"dp_shard": 0}}, "mesh=.*mesh takes .world"),
    ({"mesh": "world"}, "without a process group"),
    ({"config": 7}, "config=7 is a int"),
    ({"host": "1024TiB"}, "host=.*more than this process may take"),
]


@pytest.mark.parametrize(("settings", "words"), SETTINGS, ids=lambda v: str(v)[:40])
def test_a_bad_setting_is_refused(settings: dict[str, Any], words: str) -> None:
    model = Stack()
    refused(ConfigError, words, model, adamw(model), **settings)


def test_a_config_file_with_a_mistake_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "hetero.toml"
    path.write_text('hbm = "1GiB"\nhbm = "2GiB"\n')
    refused(ConfigError, "line 2", Stack(), config=path)
    path.write_text("")
    refused(ConfigError, "is empty", Stack(), config=str(path))
    refused(ConfigError, "No such file", Stack(), config=tmp_path / "none.toml")


def test_cuda_without_a_device_is_refused() -> None:
    if torch.cuda.is_available():
        error = refused(ConfigError, "more than the device has", Stack(), device="cuda", hbm="9TiB")
    else:
        error = refused(ConfigError, "sees no CUDA device", Stack(), device="cuda")
    assert error.advice


def test_a_unit_larger_than_the_budget_is_named_with_the_smallest_budget() -> None:
    model = Stack()
    error = refused(BudgetError, "blocks.0", model, adamw(model), hbm=4000, chunk_bytes=256)
    assert isinstance(error, BudgetError) and error.needed_bytes > 4000
    hetero.prepare(model, adamw(model), device="cpu", hbm=error.needed_bytes, chunk_bytes=256)
    with torch.no_grad():
        assert loss_of(model, DATA).isfinite()


def test_states_that_host_cannot_hold_are_refused_with_the_shortfall() -> None:
    model = Stack()
    error = refused(BudgetError, "bytes short", model, adamw(model), host=100_000, hbm=40_000)
    assert isinstance(error, BudgetError)
    assert error.tier == "HOST" and error.needed_bytes > 100_000


def test_activations_beyond_the_budget_are_named_before_the_first_step_is_made() -> None:
    model = Stack()
    model, optimizer = hetero.prepare(
        model, adamw(model), device="cpu", hbm=20_000, chunk_bytes=256, activations="keep"
    )
    loss_of(model, DATA).backward()
    with pytest.raises(BudgetError, match="activations take") as caught:
        optimizer.step()
    model, inner = hetero.release(model, optimizer)
    assert not inner.state[model.head.weight]
    hbm = caught.value.needed_bytes
    model, optimizer = hetero.prepare(
        model, inner, device="cpu", hbm=hbm, chunk_bytes=256, activations="keep"
    )
    optimizer.zero_grad()
    for _ in range(3):
        loss_of(model, DATA).backward()
        optimizer.step()
        optimizer.zero_grad()


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3).to_sparse())


class Sub(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3).as_subclass(Special))


class Special(torch.Tensor):
    pass


def shared_storage() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(model[0].weight.detach()[:2])
    return model


def on_meta() -> nn.Module:
    with hetero.empty_init():
        return Stack()


MODELS: list[tuple[Callable[[], Any], str]] = [
    (lambda: Sparse(), "weight.*sparse"),
    (lambda: Sub(), "weight.*subclass"),
    (on_meta, "place.*meta device"),
    (lambda: nn.LazyLinear(3), "weight.*uninitialized"),
    (shared_storage, "1.weight.*0.weight.*share part"),
    (lambda: nn.ReLU(), "no parameters of floating point"),
    (lambda: torch.jit.script(nn.Linear(2, 2)), "ScriptModule"),
    (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")), "1.weight.*meta"),
    (lambda: nn.DataParallel(nn.Linear(2, 2)), "wrapped by DataParallel"),
]


@pytest.mark.parametrize(("build", "words"), MODELS, ids=[w for _, w in MODELS])
def test_a_model_that_cannot_be_paged_is_refused_by_name(
    build: Callable[[], Any], words: str
) -> None:
    refused(ConfigError, words, build())


def test_something_that_is_not_a_module_is_refused() -> None:
    with pytest.raises(ConfigError, match="model is a list"):
        hetero.prepare([nn.Linear(2, 2)])


class Unknown(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


OPTIMIZERS: list[tuple[Callable[[nn.Module], Any], str]] = [
    (lambda m: torch.optim.LBFGS(m.parameters()), "LBFGS is not supported"),
    (lambda m: torch.optim.SparseAdam(m.parameters()), "SparseAdam is not supported"),
    (lambda m: Unknown(m.parameters()), "Unknown is not supported"),
    (lambda m: torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), "group 0.*not of the model"),
    (lambda m: "adamw", "optimizer is a str"),
    (lambda m: torch.optim.SGD(m.parameters(), lr=0.1, differentiable=True), "differentiable"),
]


@pytest.mark.parametrize(("build", "words"), OPTIMIZERS, ids=[w for _, w in OPTIMIZERS])
def test_an_optimizer_that_cannot_be_honoured_is_refused(
    build: Callable[[nn.Module], Any], words: str
) -> None:
    model = Stack()
    refused(ConfigError, words, model, build(model))


def test_an_optimizer_without_trainable_parameters_is_refused() -> None:
    model = Stack().requires_grad_(False)
    refused(ConfigError, "no trainable parameter", model, adamw(model))


def prepared(**settings: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Stack()
    settings = {"device": "cpu", "hbm": 250_000, "chunk_bytes": 256, **settings}
    return hetero.prepare(model, adamw(model), **settings)


def test_preparing_twice_is_refused() -> None:
    model, optimizer = prepared()
    with pytest.raises(StateError, match="prepared already"):
        hetero.prepare(model, optimizer)
    with pytest.raises(StateError, match=r"part of a model that is"):
        hetero.prepare(model.blocks[0])
    with pytest.raises(StateError, match="prepared already"):
        hetero.prepare(nn.Sequential(model))
    other = Stack()
    with pytest.raises(StateError, match="optimizer is prepared already"):
        hetero.prepare(other, optimizer)


def load_by_swaps(model: nn.Module) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict(model.state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


FORBIDDEN: list[tuple[str, type[Exception], Callable[[nn.Module], Any]]] = [
    ("copy of a parameter", StateError, lambda m: copy.copy(m.head.weight)),
    ("pickle", StateError, pickle.dumps),
    ("torch.save", StateError, lambda m: torch.save(m, io.BytesIO())),
    ("half", ConfigError, lambda m: m.half()),
    ("double of a block", ConfigError, lambda m: m.blocks[1].double()),
    ("to bf16", ConfigError, lambda m: m.to(torch.bfloat16)),
    ("to meta", ConfigError, lambda m: m.to("meta")),
    ("share_memory", ConfigError, lambda m: m.share_memory()),
    ("set_", StateError, lambda m: m.head.weight.set_(torch.zeros(2))),
    ("resize_", StateError, lambda m: m.head.weight.resize_(2)),
    ("data of another shape", StateError, lambda m: setattr(m.head.weight, "data", torch.zeros(2))),
    ("vmap", StateError, lambda m: torch.func.vmap(lambda w: w * 2)(m.head.weight)),
    ("func.grad", StateError, lambda m: torch.func.grad(lambda w: w.pow(2).sum())(m.head.weight)),
    (
        "func.grad of the input",
        StateError,
        lambda m: torch.func.grad(lambda x: m.blocks[0](x).sum())(torch.randn(2, 16)),
    ),
    (
        "func.grad around a parameter",
        StateError,
        lambda m: torch.func.grad(lambda x: (x @ m.head.weight.T).sum())(torch.randn(2, 16)),
    ),
    (
        "assigning load",
        ConfigError,
        lambda m: m.load_state_dict(m.state_dict(), assign=True),
    ),
    ("swapping load", ConfigError, lambda m: load_by_swaps(m)),
    ("backward of a vector", StateError, lambda m: hetero.backward(m(DATA))),
    ("backward without a graph", StateError, lambda m: hetero.backward(torch.zeros(()))),
]


@pytest.mark.parametrize(("name", "error", "action"), FORBIDDEN, ids=[n for n, *_ in FORBIDDEN])
def test_what_would_leave_hetero_is_refused_and_training_goes_on(
    name: str, error: type[Exception], action: Callable[[nn.Module], Any]
) -> None:
    model, optimizer = prepared()
    twin, other = prepared()
    grad = name not in ("set_", "resize_")
    with torch.set_grad_enabled(grad), pytest.raises(error) as caught:
        action(model)
    assert isinstance(caught.value, hetero.HeteroError) and caught.value.advice
    for side, opt in ((model, optimizer), (twin, other)):
        for _ in range(2):
            loss_of(side, DATA).backward()
            opt.step()
            opt.zero_grad()
    same(values(model), values(twin), name)


def test_a_to_that_changes_nothing_is_fine() -> None:
    model, _ = prepared()
    assert model.to("cpu") is model and model.float() is model
    assert model.blocks[0].to(torch.float32) is model.blocks[0]


def test_a_swapped_parameter_is_named_at_its_next_use() -> None:
    model, _ = prepared()
    torch.utils.swap_tensors(model.blocks[1].up.weight, nn.Parameter(torch.zeros(48, 16)))
    with pytest.raises(StateError, match=r"blocks\.1\.up\.weight"):
        model(DATA)


def test_functions_on_a_plain_model_say_that_it_is_not_prepared() -> None:
    model = Stack()
    for call in (hetero.status, hetero.release):
        with pytest.raises(StateError, match="not prepared"):
            call(model)
    with hetero.gathered(model):
        assert model.head.weight.isfinite().all()


def test_releasing_with_another_optimizer_is_refused() -> None:
    model, optimizer = prepared()
    _, other = prepared()
    with pytest.raises(StateError, match="not prepared with this model"):
        hetero.release(model, other)
    hetero.release(model, optimizer)


@pytest.mark.parametrize("hbm", [None, 3000])
def test_an_optimizer_does_not_step_what_was_released(hbm: int | None) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    model, optimizer = hetero.prepare(
        model, adamw(model), device="cpu:sim" if hbm else "cpu", hbm=hbm, chunk_bytes=256
    )
    hetero.release(model, optimizer)
    model(torch.randn(2, 8)).sum().backward()

    with pytest.raises(StateError, match="released"):
        optimizer.step()


def test_a_sparse_gradient_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = hetero.prepare(model, sgd, device="cpu", hbm=4000, chunk_bytes=64)
    with pytest.raises(ConfigError, match=r"0\.weight"):
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()


def test_a_failure_while_moving_in_leaves_the_plain_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from hetero.train.engine.engine import Engine
    from hetero.train.engine.handover import Handover
    from hetero.train.engine.paged import Paged

    def broken(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    for kind, step in ((Paged, "attach"), (Engine, "_wrap"), (Handover, "move_in")):
        model = Stack()
        plain = copy.deepcopy(model)
        before = snapshot(model)
        with monkeypatch.context() as patch:
            patch.setattr(kind, step, broken)
            with pytest.raises(KeyboardInterrupt):
                hetero.prepare(model, adamw(model), device="cpu", hbm=120_000)
        assert snapshot(model) == before
        same(values(plain), values(model), step)
        loss_of(model, DATA).backward()
        adamw(model).step()


def test_a_failure_at_the_end_of_prepare_leaves_the_optimizer_its_step_and_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    model = Stack()
    optimizer = adamw(model)
    loss_of(model, DATA).backward()
    optimizer.step()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("hetero.train.access.hooks.Hooks.guard", broken)
        hetero.prepare(model, optimizer, device="cpu", hbm=120_000)
    assert len(optimizer.state) == len(list(model.parameters()))
    loss_of(model, DATA).backward()
    optimizer.step()


def test_a_buffer_that_another_prepared_model_has_too_stays_where_that_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = nn.Module()
    shared.register_buffer("table", torch.ones(3))
    models = [nn.ModuleDict({"shared": shared, "own": nn.Linear(3, 3)}) for _ in range(2)]
    first, second = (hetero.prepare(model, device="cpu") for model in models)
    moved: list[nn.Module] = []
    monkeypatch.setattr(handover, "move_buffers", lambda modules, place: moved.extend(modules))

    hetero.release(first)
    assert first["own"] in moved
    assert shared not in moved

    hetero.release(second)
    assert shared in moved


def test_a_unit_has_the_first_name_of_its_module_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.append(model[0])
    with pytest.raises(ConfigError, match="units: '2' matches no module"):
        hetero.prepare(model, device="cpu:sim", hbm=100_000, units=["2"])
    hetero.release(hetero.prepare(model, device="cpu:sim", hbm=100_000, units=["0"]))


@pytest.mark.parametrize("nvme", [False, True])
def test_an_hbm_that_takes_the_ram_of_homes_is_to_be_lowered(nvme: bool, tmp_path: Path) -> None:
    model = Stack(4)
    error = refused(
        *(BudgetError, "0 B are there", model, adamw(model)),
        hbm="1PiB",
        nvme=str(tmp_path) if nvme else None,
    )

    assert "raise host=" not in error.advice
    found = re.search(r"lower hbm=.* to at most (\d+) bytes", error.advice)
    assert found is not None
    most = int(found[1]) - 2**30  # of a machine whose free memory changes
    hetero.release(*hetero.prepare(model, adamw(model), device="cpu", hbm=most))
