"""`hetero.profile` of plain torch models: what it records, and that it leaves no trace."""

from __future__ import annotations

import copy
import gc
import io
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.optim import optimizer as torch_optimizer
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

import hetero
from hetero.device import Allocated
from hetero.events import Event
from hetero.recipes.gpt import GPT, GPTConfig
from hetero.report.measure import measure
from hetero.report.plain import Watcher
from hetero.report.run import Run
from hetero.report.storages import Storages
from hetero.report.views import leaves_of
from hetero.train.access.listening import Listening
from hetero.train.activations.meter import LiveBytes
from hetero.types import Kind

BATCH, WIDE, DEEP = 32, 16, 3
CATEGORIES = {"param", "grad", "state", "activation", "buffer", "other"}
SMALL_GPT = GPTConfig(vocab=32, width=16, layers=3, heads=2, context=8)


def mlp() -> nn.Module:
    """Three blocks of one linear layer and a rectifier, and a head."""
    blocks = [nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU()) for _ in range(DEEP)]
    return nn.Sequential(*blocks, nn.Linear(WIDE, 1))


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(BATCH, WIDE)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def recorded(body: Callable[[nn.Module, Any], object], model: nn.Module | None = None) -> Run:
    """Return the run of a body under the profile."""
    model = model or mlp()
    optimizer = adamw(model)
    with hetero.profile(model, optimizer=optimizer) as run:
        body(model, optimizer)
    return run.load()


def levels(run: Run) -> Iterator[tuple[Event, dict[str, int]]]:
    """Yield every moment's levels; events of one time belong together."""
    now: dict[str, int] = {}
    rows = sorted((e for e in run.events if e.what == "level"), key=lambda e: e.seq)
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        now[row.category] = row.n_bytes
        if after is None or after.t_ns != row.t_ns:
            yield row, dict(now)


def last(run: Run) -> dict[str, int]:
    return list(levels(run))[-1][1]


def peak(run: Run, category: str, phase: str | None = None) -> int:
    return max(now[category] for row, now in levels(run) if phase is None or row.phase == phase)


def of(run: Run, what: str) -> list[Event]:
    return [event for event in run.events if event.what == what]


def numel(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# -- numbers -------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(8, 8, num_layers=2, batch_first=True)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.cells(x)[0])


def convolutions() -> nn.Module:
    blocks = [nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Dropout(0.1))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (mlp, lambda: torch.randn(4, WIDE)),
    "convolutions": (convolutions, lambda: torch.randn(2, 3, 6, 6)),
    "lstm": (Recurrent, lambda: torch.randn(2, 5, 8)),
    "gpt": (lambda: GPT(SMALL_GPT), lambda: torch.randint(0, 32, (2, 8))),
    "encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
        lambda: torch.randn(2, 5, 8),
    ),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


@pytest.mark.campaign(seconds=1)
@pytest.mark.parametrize("rule", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_weights_are_bitwise_those_without_a_profile(name: str, rule: str) -> None:
    def outcome(profiled: bool) -> tuple[list[Tensor], list[Tensor]]:
        torch.manual_seed(7)
        make, batch = MODELS[name]
        model, outputs = make(), []
        optimizer = OPTIMIZERS[rule](model.parameters())

        def body() -> None:
            for _ in range(5):
                out = model(batch())
                outputs.append(out.detach().clone())
                out.float().pow(2).mean().backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                outputs.append(model.eval()(batch()).clone())

        if not profiled:
            body()
        else:
            with hetero.profile(model, optimizer=optimizer):
                body()
        return outputs, [t.clone() for t in model.state_dict().values()]

    plain, watched = outcome(False), outcome(True)
    for mine, theirs in zip(watched[0] + watched[1], plain[0] + plain[1], strict=True):
        assert torch.equal(mine, theirs)


def test_a_compiled_function_in_the_loop_stays_compiled() -> None:
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    loss_of = torch.compile(lambda out: out.pow(2).mean(), backend=backend)
    recorded(lambda model, _: loss_of(model(torch.randn(4, WIDE))).backward())
    assert len(graphs) == 1


def test_a_compiled_function_around_the_model_is_the_same_graph() -> None:
    torch.compiler.reset()  # other tests of this process may have used up its recompilations
    graphs: list[list[Any]] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    model = nn.Sequential(nn.Linear(WIDE, WIDE), nn.Tanh())
    x = torch.randn(4, WIDE)
    torch.compile(lambda x: model(x).sum(), backend=backend)(x)
    recorded(lambda model, _: torch.compile(lambda x: model(x).sum(), backend=backend)(x), model)
    assert len(graphs) == 2
    assert graphs[0] == graphs[1]


def test_operators_of_higher_order_compute_in_the_block() -> None:
    def body(*_: Any) -> None:
        found.append(torch.cond(torch.tensor(True), torch.sin, torch.cos, (torch.ones(4),)))

    found: list[Any] = []
    run = recorded(body)
    assert torch.equal(found[0], torch.ones(4).sin())
    assert peak(run, "other") >= found[0].nbytes


# -- bytes ---------------------------------------------------------------------------------------


def test_levels_sum_to_what_another_count_finds_alive() -> None:
    seen: list[tuple[float, int]] = []
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with hetero.profile(model, optimizer=optimizer) as block, LiveBytes() as live:
        for _ in range(3):
            loss = model(torch.randn(BATCH, WIDE)).pow(2).mean()
            seen.append((time.monotonic(), live.live))
            loss.backward()
            seen.append((time.monotonic(), live.live))
            optimizer.step()
            del loss
            seen.append((time.monotonic(), live.live))
    run = block.load()
    for seconds, alive in seen:
        now = [n for row, n in levels(run) if row.t_ns <= seconds * 1e9][-1]
        assert sum(now.values()) == alive + 4 * numel(model)


def test_every_category_is_stated_before_anything_happens() -> None:
    run = recorded(lambda *_: None)
    assert set(last(run)) == CATEGORIES
    assert {row.tier for row in of(run, "level")} == {"HOST"}


def test_parameters_gradients_and_states_are_exact_to_the_byte() -> None:
    model = mlp()
    n, count = numel(model), len(list(model.parameters()))
    run = recorded(lambda model, optimizer: train(model, optimizer, 2), model)
    assert (peak(run, "param"), last(run)["param"]) == (4 * n, 4 * n)
    assert (peak(run, "grad"), last(run)["grad"]) == (4 * n, 0)
    assert last(run)["state"] == 2 * 4 * n + 4 * count  # moments, and a step count each


def test_buffers_and_gradients_that_exist_already_count_from_the_beginning() -> None:
    model = convolutions()
    model(torch.randn(2, 3, 6, 6)).mean().backward()
    run = recorded(lambda *_: None, model)
    assert last(run)["buffer"] == sum(b.nbytes for b in model.buffers())
    assert last(run)["grad"] == 4 * numel(model)


def test_states_of_a_given_optimizer_count_from_the_beginning() -> None:
    model = mlp()
    optimizer = adamw(model)
    train(model, optimizer)
    with hetero.profile(model, optimizer=optimizer) as run:
        pass
    assert last(run.load())["state"] == 8 * numel(model) + 4 * len(list(model.parameters()))


def test_states_of_an_optimizer_that_is_not_given_count_from_its_step() -> None:
    model = mlp()
    optimizer = adamw(model)
    with hetero.profile(model) as run:
        train(model, optimizer)
    assert last(run.load())["state"] == 8 * numel(model) + 4 * len(list(model.parameters()))
    assert len(of(run.load(), "step")) == 1


def test_tied_weights_count_once_and_frozen_ones_have_no_gradient() -> None:
    model = nn.Sequential(*(nn.Linear(WIDE, WIDE, bias=False) for _ in range(3)))
    model[2].weight = model[0].weight
    model[1].weight.requires_grad_(False)
    run = recorded(train, model)
    assert last(run)["param"] == 2 * 4 * WIDE * WIDE
    assert peak(run, "grad") == 4 * WIDE * WIDE
    assert [(b.unit, b.trainable) for b in run.meta.buckets] == [(0, True), (1, False)]


def test_a_gradient_nobody_holds_as_such_any_more_is_other() -> None:
    def body(model: nn.Module, optimizer: Any) -> None:
        model(torch.randn(BATCH, WIDE)).sum().backward()
        kept.extend(p.grad for p in model.parameters())
        optimizer.zero_grad()
        optimizer.step()

    kept: list[Any] = []
    model = mlp()
    run = recorded(body, model)
    assert peak(run, "grad") == 4 * numel(model)
    assert (last(run)["grad"], last(run)["other"]) == (0, 4 * numel(model))


def test_the_activation_peak_of_an_mlp_is_the_one_computed_by_hand() -> None:
    model = nn.Sequential(
        nn.Sequential(nn.Linear(WIDE, 64), nn.ReLU()), nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    )
    run = recorded(lambda model, _: model(torch.randn(BATCH, WIDE)).sum().backward(), model)
    hidden = 4 * BATCH * 64
    # the first ReLU's output is held; the second layer's output goes once its ReLU has read it
    assert peak(run, "activation", "forward") == 3 * hidden
    # both ReLUs' outputs, the loss and its gradient
    assert peak(run, "activation", "between") == 2 * hidden + 8
    # the second layer in backward: its input, the gradient that comes and the one it hands on,
    # and those of its weight and its bias, which are not accumulated yet
    assert peak(run, "activation", "backward") == 3 * hidden + 4 * (64 * 64 + 64) + 8


def test_a_batch_counts_as_other_and_the_loss_as_activation() -> None:
    def body(model: nn.Module, _: Any) -> None:
        batch = torch.tensor([[1.0] * WIDE] * BATCH)  # made where no operation is seen
        loss = F.mse_loss(model(batch), torch.zeros(BATCH, 1))
        assert loss.requires_grad

    run = recorded(body)
    assert max(now["other"] for _, now in levels(run)) == 4 * BATCH * (WIDE + 1)
    assert peak(run, "activation", "between") > 0


@pytest.mark.parametrize("before", [0, 8])
def test_a_storage_that_grows_in_place_counts_as_it_is_now(before: int) -> None:
    def body(*_: Any) -> None:
        grown = torch.empty(before)
        grown.resize_(100)
        kept.append(grown)

    kept: list[Tensor] = []
    assert last(recorded(body))["other"] == 400


def test_a_tensor_of_tensors_counts_what_it_is_made_of() -> None:
    def body(*_: Any) -> None:
        kept.append(TwoTensor(torch.randn(4), torch.randn(4)) * 2)

    kept: list[Tensor] = []
    assert last(recorded(body))["other"] == 2 * 16


def test_tensors_that_are_only_traced_count_nothing() -> None:
    def body(*_: Any) -> None:
        with FakeTensorMode():
            kept.append(torch.randn(1000) + torch.randn(1000))

    kept: list[Tensor] = []
    assert last(recorded(body))["other"] == 0


def test_sparse_gradients_leave_the_rest_exact() -> None:
    table = nn.Embedding(10, WIDE, sparse=True)
    model = nn.Sequential(table, nn.Linear(WIDE, WIDE))
    with hetero.profile(model) as run:
        model(torch.tensor([1, 2])).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert table.weight.grad is not None
    assert last(run.load())["grad"] == 4 * numel(model[1])


@pytest.mark.parametrize("how", ["inference", "autocast", "vmap", "create_graph"])
def test_whatever_torch_can_do_in_the_block_leaves_parameters_and_nothing_else(how: str) -> None:
    def body(model: nn.Module, _: Any) -> None:
        x = torch.randn(BATCH, WIDE)
        if how == "inference":
            with torch.inference_mode():
                model(x)
        elif how == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).sum()
            loss.float().backward()
        elif how == "vmap":
            torch.func.vmap(model)(x).sum().backward()
        else:
            params = list(model.parameters())
            grads = torch.autograd.grad(model(x).pow(2).sum(), params, create_graph=True)
            sum(g.pow(2).sum() for g in grads).backward()
        for param in model.parameters():
            param.grad = None

    model = mlp()
    run = recorded(body, model)
    assert run.dropped == 0
    assert last(run) == {**dict.fromkeys(CATEGORIES, 0), "param": 4 * numel(model)}


def test_other_devices_count_nothing() -> None:
    run = recorded(lambda *_: torch.empty(1000, device="meta"))
    assert last(run)["other"] == 0


# -- phases, steps, accesses ---------------------------------------------------------------------


def phases(run: Run) -> list[str]:
    return [event.why for event in of(run, "phase")]


def test_phases_follow_each_other_and_a_step_ends_with_the_optimizer() -> None:
    run = recorded(lambda model, optimizer: train(model, optimizer, 3))
    assert phases(run) == ["forward", "backward", "step"] * 3
    assert [event.step for event in of(run, "step")] == [0, 1, 2]
    for step, event in enumerate(of(run, "step")):
        inside = [e for e in of(run, "phase") if e.step == step]
        assert event.t_ns <= inside[0].t_ns
        assert inside[-1].t_ns + inside[-1].dur_ns <= event.t_ns + event.dur_ns


def test_no_event_is_lost() -> None:
    run = recorded(lambda model, optimizer: train(model, optimizer, 5))
    assert run.dropped == 0
    assert sorted(e.seq for e in run.events) == list(range(len(run.events)))


def test_units_are_accessed_in_order_forward_and_in_reverse_backward() -> None:
    run = recorded(train)
    assert run.meta.units == ["0", "1", "2", "3"]
    by_phase = {
        phase: [e.unit for e in of(run, "access") if e.phase == phase]
        for phase in ("forward", "backward")
    }
    assert by_phase == {"forward": [0, 1, 2, 3], "backward": [3, 2, 1, 0]}
    block, head = 4 * (WIDE * WIDE + WIDE), 4 * (WIDE + 1)
    assert [e.n_bytes for e in of(run, "access")] == [block] * 3 + [head] * 2 + [block] * 3


def test_bytes_are_caused_by_the_access_that_made_them() -> None:
    run = recorded(train)
    unit_of = {event.seq: event.unit for event in of(run, "access")}
    grown: Counter[int] = Counter()
    before = 0
    for row, now in levels(run):
        if row.phase == "forward" and row.category == "activation":
            grown[unit_of[row.cause]] += now["activation"] - before
        before = now["activation"]
    assert grown == {**dict.fromkeys(range(DEEP), 4 * BATCH * WIDE), DEEP: 4 * BATCH}
    assert {row.cause for row, _ in levels(run) if row.phase in ("between", "step")} == {-1}


def test_activations_alive_are_told_behind_every_unit() -> None:
    run = recorded(train)
    told = [(e.unit, e.n_bytes) for e in of(run, "live") if e.phase == "forward"]
    one = 4 * BATCH * WIDE
    assert told == [(0, one), (1, 2 * one), (2, 3 * one), (3, 3 * one + 4 * BATCH)]


def test_gradients_accumulate_over_several_backward_passes_of_one_step() -> None:
    def body(model: nn.Module, optimizer: Any) -> None:
        for _ in range(3):
            model(torch.randn(BATCH, WIDE)).sum().backward()
        optimizer.step()

    model = mlp()
    run = recorded(body, model)
    assert phases(run) == ["forward", "backward"] * 3 + ["step"]
    assert len(of(run, "step")) == 1
    assert peak(run, "grad") == 4 * numel(model)


def test_a_graph_that_is_retained_is_accessed_in_every_pass() -> None:
    def body(model: nn.Module, _: Any) -> None:
        loss = model(torch.randn(BATCH, WIDE)).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    run = recorded(body)
    accessed = [e.unit for e in of(run, "access") if e.phase == "backward"]
    assert accessed == [3, 2, 1, 0] * 2


def test_evaluation_has_its_own_phase_and_leaves_nothing_behind() -> None:
    def body(model: nn.Module, optimizer: Any) -> None:
        train(model, optimizer)
        with torch.no_grad():
            model(torch.randn(BATCH, WIDE))
        train(model, optimizer)

    run = recorded(body)
    assert phases(run) == ["forward", "backward", "step", "eval", "forward", "backward", "step"]
    assert last(run)["activation"] == 0


def test_a_unit_that_is_called_twice_is_accessed_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(2))

        def forward(self, x: Tensor) -> Any:
            for index in (0, 1, 0):
                x = self.blocks[index](x)
            return x

    run = recorded(train, Twice())
    assert [e.unit for e in of(run, "access") if e.phase == "forward"] == [0, 1, 0]
    assert [e.unit for e in of(run, "access") if e.phase == "backward"] == [0, 1, 0]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_block_is_computed_again_within_backward(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDE, WIDE), nn.ReLU()) for _ in range(3)
            )

        def forward(self, x: Tensor) -> Any:
            x = x.requires_grad_()
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    model = Checkpointed()
    run = recorded(train, model)
    assert phases(run) == ["forward", "backward", "step"]
    accessed = [e.unit for e in of(run, "access") if e.phase == "backward"]
    assert list(dict.fromkeys(accessed)) == [2, 1, 0]
    assert len(accessed) > 3  # once more forward, besides backward
    assert peak(run, "grad") == 4 * numel(model)
    assert run.dropped == 0


def test_a_whole_model_computed_again_is_no_forward_of_its_own() -> None:
    def body(model: nn.Module, _: Any) -> None:
        out: Any = checkpoint(model, torch.randn(BATCH, WIDE), use_reentrant=False)
        out.sum().backward()

    run = recorded(body)
    assert phases(run) == ["forward", "backward"]
    accessed = [e.unit for e in of(run, "access") if e.phase == "backward"]
    assert accessed == [3, 0, 1, 2, 3, 2, 1, 0]


def test_optimizers_that_step_within_backward_end_one_step() -> None:
    model = mlp()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def update(param: Any) -> None:
        optimizers[param].step()
        param.grad = None

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(update)
    with hetero.profile(model) as run:
        for _ in range(2):
            model(torch.randn(BATCH, WIDE)).sum().backward()
    assert len(of(run.load(), "step")) == 2
    assert phases(run.load()) == ["forward", "backward"] * 2
    assert last(run.load())["grad"] == 0


def test_two_optimizers_one_after_the_other_make_one_step() -> None:
    model = mlp()
    first, second = (torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 1))
    with hetero.profile(model) as run:
        for _ in range(2):
            model(torch.randn(BATCH, WIDE)).sum().backward()
            first.step()
            second.step()
    assert len(of(run.load(), "step")) == 2
    assert phases(run.load()) == ["forward", "backward", "step", "step"] * 2


def test_an_optimizer_of_another_model_ends_no_step() -> None:
    def body(*_: Any) -> None:
        other = mlp()
        train(other, adamw(other))

    assert of(recorded(body), "step") == []


def test_an_optimizer_that_computes_within_its_step_has_phases_inside() -> None:
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(torch.ones(BATCH, WIDE)).pow(2).mean()
        loss.backward()
        return loss

    with hetero.profile(model, optimizer=optimizer) as block:
        optimizer.step(closure)
    run = block.load()
    assert set(phases(run)) == {"forward", "backward", "step"}
    assert len(of(run, "step")) == 1
    assert last(run)["state"] > 4 * numel(model)


def test_what_the_allocator_counts_beyond_the_categories_is_unattributed() -> None:
    model = mlp()

    def counts(_: torch.device) -> Allocated:
        return Allocated(sum(watcher._storages.levels.values()) + 1000, 2_000_000, 3_000_000)

    watcher = Watcher(model, adamw(model), torch.device("cpu"), counts)
    with watcher.watching():
        train(model, adamw(model))
    rows = list(watcher.log)
    assert {e.n_bytes for e in rows if e.category == "unattributed"} == {1000}
    assert {e.n_bytes for e in rows if e.category == "reserved"} == {3_000_000}
    at = max(i for i, e in enumerate(rows) if e.category == "unattributed")
    now = {e.category: e.n_bytes for e in rows[: at + 1] if e.what == "level"}
    assert sum(now.values()) == rows[at + 1].n_bytes  # what the allocator has


# -- undone --------------------------------------------------------------------------------------


def traces(model: nn.Module) -> list[Any]:
    """Return all places where something could hang."""
    return [
        [(name, set(m.__dict__), len(m._forward_hooks)) for name, m in model.named_modules()],
        [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()],
        [p.requires_grad for p in model.parameters()],
        torch.autograd._engine_run_backward,
        len(torch_optimizer._global_optimizer_pre_hooks),
        len(torch_optimizer._global_optimizer_post_hooks),
        _get_current_dispatch_mode_stack(),
    ]


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("error", [None, ValueError, Interrupted])
def test_nothing_is_left_when_the_block_is_over(error: type[BaseException] | None) -> None:
    model = mlp()
    model[1][0].weight.requires_grad_(False)

    class Failing(nn.ReLU):
        def forward(self, x: Tensor) -> Tensor:
            if error is not None:
                raise error
            return super().forward(x)

    before = traces(model)
    try:
        with hetero.profile(model, optimizer=adamw(model)) as run:
            train(model, adamw(model))
            Failing()(model(torch.randn(BATCH, WIDE))).sum().backward()
    except (ValueError, Interrupted):
        assert error is not None
    for param in model.parameters():
        param.grad = None
    assert traces(model) == before
    assert run.load().dropped == 0
    assert len(of(run.load(), "step")) == 1


@pytest.mark.parametrize("place", ["forward", "backward", "step"])
def test_a_run_that_an_error_cuts_off_is_readable(place: str, tmp_path: Path) -> None:
    def fail(*_: Any) -> None:
        raise ValueError(place)

    model = mlp()
    optimizer = adamw(model)
    with pytest.raises(ValueError, match=place), hetero.profile(model, tmp_path) as run:
        train(model, optimizer)
        if place == "forward":
            model[1].register_forward_hook(fail)
        out = model(torch.randn(BATCH, WIDE))
        if place == "backward":
            out.register_hook(fail)
        out.sum().backward()
        optimizer.register_step_pre_hook(fail)
        optimizer.step()
    loaded = run.load()
    assert run.directory == tmp_path
    assert loaded.dropped == 0
    assert len(of(loaded, "step")) == 1
    assert _get_current_dispatch_mode_stack() == []


def test_a_failed_step_can_be_made_again() -> None:
    model = mlp()
    optimizer = adamw(model)
    fails = iter([True, False])

    def once(*_: Any) -> None:
        if next(fails):
            raise ValueError("once")

    optimizer.register_step_pre_hook(once)
    with hetero.profile(model, optimizer=optimizer) as run:
        model(torch.randn(BATCH, WIDE)).sum().backward()
        with pytest.raises(ValueError, match="once"):
            optimizer.step()
        optimizer.step()
        model(torch.randn(BATCH, WIDE))
    assert phases(run.load()) == ["forward", "backward", "step", "forward"]


def test_a_graph_that_outlives_the_block_runs_backward_as_ever() -> None:
    model = mlp()
    with hetero.profile(model):
        loss = model(torch.randn(BATCH, WIDE)).sum()
    gc.collect()
    assert not any(isinstance(found, Watcher) for found in gc.get_objects())  # its nodes are free
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_storages_that_go_after_the_block_tell_nobody() -> None:
    model = mlp()
    with hetero.profile(model):
        (storages,) = (found for found in gc.get_objects() if type(found) is Storages)
    before = dict(storages.levels)
    assert before[Kind.PARAM] == 4 * numel(model)
    del model
    gc.collect()
    assert storages.levels == before


def test_hooks_on_graphs_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero.train.access.listening.MANY", 4)
    model = mlp()
    before = {id(found) for found in gc.get_objects() if type(found) is Listening}  # of other tests
    with hetero.profile(model):
        for _ in range(20):
            model(torch.randn(BATCH, WIDE)).sum().backward()
        every = (found for found in gc.get_objects() if type(found) is Listening)
        (hooks,) = (found for found in every if id(found) not in before)
        assert 0 < len(hooks._reached) <= 2 * (DEEP + 1) + 4


def test_a_copy_made_inside_the_block_computes_by_itself() -> None:
    model = mlp()
    with hetero.profile(model):
        twin = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
    file.seek(0)
    x = torch.randn(BATCH, WIDE)
    expected = model(x)
    for loaded in (twin, torch.load(file, weights_only=False)):
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        assert torch.equal(loaded(x), expected)


def test_a_backward_that_somebody_replaced_meanwhile_is_left_to_them() -> None:
    autograd: Any = torch.autograd
    plain = autograd._engine_run_backward
    model = mlp()
    with hetero.profile(model):
        ours = autograd._engine_run_backward
        theirs = autograd._engine_run_backward = lambda *args, **kwargs: ours(*args, **kwargs)
    try:
        gc.collect()
        assert autograd._engine_run_backward is theirs
        assert not any(isinstance(found, Watcher) for found in gc.get_objects())
        model(torch.randn(BATCH, WIDE)).sum().backward()
        assert model[0][0].weight.grad is not None
    finally:
        autograd._engine_run_backward = plain


# -- refusals ------------------------------------------------------------------------------------


def split() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no module": (lambda: 3, "model is a int"),
    "no parameters": (nn.ReLU, "no parameters"),
    "several devices": (split, "no plain dense tensor"),
    "DataParallel": (lambda: nn.DataParallel(mlp()), "wrapped by DataParallel"),
    "compiled": (lambda: torch.compile(mlp()), "is compiled"),
    "a compiled block": (lambda: nn.Sequential(torch.compile(nn.Linear(2, 2))), "0 is compiled"),
    "a lazy module": (lambda: nn.LazyLinear(3), "uninitialized"),
    "a script": (lambda: torch.jit.script(nn.Linear(2, 2)), "ScriptModule"),
}


def in_place() -> nn.Module:
    model = mlp()
    model.compile()
    return model


REFUSED["compiled in place"] = (in_place, "is compiled")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_watched_is_refused_with_advice(name: str) -> None:
    make, why = REFUSED[name]
    with pytest.raises(hetero.ConfigError, match=why) as caught, hetero.profile(make()):
        pass
    assert caught.value.advice
    with hetero.profile(mlp()):  # and the next one is not held up
        pass


def test_parameters_on_several_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # there is no second device here
    monkeypatch.setattr("hetero.train.engine.check.check_plain", lambda *_: None)
    with pytest.raises(hetero.ConfigError, match="several devices"), hetero.profile(split()):
        pass


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    with (
        pytest.raises(hetero.ConfigError, match="not of the model"),
        hetero.profile(mlp(), optimizer=adamw(mlp())),
    ):
        pass


def test_what_is_no_optimizer_is_refused() -> None:
    wrong: Any = "adam"
    with (
        pytest.raises(hetero.ConfigError, match="optimizer is a str"),
        hetero.profile(mlp(), optimizer=wrong),
    ):
        pass


def test_a_profile_inside_a_profile_is_refused_and_the_outer_one_goes_on() -> None:
    def body(model: nn.Module, optimizer: Any) -> None:
        with pytest.raises(hetero.StateError, match="open already"), hetero.profile(mlp()):
            pass
        train(model, optimizer)

    assert len(of(recorded(body), "step")) == 1


# -- prepared models -----------------------------------------------------------------------------


def prepared() -> tuple[nn.Module, Any]:
    model = mlp()
    return hetero.prepare(model, adamw(model), device="cpu", hbm=1_000_000)


def test_a_prepared_model_is_recorded_by_its_engine() -> None:
    model, optimizer = prepared()
    with hetero.profile(model, optimizer=optimizer) as run:
        train(model, optimizer, 2)
    assert run.load().meta.mode != "plain"
    assert run.load().dropped == 0
    assert len(of(run.load(), "step")) == 2
    assert _get_current_dispatch_mode_stack() == []
    hetero.release(model, optimizer)


def test_a_prepared_model_with_another_optimizer_is_refused() -> None:
    model, optimizer = prepared()
    with (
        pytest.raises(hetero.ConfigError, match="not the one"),
        hetero.profile(model, optimizer=adamw(mlp())),
    ):
        pass
    hetero.release(model, optimizer)


def test_a_part_of_a_prepared_model_is_refused() -> None:
    model, optimizer = prepared()
    part: Any = model[0]
    with pytest.raises(hetero.StateError, match="part of a prepared"), hetero.profile(part):
        pass
    hetero.release(model, optimizer)


def test_a_recording_is_not_lost_to_the_next_one(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("other files do not matter")
    model, kept = mlp(), []
    for number in (1, 2, 3):
        with hetero.profile(model, tmp_path) as run:
            model(torch.ones(2, WIDE)).sum().backward()
            run.note(number=number)
        kept.append((tmp_path / "events.jsonl.gz").read_bytes())

    folders = [tmp_path / "earlier-1", tmp_path / "earlier-2", tmp_path]
    assert [(folder / "events.jsonl.gz").read_bytes() for folder in folders] == kept
    assert [Run.load(folder).values[0].value for folder in folders] == [1, 2, 3]
    assert (tmp_path / "notes.txt").exists()


def test_what_no_module_made_has_the_lines_that_made_it(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)

    def batch() -> torch.Tensor:
        return torch.ones(64, 8) * 2.0  # 2 KiB that live

    with hetero.profile(model, tmp_path) as run:
        kept = batch()
        model(kept).sum().backward()
    measured = measure(run.load())
    (peak,) = measured.peaks.values()

    found = {share.where: share for share in peak.shares if share.where}
    (made,) = (share for where, share in found.items() if " batch < " in where)
    assert made.category == "other" and made.n_bytes >= kept.nbytes
    assert "test_plain.py:" in made.where and not made.module
    assert sum(share.n_bytes for share in peak.shares) == peak.n_bytes
    leaf = next(leaf for leaf in leaves_of(measured, peak) if leaf.label == made.where)
    assert leaf.size == made.n_bytes
