"""What programs do with a prepared model on a CUDA device has plain torch's bits, in order."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

import hetero
from hetero.api import engine_of
from hetero.train.engine.tuning import Tuning
from tests.emulator import fake
from tests.emulator.harness import (
    Side,
    adamw,
    assert_no_pageable_copies,
    check,
    check_smallest,
    zoo,
)
from tests.emulator.programs import PROGRAMS, net, train
from tests.equivalence import test_disk
from tests.equivalence.harness import paged
from tests.equivalence.zoo import BY_NAME, Case
from tests.train import test_codes, test_precision


@pytest.mark.campaign(seconds=6)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_in_order_and_bitwise(name: str, watched: None) -> None:
    fake.start(seed=zlib.crc32(name.encode()))
    program, settings = PROGRAMS[name]
    if "hbm" in settings:
        check(program, **settings)
    else:
        check_smallest(program, **{"activations": "keep", **settings})
    assert_no_pageable_copies()


MASTERS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "bf16 with momentum": {"precision": "bf16", "rule": "momentum"},
    "bf16 by torch's blocks": {"precision": "bf16", "tuning": Tuning(native=False)},
    "bf16 on the device": {  # momentum: the emulated square root is the CPU's
        "precision": "bf16",
        "rule": "momentum",
        "tuning": Tuning(update_on_device=True),
    },
    "bf16 offloaded": {"precision": "bf16", "activations": "offload"},
    "fp16": {"precision": "fp16"},
    "fp16 recomputed": {"precision": "fp16", "activations": "recompute"},
}


@pytest.mark.campaign(seconds=4)
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("name", MASTERS)
def test_masters_train_in_order_and_bitwise(name: str, micro: int, watched: None) -> None:
    """Against fp32 masters and rules that are written in numpy."""
    with paged():
        given = {"device": fake.device(), "hbm": 80_000, "place": fake.PLACE, **MASTERS[name]}
        reference, model, optimizer = test_precision.start(**given)
    test_precision.train(reference, model, optimizer, steps=4, micro=micro, clip=0.05)
    assert engine_of(model).residence.name == "paged"
    assert_no_pageable_copies()


@pytest.mark.parametrize(
    "codec", ["int8", pytest.param("nf4", marks=pytest.mark.campaign(seconds=1))]
)
def test_frozen_weights_in_code_train_in_order_and_bitwise(codec: str, watched: None) -> None:
    plain = fake.on_device(test_codes.rounded(test_codes.build(), codec))
    theirs = adamw(plain)
    losses = [test_codes.train(plain, theirs, 1, n, place=fake.PLACE) for n in range(5)]
    expected = [value.cpu() for value in test_codes.values(plain)]
    del plain, theirs
    model, optimizer = test_codes.prepared(codec, device=fake.device(), hbm=60_000)
    ours = [test_codes.train(model, optimizer, 1, n, place=fake.PLACE) for n in range(5)]
    assert ours == losses
    for left, right in zip(expected, test_codes.values(model), strict=True):
        assert torch.equal(left, right.cpu())
    assert_no_pageable_copies()


@pytest.mark.campaign(seconds=4)
@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
@pytest.mark.parametrize("loop", ["accumulate", "clip_norm"])
def test_homes_on_disk_train_in_order_and_bitwise(
    loop: str, activations: str, watched: None, disk: Path
) -> None:
    case = Case("wide", test_disk.Wide, BY_NAME[loop].step, BY_NAME[loop].data)
    given = {"nvme": str(disk), "chunk_bytes": 4096, "activations": activations}
    model = case.build()
    with paged():
        where = {"device": fake.device(), "hbm": 900_000, **given}
        host = test_disk.least_host(model, adamw(model), where.pop("nvme"), **where)
    tuning = Tuning(extent_numel=test_disk.EXTENT)
    seen = check_smallest(zoo(case, adamw), 900_000, host=host, tuning=tuning, **given)
    assert engine_of(seen.models[-1]).setup.store.pool.spills


def test_a_model_is_saved_while_it_trains_and_another_goes_on_from_there(
    watched: None, disk: Path
) -> None:
    """The save is of step 3, and runs under steps 4 to 6."""

    def whole(side: Side) -> None:
        model, optimizer = net(side, adamw)
        train(side, model, optimizer, 3)
        train(side, model, optimizer, 3, first=3)

    def stopped(side: Side) -> None:
        if side.is_plain:
            whole(side)
            return
        model, optimizer = net(side, adamw)
        train(side, model, optimizer, 3)
        save = hetero.save_checkpoint(disk / "at", model, optimizer, asynchronous=True)
        n_records = len(side.records)
        train(side, model, optimizer, 3, first=3)
        save.wait()
        hetero.release(model, optimizer)
        del side.records[n_records:]
        model, optimizer = net(side, adamw)
        hetero.load_checkpoint(disk / "at", model, optimizer)
        train(side, model, optimizer, 3, first=3)

    check(stopped, hbm=400_000, activations="keep")
