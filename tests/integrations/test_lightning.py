"""A Lightning script with hetero against the same script without: every number is the same."""

from __future__ import annotations

import copy
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

lightning = pytest.importorskip("lightning")

from lightning import Fabric, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402

import hetero  # noqa: E402
from hetero.errors import ConfigError  # noqa: E402
from hetero.integrations.lightning import (  # noqa: E402
    HeteroFabricRanksStrategy,
    HeteroFabricStrategy,
    HeteroRanksStrategy,
    HeteroStrategy,
)
from tests.integrations.models import Tied  # noqa: E402

HBM = 45_000


@pytest.fixture(autouse=True)
def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Model(LightningModule):
    """Trains as users' modules do; it remembers what it saw."""

    def __init__(self, how: str = "automatic") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Tied(blocks=6)
        self.how = how
        self.automatic_optimization = how != "manual"
        self.seen: list[float] = []
        self.evictions = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> torch.Tensor:
        (tokens,) = batch
        logits = self(tokens[:, :-1]) if self.how == "manual" else self.net(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
        loss = self.loss(batch)
        self.seen.append(loss.item())
        if self.how != "manual":
            return loss
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        self.manual_backward(loss)
        if batch_idx % 2:
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        return None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.seen.append(loss.item())
        self.log("val", loss)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.loss(batch).item())

    def on_train_batch_end(self, *_: Any) -> None:
        if "_hetero_engine" in self.__dict__:
            self.evictions += hetero.status(self).evictions

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def loader(seed: int = 1) -> DataLoader[Any]:
    tokens = torch.randint(0, 32, (18, 9), generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(tokens), batch_size=3, shuffle=False)


def trainer(root: Path, strategy: Any = "auto", **given: Any) -> Trainer:
    """Return a Trainer that says nothing."""
    quietly = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "max_epochs": 2,
    }
    return Trainer(strategy=strategy, default_root_dir=root, **{**quietly, **given})


def ours(**settings: Any) -> HeteroStrategy:
    return HeteroStrategy(**{"device": "cpu:sim", "hbm": HBM, "chunk_bytes": 2048, **settings})


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[k], expected[k]) for k in expected)


def fitted(run: Trainer, how: str = "automatic", **given: Any) -> Model:
    model = Model(how)
    run.fit(model, loader(), loader(2), **given)
    return model


HOWS = {
    "automatic": {},
    "accumulated": {"accumulate_grad_batches": 2},
    "norm": {"gradient_clip_val": 0.5},
    "value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "bf16-mixed": {"precision": "bf16-mixed", "max_epochs": 1},
    "manual": {},
}


@pytest.mark.campaign(seconds=3)
@pytest.mark.parametrize("how", HOWS)
def test_a_module_gives_the_same_numbers(how: str, tmp_path: Path) -> None:
    expected = fitted(trainer(tmp_path, **HOWS[how]), how)

    hbm = 80_000 if how == "bf16-mixed" else HBM  # autocast's casts of weights stay on the device
    model = fitted(trainer(tmp_path, ours(hbm=hbm), **HOWS[how]), how)

    assert model.seen == expected.seen
    assert len(set(model.seen)) > 10
    assert model.evictions > 6
    assert_equal(model.state_dict(), expected.state_dict())


def saving(root: Path, **given: Any) -> ModelCheckpoint:
    return ModelCheckpoint(dirpath=root, filename="{step}", **given)


@pytest.mark.campaign(seconds=4)
@pytest.mark.parametrize("every", [4, 6], ids=["amid an epoch", "between epochs"])
def test_a_saved_run_goes_on_as_it_would_have(every: int, tmp_path: Path) -> None:
    whole = fitted(trainer(tmp_path, max_epochs=3))
    stock = {"max_epochs": 3, "enable_checkpointing": True}
    save = saving(tmp_path / "stock", every_n_train_steps=every, save_top_k=-1)
    fitted(trainer(tmp_path, callbacks=[save], **stock))
    expected = fitted(trainer(tmp_path, **stock), ckpt_path=tmp_path / f"stock/step={every}.ckpt")
    save = saving(tmp_path / "ours", every_n_train_steps=every, save_top_k=-1)
    fitted(trainer(tmp_path, ours(), callbacks=[save], **stock))
    path = tmp_path / f"ours/step={every}.ckpt"

    model = fitted(trainer(tmp_path, ours(hbm=60_000), **stock), ckpt_path=path)

    assert path.is_dir()
    assert model.seen == expected.seen
    assert_equal(model.state_dict(), expected.state_dict())
    if every == 6:  # amid an epoch the Trainer begins with its first batch again
        assert_equal(model.state_dict(), whole.state_dict())


def test_only_the_best_and_the_last_checkpoints_stay(tmp_path: Path) -> None:
    save = saving(tmp_path / "kept", monitor="val", save_top_k=1, save_last=True)
    run = trainer(tmp_path, ours(), callbacks=[save], enable_checkpointing=True, max_epochs=3)

    fitted(run)

    kept = sorted(path.name for path in (tmp_path / "kept").iterdir())
    assert kept == ["last.ckpt", Path(save.best_model_path).name]
    assert len(list((tmp_path / "kept/last.ckpt").iterdir())) == 1
    assert run.validate(Model(), loader(2), ckpt_path="best", verbose=False)[0]["val"] > 0


class Halved(Model):
    """Its checkpoints have other weights than it trains with."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: value / 2 for name, value in state.items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: value * 2 for name, value in state.items()}


class Reading(Model):
    """Its hook reads what is loaded, and changes some of it in place."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen.append(len(checkpoint["optimizer_states"]))
        state = checkpoint["state_dict"]
        name = next(iter(state))
        state[name] = state[name] + 1.0


@pytest.mark.campaign(seconds=3)
@pytest.mark.parametrize("kind", [Halved, Reading])
def test_what_hooks_make_of_a_checkpoints_weights_is_saved_and_loaded(
    kind: type[Model], tmp_path: Path
) -> None:
    found: list[list[Model]] = []
    for name, make in (("stock", lambda: "auto"), ("ours", ours)):
        path, first, second = tmp_path / f"{name}.ckpt", kind(), kind()
        run = trainer(tmp_path, make(), max_epochs=1)
        run.fit(first, loader(), loader(2))
        run.save_checkpoint(path)
        trainer(tmp_path, make()).fit(second, loader(), loader(2), ckpt_path=path)
        found.append([first, second, kind.load_from_checkpoint(path, weights_only=False)])

    for expected, model in zip(*found, strict=True):
        assert model.seen == expected.seen
        assert_equal(model.state_dict(), expected.state_dict())


def test_a_checkpoint_of_averaged_weights_has_them(tmp_path: Path) -> None:
    averaging = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging")
    found = []
    for name, strategy in (("stock", "auto"), ("ours", ours(hbm="64MiB"))):
        callbacks = [
            saving(tmp_path / name, every_n_train_steps=4, save_top_k=-1),
            averaging.EMAWeightAveraging(decay=0.9),
        ]
        fitted(trainer(tmp_path, strategy, callbacks=callbacks, enable_checkpointing=True))
        path = tmp_path / name / "step=4.ckpt"
        found.append(Model.load_from_checkpoint(path, weights_only=False).state_dict())

    assert_equal(found[1], found[0])


def test_a_checkpoint_of_the_stock_trainer_is_gone_on_with(tmp_path: Path) -> None:
    whole = fitted(trainer(tmp_path, max_epochs=2))
    first = trainer(tmp_path, max_epochs=1)
    fitted(first)
    first.save_checkpoint(tmp_path / "stock.ckpt")

    model = fitted(trainer(tmp_path, ours()), ckpt_path=tmp_path / "stock.ckpt")

    assert_equal(model.state_dict(), whole.state_dict())


def test_what_was_fitted_is_tested_saved_and_fitted_again(tmp_path: Path) -> None:
    seen: list[Any] = []
    for strategy in ("auto", ours()):
        run = trainer(tmp_path, strategy, max_epochs=1)
        model = fitted(run)
        run.test(model, loader(3), verbose=False)
        run.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
        run.fit_loop.max_epochs = 2
        run.fit(model, loader(), loader(2))
        seen.append((model.seen, torch.load(tmp_path / "weights.ckpt")["state_dict"]))

    assert seen[0][0] == seen[1][0]
    assert_equal(seen[1][1], seen[0][1])
    model, optimizer = hetero.release(model, run.strategy.optimizers[0])
    assert type(optimizer) is torch.optim.AdamW
    assert model.net(torch.zeros(1, 4, dtype=torch.long)).isfinite().all()


def test_a_module_is_tested_under_a_budget_without_being_fitted(tmp_path: Path) -> None:
    plain, model = Model(), Model()
    trainer(tmp_path).test(plain, loader(), verbose=False)

    trainer(tmp_path, ours()).test(model, loader(), verbose=False)

    assert model.seen == plain.seen
    assert set(hetero.status(model).units.values()) == {"home", "resident"}


def test_a_model_is_built_without_memory_and_its_weights_come_from_a_directory(
    tmp_path: Path,
) -> None:
    hetero.export(Model(), tmp_path / "weights")
    stock = trainer(tmp_path, max_epochs=1)
    expected = fitted(stock)
    stock.fit_loop.max_epochs = 2
    stock.fit(expected, loader(), loader(2))
    run = trainer(tmp_path, ours(weights=str(tmp_path / "weights")), max_epochs=1)
    with run.init_module(empty_init=True):
        model = Model()
    assert all(p.is_meta for p in model.parameters())

    run.fit(model, loader(), loader(2))
    run.fit_loop.max_epochs = 2
    run.fit(model, loader(), loader(2))  # goes on from what it learned, not from the files

    assert_equal(model.state_dict(), expected.state_dict())


def test_the_strategy_has_a_name(tmp_path: Path) -> None:
    model = fitted(trainer(tmp_path, "hetero", fast_dev_run=True))

    assert hetero.status(model).steps == 1


class Two(Model):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in "ab"]


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="2 optimizers for one model"):
        trainer(tmp_path, ours()).fit(Two("manual"), loader())
    with pytest.raises(ConfigError, match="scales the loss"):
        ours(precision="fp16")
    with pytest.raises(ConfigError, match="did you mean hbm"):
        HeteroStrategy(hbn=1)


def test_several_devices_need_a_mesh(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="2 devices, and mesh= is not set"):
        trainer(tmp_path, ours(), devices=2)
    with pytest.raises(ConfigError, match="2 machines, and mesh= is not set"):
        trainer(tmp_path, ours(), num_nodes=2)
    for given in ({"devices": 2}, {"num_nodes": 2}):
        with pytest.raises(ConfigError, match="mesh= is not set"):
            Fabric(accelerator="cpu", strategy=HeteroFabricStrategy(device="cpu"), **given)


class Own(HeteroStrategy):
    """A strategy that a user derived."""


def test_a_strategy_with_a_mesh_is_one_of_ranks() -> None:
    assert type(HeteroStrategy(device="cpu", mesh="world")) is HeteroRanksStrategy
    assert type(HeteroFabricStrategy({"mesh": "world"})) is HeteroFabricRanksStrategy
    assert HeteroStrategy(mesh="world", timeout_seconds=7)._timeout == timedelta(seconds=7)
    assert type(copy.deepcopy(HeteroStrategy(device="cpu"))) is HeteroStrategy
    with pytest.raises(ConfigError, match="Own computes on one device"):
        Own(mesh="world")


# -- Fabric --------------------------------------------------------------------------------------


def fabric_run(fabric: Fabric, steps: int, path: Path | None = None) -> Any:
    """Train; returns losses and the state to save."""
    torch.manual_seed(0)
    model = Tied(blocks=6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
    model, optimizer = fabric.setup(model, optimizer)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "step": 0}
    if path is not None:
        assert fabric.load(path, state) == {}
    batches = [tokens for (tokens,) in fabric.setup_dataloaders(loader())]
    losses = []
    for step in range(state["step"], steps):
        tokens = batches[step % len(batches)]
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        fabric.backward(loss)
        norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses += [loss.item(), norm.item()]
    state["step"] = steps
    return losses, state


def test_fabric_gives_the_same_numbers_and_goes_on_from_what_it_saved(tmp_path: Path) -> None:
    def ours_too() -> Fabric:
        strategy = HeteroFabricStrategy(device="cpu:sim", hbm=HBM, chunk_bytes=2048)
        return Fabric(accelerator="cpu", strategy=strategy)

    expected, state = fabric_run(Fabric(accelerator="cpu"), 8)
    fabric = ours_too()
    first, half = fabric_run(fabric, 4)
    fabric.save(tmp_path / "half", half)

    second, whole = fabric_run(ours_too(), 8, tmp_path / "half")

    assert first + second == expected
    assert hetero.status(whole["model"].module).evictions > 0
    assert_equal(whole["model"].state_dict(), state["model"].state_dict())


def test_a_model_that_fabric_saves_or_loads_alone_leaves_its_optimizer_as_it_is(
    tmp_path: Path,
) -> None:
    found = []
    for name in ("stock", "ours"):
        made = []
        for _ in range(2):
            kind = HeteroFabricStrategy(device="cpu:sim", hbm=HBM, chunk_bytes=2048)
            made.append(Fabric(accelerator="cpu", strategy="auto" if name == "stock" else kind))
        fabric, other = made
        _, first = fabric_run(fabric, 3)
        _, second = fabric_run(other, 2)
        fabric.save(tmp_path / name, {"model": first["model"]})
        other.load(tmp_path / name, {"model": second["model"]})
        (tokens,) = next(iter(loader()))
        other.backward(second["model"](tokens).square().mean())
        second["optimizer"].step()
        found.append([state["model"].state_dict() for state in (first, second)])

    for expected, state in zip(*found, strict=True):
        assert_equal(state, expected)


def test_fabric_saves_a_prepared_model_whole_or_refuses(tmp_path: Path) -> None:
    strategy = HeteroFabricStrategy(device="cpu:sim", hbm=HBM, chunk_bytes=2048)
    fabric = Fabric(accelerator="cpu", strategy=strategy)
    _, state = fabric_run(fabric, 1)

    with pytest.raises(ConfigError, match="a checkpoint of a prepared model is whole"):
        fabric.save(tmp_path / "x", state, filter={"model": lambda name, value: "head" in name})
