"""Gradients at home and the updates that read them, for both residences (floor 2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from hetero.cores import Cores
from hetero.device import Device
from hetero.errors import StateError
from hetero.events import EventLog, What
from hetero.memory.link import Link
from hetero.train.engine.setup import Setup
from hetero.train.gradients.homes import Growing, standing
from hetero.train.gradients.ring import GradRing
from hetero.train.gradients.shared import SharedGradStore
from hetero.train.gradients.store import GradStore
from hetero.train.model.graph import ask_unless_gone
from hetero.train.update.device_kernel import natives
from hetero.train.update.draft import Drafts
from hetero.train.update.masters import LossScaler
from hetero.train.update.pace import UpdatePace
from hetero.train.update.passage import Passage
from hetero.train.update.step import Stepper
from hetero.types import Tier, noop


@dataclass(frozen=True, eq=False)
class Trained:
    """Takes gradients home and steps there; ``stepper`` is None without an optimizer."""

    setup: Setup
    grads: GradStore
    stepper: Stepper | None
    passage: Passage
    """Through HBM, of updates of homes on HOST."""

    @classmethod
    def on(
        cls,
        setup: Setup,
        device: Device,
        link: Link,
        *,
        early: bool,
        growing: Growing = standing,
        lifting: Growing = standing,
        before_sums: Callable[[], None] = noop,
    ) -> Trained:
        """Take gradients from ``device``.

        ``early`` says whether updates begin in backward; ``growing`` is entered while gradients
        on HBM take more bytes, ``lifting`` while one at home has a copy there; ``before_sums`` is
        called before one in RAM becomes fp32.
        """
        cores = Cores(setup.worker.n_threads)
        room = {"growing": growing, "lifting": lifting}
        grads = make_grads(setup, device, link, cores, early=early, before_sums=before_sums, **room)
        setup.unclaimed.awaits_sums = ask_unless_gone(grads, lambda here: here.awaits_sums, False)
        passage = Passage(device, link, setup.ledger)
        stepper = None
        if setup.inner is not None:
            stepper = make_stepper(setup, setup.inner, grads, cores, passage)
        return cls(setup, grads, stepper, passage)

    @property
    def scaling(self) -> Stepper | None:
        """The stepper if it scales losses (precision="fp16")."""
        return None if self.stepper is None or self.stepper.scaler is None else self.stepper

    def hear_all(
        self, arrived: Callable[[nn.Parameter], None], arriving: Callable[[int], None]
    ) -> None:
        """Call ``arrived`` with every parameter that got a gradient; coded ones must get none.

        ``arriving`` hears before autograd adds to a gradient in 2 bytes, so that it may go home.
        """
        setup = self.setup
        exact = [p for p in setup.params if setup.bucket(p).codec.exact]
        coded = [p for p in setup.params if not setup.bucket(p).codec.exact]
        mastered = {setup.index[id(p)]: p for p in exact if setup.bucket(p).has_master}
        setup.hooks.before_gradients(mastered, arriving)
        setup.hooks.gradients(exact, arrived)
        setup.hooks.gradients(coded, self._refuse)

    def _refuse(self, param: nn.Parameter) -> None:
        name, codec = self.setup.segment(param).spec.name, self.setup.bucket(param).codec.name
        raise StateError(
            f"parameter {name!r} was frozen when the model was prepared, and is at home as {codec}:"
            " it cannot train",
            advice="release the model, thaw the parameter and prepare again; or name its module in"
            " keep_exact= and give it to the optimizer before hetero.prepare",
        )


def make_grads(
    setup: Setup,
    device: Device,
    link: Link,
    cores: Cores,
    *,
    early: bool,
    growing: Growing,
    lifting: Growing,
    before_sums: Callable[[], None],
) -> GradStore:
    trainable = [bucket for bucket in setup.buckets if bucket.trainable]
    ring = GradRing(
        device,
        link,
        setup.ledger,
        sizes_bytes=[s.spec.numel * b.dtype.itemsize for b in trainable for s in b.segments],
        most_bytes=max((bucket.n_bytes for bucket in trainable), default=0),
        lifting=lifting,
    )
    check, offload = setup.budget.sums_check(), setup.offload  # no module: out of gc's sight

    def make_room() -> None:
        before_sums()
        offload.give_way()
        check()

    make: Callable[..., GradStore] = GradStore
    if setup.comm.size > 1:
        make = partial(SharedGradStore, comm=setup.comm, link=link, space=setup.budget.sums)
    return make(
        setup.params,
        setup.blueprint.layout,
        device=device,
        ring=ring,
        store=setup.store,
        worker=setup.worker,
        cores=cores,
        early=early,
        growing=growing,
        before_sums=make_room,
        parts=setup.parts,
    )


def make_stepper(
    setup: Setup,
    inner: torch.optim.Optimizer,
    grads: GradStore,
    cores: Cores,
    passage: Passage,
) -> Stepper:
    drafts = Drafts(
        inner,
        setup.params,
        setup.blueprint.layout,
        grads=grads,
        store=setup.store,
        masters=setup.masters,
        native=natives(partial(_say, setup.log)) if setup.tuning.native else None,
        cores=cores,
        passage=passage,
        stream_to=setup.device.torch_device if setup.tuning.update_on_device else None,
    )
    return Stepper(
        drafts,
        grads,
        setup.worker,
        log=setup.log,
        scaler=LossScaler() if setup.config.precision == "fp16" else None,
        pace=UpdatePace(warms=setup.device.is_cuda and not setup.device.is_modelled),
        pause=setup.tuning.pause,
    )


def _say(log: EventLog, why: str) -> None:
    log.now(What.DECISION, tier=Tier.HBM, why=why)
