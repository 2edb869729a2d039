"""Allocations of a prepared run have their module and the user's own lines, and change no bit."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetero
from hetero.internals import MODULE_CALL, RUN_BACKWARD, DispatchMode, current_mode
from hetero.report.allocations import LONGEST, AllocationMode
from hetero.report.examine import SUMMARY, examine
from hetero.report.measure import measure
from hetero.report.peaks import by_lines, shares_of
from hetero.report.profile import profile
from hetero.report.run import Allocation, Allocations, Meta
from hetero.report.views import LineBytes, by_place

WIDTH, BATCH, TIMES = 64, 128, 32
LOGITS = TIMES * BATCH * WIDTH * 4  # 1 MiB
SETTINGS: dict[str, dict[str, Any]] = {
    "stays": {"device": "cpu"},
    "stays, simulated": {"device": "cpu:sim"},
    "paged": {"device": "cpu:sim", "hbm": "1MiB"},
    "paged on a CPU": {"device": "cpu", "hbm": "1MiB"},
    "offload": {"device": "cpu:sim", "hbm": "1MiB", "activations": "offload"},
    "recompute": {"device": "cpu:sim", "hbm": "1MiB", "activations": "recompute"},
    "micro-batches": {"device": "cpu:sim", "hbm": "1MiB", "micro_batch": 32},
    "bf16": {"device": "cpu:sim", "hbm": "1MiB", "precision": "bf16"},
}


class Net(nn.Module):
    def __init__(self, layers: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def logits_of(out: Tensor) -> Tensor:
    return torch.cat([out.float()] * TIMES, 1)  # the line that makes LOGITS


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    logits = logits_of(model(x))
    return logits.square().mean()


LINE = f"test_allocations.py:{logits_of.__code__.co_firstlineno + 1} logits_of"


class Training:
    """A model that trains, prepared or plain."""

    def __init__(
        self,
        loss: Callable[[nn.Module, Tensor], Tensor] = loss_of,
        model: Callable[[], nn.Module] = Net,
        **settings: Any,
    ) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.loss = loss
        self.model: Any = model()
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.settings = settings
        self._numbers = count()
        if settings:
            if settings.get("precision") == "bf16":
                self.model.bfloat16()
            self.model, self.optimizer = hetero.prepare(self.model, self.optimizer, **settings)

    def batch(self) -> Tensor:
        made = torch.Generator().manual_seed(next(self._numbers))
        dtype = torch.bfloat16 if self.settings.get("precision") == "bf16" else torch.float32
        return torch.randn(BATCH, WIDTH, generator=made).to(dtype)

    def step(self) -> Tensor:
        loss = self.loss(self.model, self.batch())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def steps(self, n: int) -> Tensor:
        return torch.stack([self.step() for _ in range(n)])

    def recorded(self, folder: Path, n: int = 4) -> Allocations:
        """Record some steps; return what was seen of one."""
        with profile(self.model, folder) as run:
            self.steps(n)
        return run.load().meta.allocations

    def weights(self) -> list[Tensor]:
        return [value.clone() for value in self.model.state_dict().values()]

    def release(self) -> None:
        hetero.release(self.model, self.optimizer)


@contextmanager
def training(**given: Any) -> Iterator[Training]:
    made = Training(**given)
    try:
        yield made
    finally:
        made.release()


@pytest.mark.campaign(seconds=1)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_what_the_loop_makes_is_shown_by_its_line(settings: dict[str, Any], tmp_path: Path) -> None:
    with training(**settings) as made:
        found = made.recorded(tmp_path / "run")
        mode = hetero.status(made.model).mode
    report = examine(tmp_path / "run")
    report.write(tmp_path / "page.html")
    rows = json.loads((tmp_path / SUMMARY).read_text())["allocations"]["rows"]
    (row,) = (row for row in found.rows if row.where.startswith(LINE))

    assert mode == ("paged" if "hbm" in settings else "resident")
    assert (row.module, row.n_bytes, found.step) == ("", LOGITS, 2)
    assert {"module": "", "where": row.where, "n_bytes": LOGITS} in rows
    assert row.where.replace("<", "&lt;") in (tmp_path / "page.html").read_text()
    assert any(each.module and " forward" in each.where for each in found.rows)
    for peak in report.measured.peaks.values():
        assert sum(share.n_bytes for share in peak.shares) == peak.n_bytes


@pytest.mark.campaign(seconds=2)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_to_record_changes_no_bit(settings: dict[str, Any], tmp_path: Path) -> None:
    with training(**settings) as ours, training(**settings) as recorded:
        with profile(recorded.model, tmp_path / "run") as run:
            losses = recorded.steps(5)
        assert torch.equal(ours.steps(5), losses)
        assert all(map(torch.equal, ours.weights(), recorded.weights()))
    assert run.load().meta.allocations.rows


def product_of(model: nn.Module, x: Tensor) -> Tensor:
    """Return a loss whose backward rounds differently under a mode: see test_the_reason."""
    return model(x).mul(0.1).add(1).prod(1).sum()


def penalty_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


class Penalised(Net):
    """A backward inside of the forward."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(True)
        out = super().forward(x)
        (slope,) = torch.autograd.grad(product_of(lambda _: out, x), x, retain_graph=True)
        return out + slope


class Looking(DispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_the_reason_why_no_backward_is_looked_at() -> None:
    """If this fails with a newer torch, [Note: no mode in a backward] has lost its example."""
    slopes = []
    for mode in (None, Looking()):
        torch.manual_seed(0)
        x = torch.randn(BATCH, WIDTH).mul(0.1).add(1).requires_grad_(True)
        if mode is None:
            x.prod(1).sum().backward()
        else:
            with mode:
                x.prod(1).sum().backward()
        slopes.append(x.grad)
    assert not torch.equal(*slopes)


@pytest.mark.parametrize(
    ("loss", "model"), [(product_of, Net), (penalty_of, Penalised)], ids=["after", "inside"]
)
def test_no_backward_runs_under_the_mode(loss: Any, model: Any, tmp_path: Path) -> None:
    plain = Training(loss, model)
    with training(loss=loss, model=model, device="cpu") as ours:
        with profile(ours.model, tmp_path / "run") as run:
            losses = ours.steps(5)
        assert torch.equal(plain.steps(5), losses)
        assert all(map(torch.equal, plain.weights(), ours.weights()))
    assert run.load().meta.allocations.rows


def test_one_step_is_seen_and_torchs_functions_are_put_back(tmp_path: Path) -> None:
    places = (MODULE_CALL, RUN_BACKWARD)
    before = [getattr(place.owner, place.name) for place in places]
    modes: list[list[bool]] = []

    def noting(model: nn.Module, x: Tensor) -> Tensor:
        loss = loss_of(model, x)
        modes[-1].append(current_mode() is not None)
        loss.register_hook(lambda _: modes[-1].append(current_mode() is not None))
        return loss

    with training(loss=noting, device="cpu") as ours, profile(ours.model, tmp_path / "run"):
        for _ in range(5):
            modes.append([current_mode() is not None])
            ours.step()
            modes[-1].append(current_mode() is not None)
        assert [getattr(place.owner, place.name) for place in places] == before

    nothing = [False] * 4
    assert modes == [nothing, nothing, [False, True, False, False], nothing, nothing]


class Noting(Net):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.modes: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(MODULE_CALL.owner.__call__)
        self.modes.append(current_mode() is not None)
        return super().forward(x)


def test_a_wrapper_that_other_code_kept_begins_nothing(tmp_path: Path) -> None:
    model: Any = hetero.prepare(Noting(), device="cpu")
    with profile(model, tmp_path / "run"), torch.no_grad():
        for _ in range(4):
            model(torch.randn(BATCH, WIDTH))
        assert model.calls[1] is not model.calls[3]  # it was replaced until the one that is seen
        model.calls[1](model, torch.randn(BATCH, WIDTH))
    with torch.no_grad():
        model.calls[1](model, torch.randn(BATCH, WIDTH))

    assert model.modes == [False, False, True, False, False, False]
    hetero.release(model)


class Failing(Net):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.fails:
            raise ValueError("the model's")
        return out


def failing_after(model: nn.Module, x: Tensor) -> Tensor:
    model(x)
    raise ValueError("the loop's")


class FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        raise ValueError("of backward")


@pytest.mark.parametrize("device", ["cpu", "cpu:sim"])
def test_a_forward_that_fails_is_left_cleanly_and_the_next_one_is_seen(
    device: str, tmp_path: Path
) -> None:
    with training(model=Failing, device=device) as ours:
        with profile(ours.model, tmp_path / "run") as run:
            ours.steps(2)
            ours.model.fails = True
            with pytest.raises(ValueError, match="the model's"):
                ours.step()
            assert current_mode() is None
            ours.model.fails = False
            ours.steps(2)
        found = run.load().meta.allocations
    (row,) = (row for row in found.rows if row.where.startswith(LINE))
    assert row.n_bytes == LOGITS and found.step == 2


@pytest.mark.parametrize("device", ["cpu", "cpu:sim"])
def test_a_loop_that_fails_between_forward_and_backward_leaves_no_mode(
    device: str, tmp_path: Path
) -> None:
    with training(device=device) as ours:
        with (
            pytest.raises(ValueError, match="the loop's"),
            profile(ours.model, tmp_path / "run") as run,
        ):
            ours.steps(2)
            ours.loss = failing_after
            ours.step()
        assert current_mode() is None
        assert run.load().meta.allocations == Allocations()
        ours.loss = loss_of
        assert ours.recorded(tmp_path / "again").rows


def test_a_backward_that_fails_leaves_no_mode(tmp_path: Path) -> None:
    with training(device="cpu:sim", hbm="1MiB") as ours:
        with profile(ours.model, tmp_path / "run") as run:
            ours.steps(2)
            loss = FailingBackward.apply(loss_of(ours.model, ours.batch()))
            with pytest.raises(ValueError, match="of backward"):
                loss.backward()
            assert current_mode() is None
            ours.optimizer.zero_grad()
            ours.steps(2)
        assert run.load().meta.allocations.rows


def test_no_tensor_lives_longer_for_being_seen(tmp_path: Path) -> None:
    left: list[bool] = []
    kept: list[Tensor] = []  # what lives on does not keep the mode

    def dropping(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        with torch.no_grad():
            made = logits_of(out)
            storage, tensor = weakref.ref(made.untyped_storage()), weakref.ref(made)
            del made
        left.append(storage() is None and tensor() is None)
        kept.append(out.detach().clone())
        return out.square().mean()

    with training(loss=dropping, device="cpu") as ours:
        gc.collect()
        gc.disable()
        try:
            found = ours.recorded(tmp_path / "run")
            assert not [each for each in gc.get_objects() if type(each) is AllocationMode]
        finally:
            gc.enable()
    assert left == [True] * 4
    assert max(row.n_bytes for row in found.rows if row.where.startswith(LINE)) == LOGITS


def test_what_was_there_before_the_step_is_left_out(tmp_path: Path) -> None:
    scratch = torch.zeros(TIMES, BATCH * WIDTH)

    def in_place(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        with torch.no_grad():
            scratch.add_(1)
            scratch.view(-1)[:BATCH].mul_(2)
        return out.square().mean()

    with training(loss=in_place, device="cpu") as ours:
        found = ours.recorded(tmp_path / "run")
    assert found.rows and LOGITS not in {row.n_bytes for row in found.rows}


def test_a_tensor_that_grows_counts_as_it_is(tmp_path: Path) -> None:
    grown: list[Tensor] = []

    def growing(model: nn.Module, x: Tensor) -> Tensor:
        loss = loss_of(model, x)
        grown[:] = [torch.zeros(8)]
        grown[0].resize_(3 * LOGITS // 4)
        torch.zeros(LOGITS)  # the most of all is when this was there
        return loss

    with training(loss=growing, device="cpu") as ours:
        found = ours.recorded(tmp_path / "run")
    assert 3 * LOGITS in {row.n_bytes for row in found.rows}


def test_forwards_without_a_backward_are_seen_up_to_some_number(tmp_path: Path) -> None:
    seen: list[bool] = []

    def many(model: nn.Module, x: Tensor) -> Tensor:
        outs = []
        for _ in range(LONGEST + 4):
            outs.append(model(x))
            seen.append(current_mode() is not None)
        return torch.stack(outs).square().mean()

    with training(loss=many, device="cpu") as ours:
        found = ours.recorded(tmp_path / "run", 3)
    assert seen[-LONGEST - 4 :] == [True] * LONGEST + [False] * 4
    (last,) = (row for row in found.rows if row.module == "Net")
    assert last.n_bytes >= LONGEST * BATCH * WIDTH * 4


def test_a_recording_leaves_nothing_that_refers_to_the_model(tmp_path: Path) -> None:
    made = Training(device="cpu")
    made.recorded(tmp_path / "run")
    made.release()
    gone = weakref.ref(made.model)
    del made
    gc.collect()
    assert gone() is None


def test_a_mode_of_the_programs_own_stays_its_own(tmp_path: Path) -> None:
    seen: list[int] = []

    class Counting(Looking):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen[-1] += 1
            return func(*args, **(kwargs or {}))

    def across(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        with Counting():  # opened inside of the sample, and closed after its end
            loss = logits_of(out).square().mean()
            loss.backward(retain_graph=True)
        assert current_mode() is None or seen[-1:] == [seen[-1]]
        return loss

    def around(model: nn.Module, x: Tensor) -> Tensor:
        with Counting():
            return loss_of(model, x)

    for number, loss in enumerate((across, around)):
        with training(loss=loss, device="cpu") as ours:
            with profile(ours.model, tmp_path / str(number)) as run:
                for _ in range(4):
                    seen.append(0)
                    ours.step()
                    assert current_mode() is None
            assert bool(run.load().meta.allocations.rows) == (loss is across)
    assert len({*seen[:4]}) == 1 and len({*seen[4:]}) == 1  # each step's mode sees as many


def test_what_another_model_makes_is_of_no_module_of_the_recorded_one(tmp_path: Path) -> None:
    def losses(a: Training, b: Training) -> list[Tensor]:
        return [loss_of(each.model, each.batch()) for each in (a, b)]

    with training(device="cpu:sim") as other, training(device="cpu:sim", hbm="1MiB") as ours:
        with profile(ours.model, tmp_path / "run") as run:
            for number in range(4):
                for loss in losses(other, ours) if number % 2 else losses(ours, other):
                    loss.backward()
                for each in (ours, other):
                    each.optimizer.step()
                    each.optimizer.zero_grad()
        found = run.load().meta.allocations
    (row,) = (row for row in found.rows if row.where.startswith(LINE))
    theirs = [row for row in found.rows if not row.module and " forward < " in row.where]

    assert found.step == 2 and row.n_bytes == 2 * LOGITS and theirs


def test_a_model_that_does_not_train_has_its_lines(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = hetero.prepare(Net(), device="cpu:sim", hbm="1MiB")
    with profile(model, tmp_path / "run") as run, torch.no_grad():
        for _ in range(4):
            model(torch.randn(BATCH, WIDTH))
    rows = run.load().meta.allocations.rows

    assert rows and all(row.module and " forward" in row.where for row in rows)
    assert current_mode() is None
    hetero.release(model)


def test_what_a_user_compiles_keeps_its_bits(tmp_path: Path) -> None:
    def compiled(**settings: Any) -> Training:
        made = Training(**settings)
        for layer in made.model.layers:
            layer.compile(backend="aot_eager")
        return made

    plain, ours = compiled(), compiled(device="cpu")
    with profile(ours.model, tmp_path / "run") as run:
        losses = ours.steps(4)
    assert torch.equal(plain.steps(4), losses)
    assert any(row.where.startswith(LINE) for row in run.load().meta.allocations.rows)
    ours.release()


# -- where it is shown ---------------------------------------------------------------------------


def test_a_room_is_divided_as_a_step_filled_it() -> None:
    made = Allocations(2, [Allocation("a.0", "x", 5), Allocation("a.0", "y", 4),
                           Allocation("", "loop.py:3 main", 3)])  # fmt: skip
    meta = Meta(mode="paged", budgets={"HBM": 100}, allocations=made)

    def shown(
        categories: dict[str, int], tier: str = "HBM", **held: int
    ) -> set[tuple[str, str, str, int]]:
        owned = {("activation", unit): n_bytes for unit, n_bytes in held.items()}
        shares = by_lines(shares_of(categories, owned), meta, tier)
        assert sum(share.n_bytes for share in shares) == sum(categories.values())
        return {(s.category, s.module, s.where, s.n_bytes) for s in shares}

    room = "activation reserved"
    whole = {(room, "", "", 20)}
    assert shown({room: 20}) == {
        (room, "a.0", "", 9),
        (room, "", "loop.py:3 main", 3),
        (room, "", "", 8),
    }
    assert shown({room: 12}) == {(room, "a.0", "", 9), (room, "", "loop.py:3 main", 3)}
    assert shown({room: 11}) == {(room, "", "", 11)}  # of less room than that
    assert shown({room: 20}, "HOST") == whole
    loop = (room, "", "loop.py:3 main", 3)
    assert shown({room: 20, "activation": 7}, a=4, b=3) == {  # b's was there before the step
        *{("activation", "a", "", 4), ("activation", "b", "", 3)},
        *{(room, "a.0", "", 5), loop, (room, "", "", 12)},
    }
    assert shown({room: 3, "activation": 12}, a=12) == {("activation", "a", "", 12), loop}
    assert shown({room: 2, "activation": 12}, a=12) == {
        ("activation", "a", "", 12),
        (room, "", "", 2),
    }


def test_places_are_summed_over_their_modules() -> None:
    rows = [Allocation(f"layers.{n}", "net.py:3 forward", 4) for n in range(4)]
    found = by_place(Allocations(2, [Allocation("", "loop.py:9 main", 6), *rows]))

    assert found == [
        LineBytes("net.py:3 forward", 16, "layers.0, layers.1 and 2 more"),
        LineBytes("loop.py:9 main", 6, ""),
    ]


def test_a_run_that_was_not_seen_shows_no_lines(folder: Path, tmp_path: Path) -> None:
    made = examine(folder)
    run = replace(made.measured.run, meta=replace(made.measured.meta, allocations=Allocations()))
    examine(run).write(tmp_path / "page.html")

    assert made.summary.allocations.rows and made.summary.allocations.step == 2
    assert "By lines of the program" not in (tmp_path / "page.html").read_text()
    assert measure(run).peaks["HBM"].n_bytes == made.summary.tiers["hbm"].peak_bytes
