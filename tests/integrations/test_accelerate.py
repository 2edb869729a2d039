"""An accelerate script with hetero against the same script without: every number is the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

accelerate = pytest.importorskip("accelerate")

from accelerate import Accelerator, find_executable_batch_size  # noqa: E402
from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402
from accelerate.tracking import GeneralTracker  # noqa: E402
from accelerate.utils import ProjectConfiguration  # noqa: E402

import hetero  # noqa: E402
from hetero.errors import BudgetError, ConfigError, StateError  # noqa: E402
from hetero.integrations.accelerate import HeteroAccelerator, HeteroPlugin  # noqa: E402
from hetero.integrations.whole import has_plain_state  # noqa: E402
from hetero.testing.ranks import run_ranks  # noqa: E402
from tests.integrations import ranks as ranks_script  # noqa: E402
from tests.integrations.models import Tied  # noqa: E402

HBM = 60_000
ORDERS = ["model first", "optimizer first", "three calls"]


@pytest.fixture(autouse=True)
def afresh() -> Any:
    """Every test has accelerate's state for itself."""
    afresh_state()
    yield
    afresh_state()


def afresh_state() -> None:
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def tied() -> nn.Module:
    torch.manual_seed(0)
    return Tied(blocks=3)


def loader() -> DataLoader[Any]:
    tokens = torch.randint(0, 32, (24, 9), generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(tokens), batch_size=3, shuffle=False)


def ours(**kwargs: Any) -> HeteroAccelerator:
    return HeteroAccelerator(
        cpu=True, hetero_plugin=HeteroPlugin(device="cpu:sim", hbm=HBM), **kwargs
    )


def stock(**kwargs: Any) -> Accelerator:
    return Accelerator(cpu=True, **kwargs)


def prepared(accelerator: Any, order: str) -> tuple[Any, ...]:
    """Prepare all parts; in ``order`` "computes first" the optimizer comes after a forward."""
    model = tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    if order in ("three calls", "computes first"):
        model = accelerator.prepare(model)
        if order == "computes first":
            with torch.no_grad():
                model(torch.zeros(2, 8, dtype=torch.int64))
        optimizer = accelerator.prepare(optimizer)
        return model, optimizer, *accelerator.prepare(loader(), schedule)
    if order == "optimizer first":
        optimizer, model, *rest = accelerator.prepare(optimizer, model, loader(), schedule)
        return model, optimizer, *rest
    return accelerator.prepare(model, optimizer, loader(), schedule)


def steps(accelerator: Any, parts: tuple[Any, ...], epochs: int = 1) -> list[Any]:
    """Train; returns losses and norms."""
    model, optimizer, batches, schedule = parts
    seen = []
    for _ in range(epochs):
        for (tokens,) in batches:
            with accelerator.accumulate(model):
                logits = model(tokens[:, :-1])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    seen.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                seen.append(loss.item())
    return seen


def weights(accelerator: Any, model: nn.Module) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in accelerator.get_state_dict(model).items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[k], expected[k]) for k in expected)


@pytest.mark.campaign(seconds=1.2)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_script_gives_the_same_numbers(order: str, accumulation: int) -> None:
    same_numbers(order, accumulation)


def test_an_optimizer_may_come_after_a_forward_of_its_model() -> None:
    same_numbers("computes first")


def same_numbers(order: str, accumulation: int = 1) -> None:
    """Compare losses, norms and weights of a script with those of stock accelerate."""
    plain = stock(gradient_accumulation_steps=accumulation)
    parts = prepared(plain, order)
    expected = steps(plain, parts)
    values = weights(plain, parts[0])
    afresh_state()

    accelerator = ours(gradient_accumulation_steps=accumulation)
    parts = prepared(accelerator, order)

    assert steps(accelerator, parts) == expected
    assert accelerator.unwrap_model(parts[0]) is parts[0]
    assert_equal(weights(accelerator, parts[0]), values)
    accelerator.free_memory()


def test_a_saved_run_goes_on_as_the_stock_one_does(tmp_path: Path) -> None:
    plain = stock()
    parts = prepared(plain, "model first")
    expected = steps(plain, parts, epochs=3)
    afresh_state()
    first = ours()
    parts = prepared(first, "model first")
    begun = steps(first, parts)
    first.save_state(str(tmp_path / "state"))
    first.free_memory()

    second = ours()
    parts = prepared(second, "model first")
    second.load_state(str(tmp_path / "state"))

    assert begun + steps(second, parts, epochs=2) == expected
    second.free_memory()


def test_a_model_without_an_optimizer_computes_under_the_budget() -> None:
    accelerator = ours()
    model = accelerator.prepare(tied())
    tokens = torch.zeros(1, 4, dtype=torch.long)

    with torch.no_grad():
        found = model(tokens)

    assert torch.equal(found, tied()(tokens))
    accelerator.free_memory()


def test_a_live_accelerator_is_adopted() -> None:
    accelerator = HeteroAccelerator.adopt(stock(), {"device": "cpu:sim", "hbm": HBM})
    parts = prepared(accelerator, "model first")

    assert type(accelerator) is HeteroAccelerator
    assert len(steps(accelerator, parts)) == 16
    accelerator.free_memory()


def test_a_model_computes_in_bf16_where_the_script_says_so() -> None:
    plain = stock(mixed_precision="bf16")
    parts = prepared(plain, "model first")
    expected = steps(plain, parts)
    afresh_state()

    accelerator = ours(mixed_precision="bf16")
    parts = prepared(accelerator, "model first")

    assert steps(accelerator, parts) == expected
    model, tokens = parts[0], torch.zeros(1, 4, dtype=torch.long)
    with torch.no_grad():
        rounded = accelerator.unwrap_model(model)(tokens)
        exact = accelerator.unwrap_model(model, keep_fp32_wrapper=False)(tokens)
    accelerator.free_memory()
    assert not torch.equal(rounded, exact)
    assert torch.equal(exact, model(tokens))


def test_a_scaler_of_accelerates_scales_as_it_does_without_hetero() -> None:
    def scaled(accelerator: Any) -> list[Any]:
        # as on a GPU with mixed_precision="fp16"; on a CPU accelerate makes none by itself
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
        accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
        parts = prepared(accelerator, "optimizer first")
        skipped, seen = [], []
        for (tokens,) in parts[2]:
            loss = parts[0](tokens).square().mean()
            accelerator.backward(loss)
            seen.append(accelerator.clip_grad_norm_(parts[0].parameters(), 0.5).item())
            parts[1].step()
            skipped.append(accelerator.optimizer_step_was_skipped)
            parts[1].zero_grad()
        assert any(skipped) and not all(skipped)
        return [*skipped, *map(repr, seen), accelerator.scaler.get_scale()]

    expected = scaled(stock())
    afresh_state()

    assert scaled(ours()) == expected


def test_under_fp16_losses_are_scaled_once() -> None:
    accelerator = HeteroAccelerator(
        cpu=True, hetero_plugin={"device": "cpu:sim", "hbm": HBM, "precision": "fp16"}
    )
    parts = prepared(accelerator, "model first")
    assert accelerator.scaler is None

    losses = steps(accelerator, parts)[1::2]

    assert parts[1].optimizer.loss_scale > 1 and not parts[1].step_was_skipped
    assert losses[-1] < losses[0]
    accelerator.free_memory()


def test_under_fp16_losses_are_divided_by_the_passes_that_add_up() -> None:
    def norm_of(passes: int) -> float:
        afresh_state()
        plugin = {"device": "cpu:sim", "hbm": HBM, "precision": "fp16"}
        accelerator = HeteroAccelerator(
            cpu=True, gradient_accumulation_steps=passes, hetero_plugin=plugin
        )
        model, _, batches, _ = prepared(accelerator, "model first")
        (tokens,) = next(iter(batches))
        for _ in range(passes):
            with accelerator.accumulate(model):
                accelerator.backward(1e-3 * model(tokens).float().square().mean())
        found = float(accelerator.clip_grad_norm_(model.parameters(), 1e9))
        accelerator.free_memory()
        return found

    assert norm_of(4) == pytest.approx(norm_of(1), rel=1e-2)  # sums of fp16 gradients are rounded


def test_values_are_clipped_as_stock_clips_them() -> None:
    def clipped(accelerator: Any) -> dict[str, torch.Tensor]:
        model, optimizer, batches, _ = prepared(accelerator, "model first")
        for (tokens,) in batches:
            accelerator.backward(model(tokens).square().mean())
            accelerator.clip_grad_value_(model.parameters(), 1e-4)
            optimizer.step()
            optimizer.zero_grad()
        return weights(accelerator, model)

    expected = clipped(stock())
    afresh_state()

    assert_equal(clipped(ours()), expected)


@pytest.mark.parametrize("is_safe", [True, False])
@pytest.mark.parametrize("spills", [False, True])
def test_the_files_of_save_model_are_the_same(
    spills: bool, is_safe: bool, tmp_path: Path, disk: Path
) -> None:
    def saved(accelerator: Any, name: str, size: str) -> dict[str, bytes]:
        torch.manual_seed(0)
        model = Tied(blocks=24)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
        accelerator.backward(model(next(iter(batches))[0]).square().mean())
        optimizer.step()
        if name == "ours":
            assert ("NVME" in hetero.status(model).tiers) == spills
            assert has_plain_state(model) != spills
        folder = tmp_path / name / size
        accelerator.save_model(model, str(folder), max_shard_size=size, safe_serialization=is_safe)
        if not is_safe:  # a pickle tells how storages lie
            loaded = {path.name: torch.load(path) for path in folder.glob("*.bin")}
            return {f"{at} {k}": bits(v) for at, each in loaded.items() for k, v in each.items()}
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    more = {"host": 340_000, "nvme": disk, "chunk_bytes": 1024} if spills else {}
    for size in ("8KB", "10GB"):
        expected = saved(stock(), "stock", size)
        assert (len(expected) > 2) == (size == "8KB" or not is_safe)
        afresh_state()
        plugin = HeteroPlugin(device="cpu:sim", hbm=100_000, **more)
        accelerator = HeteroAccelerator(cpu=True, hetero_plugin=plugin)
        assert saved(accelerator, "ours", size) == expected
        accelerator.free_memory()
        afresh_state()


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def test_states_rotate_and_a_run_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    def project(name: str) -> ProjectConfiguration:
        return ProjectConfiguration(
            str(tmp_path / name), automatic_checkpoint_naming=True, total_limit=2
        )

    def begun(accelerator: Any) -> None:
        parts = prepared(accelerator, "model first")
        for count, (tokens,) in enumerate(parts[2]):
            step(accelerator, parts, tokens)
            if count in (1, 3, 5):
                accelerator.save_state()

    def resumed(accelerator: Any) -> list[Any]:
        parts = prepared(accelerator, "model first")
        accelerator.load_state()
        rest = accelerator.skip_first_batches(parts[2], 6)
        losses = [step(accelerator, parts, tokens) for (tokens,) in rest]
        assert len(losses) == 2
        return losses

    begun(stock(project_config=project("stock")))
    afresh_state()
    expected = resumed(stock(project_config=project("stock")))
    afresh_state()
    begun(first := ours(project_config=project("ours")))
    first.free_memory()
    afresh_state()

    second = ours(project_config=project("ours"))
    assert resumed(second) == expected
    kept = sorted(path.name for path in (tmp_path / "ours" / "checkpoints").iterdir())
    assert kept == ["checkpoint_1", "checkpoint_2"]
    second.free_memory()


def step(accelerator: Any, parts: tuple[Any, ...], tokens: torch.Tensor) -> float:
    model, optimizer, _, schedule = parts
    loss = model(tokens).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    return float(loss)


def test_several_models_train_side_by_side(tmp_path: Path) -> None:
    def trained(accelerator: Any) -> list[dict[str, torch.Tensor]]:
        made, critic = tied(), nn.Sequential(nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 1))
        first = torch.optim.AdamW(made.parameters(), lr=1e-2)
        second = torch.optim.SGD(critic.parameters(), lr=1e-2)
        made, critic, first, second = accelerator.prepare(made, critic, first, second)
        for (tokens,) in loader():
            loss = critic(made(tokens)).mean()
            accelerator.backward(loss)
            first.step()
            second.step()
            first.zero_grad()
            second.zero_grad()
        accelerator.save_state(str(tmp_path))
        with torch.no_grad():
            for param in critic.parameters():
                param.zero_()
        accelerator.load_state(str(tmp_path))
        return [weights(accelerator, made), weights(accelerator, critic)]

    torch.manual_seed(2)
    expected = trained(stock())
    afresh_state()
    torch.manual_seed(2)

    for found, values in zip(trained(ours()), expected, strict=True):
        assert_equal(found, values)


def test_what_computes_is_loaded_before_any_optimizer_has_come(tmp_path: Path) -> None:
    first = ours()
    parts = prepared(first, "model first")
    steps(first, parts)
    values = weights(first, parts[0])
    first.save_state(str(tmp_path))
    first.free_memory()
    afresh_state()

    second = ours()
    model = second.prepare(tied())
    second.load_state(str(tmp_path))

    assert_equal(weights(second, model), values)


@pytest.mark.campaign(seconds=4)
def test_a_batch_that_is_too_large_is_halved_until_it_fits() -> None:
    accelerator, tried = ours(), []

    @find_executable_batch_size(starting_batch_size=16)
    def train(batch_size: int) -> int:
        accelerator.free_memory()
        tried.append(batch_size)
        model = tied()
        optimizer: Any = torch.optim.AdamW(model.parameters())
        model, optimizer = accelerator.prepare(model, optimizer)
        for _ in range(3):
            accelerator.backward(model(torch.zeros(batch_size, 32, dtype=torch.long)).sum())
            optimizer.step()
            optimizer.zero_grad()
        return batch_size

    assert 1 <= train() < 16
    assert tried == sorted(tried, reverse=True) and len(tried) > 2
    accelerator.free_memory()


def test_a_budget_for_no_batch_at_all_is_told_at_once() -> None:
    accelerator = HeteroAccelerator(cpu=True, hetero_plugin={"device": "cpu:sim", "hbm": 1000})

    @find_executable_batch_size(starting_batch_size=64)
    def train(batch_size: int) -> None:
        model = tied()
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))

    with pytest.raises(BudgetError, match=r"needs .* of HBM at once"):
        train()


class Told(GeneralTracker):
    """A tracker that keeps what it is told."""

    name = "told"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[Any, int | None]] = []

    @property
    def tracker(self) -> Any:
        return self.rows

    def store_init_configuration(self, values: dict[str, Any]) -> None: ...

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.rows.append((values, step))


def test_trackers_are_told_what_the_script_tells_them() -> None:
    told = Told()
    accelerator = ours(log_with=[told])
    accelerator.init_trackers("run")
    accelerator.log({"loss": 1.0}, step=3)
    accelerator.end_training()

    assert told.rows == [({"loss": 1.0}, 3)]


def test_a_file_of_settings_is_found_through_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"device: cpu:sim\nhbm: {HBM}\n")
    monkeypatch.setenv("HETERO_CONFIG", str(path))

    assert HeteroAccelerator(cpu=True).hetero_config.hbm == HBM
    assert HeteroAccelerator(cpu=True, hetero_plugin={"hbm": 7}).hetero_config.hbm == 7


def test_a_wrong_setting_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean hbm"):
        HeteroPlugin(hbn="20GiB")


def test_a_model_with_a_device_map_is_refused() -> None:
    model = tied()
    model.hf_device_map = {"embed": "cpu", "blocks": "disk"}

    with pytest.raises(ConfigError, match="device_map") as caught:
        ours().prepare(model, torch.optim.AdamW(model.parameters()))
    assert "without device_map" in caught.value.advice


def test_a_model_whose_gradients_nobody_would_average_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accelerator = ours()
    parts = hetero.prepare(model := tied(), torch.optim.AdamW(model.parameters()), device="cpu")
    monkeypatch.setattr(HeteroAccelerator, "num_processes", 2)

    with pytest.raises(StateError, match="not be averaged over 2 processes"):
        accelerator.prepare(*parts)


def test_a_model_that_is_prepared_stays_as_it_is() -> None:
    accelerator = ours()
    model, optimizer, *_ = prepared(accelerator, "model first")

    assert accelerator.prepare(model, optimizer) == (model, optimizer)
    assert accelerator._models == [model]
    with pytest.raises(StateError, match="prepared already"):
        hetero.prepare(model)
    accelerator.free_memory()


def run_script(folder: Path, *launcher: str) -> None:
    script = Path(__file__).with_name("ranks.py")
    done = subprocess.run(
        [sys.executable, "-m", *launcher, str(script), str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(script.parents[2])},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def assert_same_run(found: dict[str, Any]) -> None:
    ours, plain = found["ours"], found["stock"]
    assert ours["evictions"] > 3
    assert ours["losses"] == plain["losses"]
    assert ours["norms"] == plain["norms"]
    assert torch.equal(ours["seen"], plain["seen"]) and len(ours["seen"]) == 2 * 52
    assert_equal(ours["state"], {k.removeprefix("module."): v for k, v in plain["state"].items()})


@pytest.mark.slow  # 12 s of processes that import
def test_the_standard_launcher_starts_it_with_its_standard_file(tmp_path: Path) -> None:
    config = tmp_path / "default_config.yaml"
    config.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nuse_cpu: true\n"
        "num_processes: 1\nnum_machines: 1\nmixed_precision: 'no'\nmachine_rank: 0\n"
    )
    run_script(tmp_path, "accelerate.commands.launch", "--config_file", str(config))

    assert_same_run(torch.load(tmp_path / "0.pt"))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What two processes found, with what a launcher tells them."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(2, script_of_a_rank, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


def script_of_a_rank(rank: int, folder: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", WORLD_SIZE="2")
    afresh_state()
    ranks_script.main(str(folder))


@pytest.mark.parametrize("rank", [0, 1])
def test_two_processes_take_the_same_steps_as_without_hetero(ranks: list[Any], rank: int) -> None:
    assert_same_run(ranks[rank])


def test_ranks_have_the_same_weights_and_different_batches(ranks: list[Any]) -> None:
    first, second = (rank["ours"] for rank in ranks)

    trained = [name for name in first["state"] if not name.startswith("norm.running")]
    assert all(torch.equal(first["state"][name], second["state"][name]) for name in trained)
    assert first["losses"] != second["losses"]
    assert first["norms"] == second["norms"]


def test_an_optimizer_of_no_model_is_refused() -> None:
    accelerator = ours()
    optimizer = torch.optim.AdamW(tied().parameters())

    with pytest.raises(ConfigError, match="of no model"):
        accelerator.prepare(optimizer)


def test_a_plugin_of_somebody_else_is_refused() -> None:
    with pytest.raises(ConfigError, match="fsdp_plugin"):
        ours(fsdp_plugin=object())


def test_uneven_inputs_are_refused_on_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate gave the model to torch's Join, which asked it for a hook that it has not."""
    accelerator = HeteroAccelerator(cpu=True, hetero_plugin={"hbm": HBM})
    model = accelerator.prepare(nn.Linear(4, 4))
    monkeypatch.setattr(HeteroAccelerator, "multi_device", True)
    with accelerator.join_uneven_inputs([model]):
        model(torch.ones(2, 4))
    with (
        pytest.raises(ConfigError, match="uneven batches"),
        accelerator.join_uneven_inputs([model], even_batches=False),
    ):
        pass
