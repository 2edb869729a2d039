"""The CUDA path on a real device. Every test skips by name without one."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import hetero
from hetero.api import engine_of, prepare_tuned
from hetero.config import Config
from hetero.recipes.calibrate import CalibrateOptions, calibrate
from hetero.train.engine.budget import CUDA_SHARE
from hetero.train.engine.tuning import Tuning
from hetero.types import Lane
from tests.equivalence.harness import grads, paged, same, sgd
from tests.gpu import alone, cases
from tests.gpu.cases import Gpu
from tests.recipes.test_calibrate import TINY

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:.*[Dd]eterministic"),
]
globals().update({name: vars(cases)[name] for name in cases.NAMES})


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    """The device, with the workspaces that cuBLAS takes in this thread and in backward's; kernels
    that add by atomics would give other bits in each run of plain torch, too."""
    x = torch.ones(64, 64, device="cuda", requires_grad=True)
    (x @ x).sum().backward()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield Gpu("cuda", torch.cuda, width=2048, slack=192 << 20)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(False)


def test_a_copy_of_a_slab_does_not_stop_the_host(gpu: Gpu) -> None:
    """torch, too, has to take registered memory for page-locked."""
    device = gpu.device()
    slab, arena = device.slab(1 << 20), device.arena(1 << 20)
    for lane, ends in ((Lane.H2D, (arena, slab)), (Lane.D2H, (slab, arena))):
        torch.cuda._sleep(200_000_000)  # 0.1 s
        ticket = device.copy(lane, ends[0].block, ends[1].block, (device.mark(),))
        assert not device.query(ticket)
        device.sync(ticket)


def test_a_refused_registration_leaves_no_error_to_the_next_kernel(gpu: Gpu) -> None:
    device = gpu.device()
    slab = device.slab(1 << 20)
    assert device.lock(slab.block) is None
    assert torch.ones(8, device="cuda").add_(1).sum().item() == 16


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
def test_a_decoder_in_bf16_has_the_bits_of_plain_torch(gpu: Gpu, activations: str) -> None:
    """As people train it: fused attention, products of the tensor cores, tied words."""
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "tie_word_embeddings": True}
    config = transformers.LlamaConfig(**shape, **heads, vocab_size=16384)
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(config).to(gpu.place, torch.bfloat16).train()
    model = copy.deepcopy(plain)
    tokens = torch.randint(0, 16384, (2, 512), generator=torch.Generator().manual_seed(0))
    tokens = tokens.to(gpu.place)
    expected = plain(input_ids=tokens, labels=tokens).loss
    expected.backward()
    known = Config.load(
        device=gpu.device(),
        hbm=gpu.slack + (640 << 20),
        precision="bf16",
        activations=activations,
        chunk_bytes=1 << 20,
    )
    with paged():
        model, optimizer = prepare_tuned(model, sgd(model), known, Tuning(homes_on_hbm=False))
    found = model(input_ids=tokens, labels=tokens).loss
    found.backward()

    assert torch.equal(expected, found)
    theirs, ours = (cases.on_cpu(grads(m)) for m in (plain, model))
    same(theirs, ours, f"gradients under {activations}")
    assert engine_of(model).residence.name == "paged"
    hetero.release(model, optimizer)


def test_a_process_takes_nothing_of_devices_that_it_does_not_use() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device")
    assert said_alone(alone.contexts_elsewhere.__name__) == 0


def test_libraries_find_room_where_no_budget_was_given() -> None:
    assert said_alone(alone.share_of_libraries.__name__) < 1 - CUDA_SHARE


def said_alone(name: str) -> float:
    """Return what a process of its own prints."""
    command = [sys.executable, "-m", alone.__name__, name]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    return float(ran.stdout.split()[-1])


def test_calibrating_cuda_writes_a_profile_without_a_problem(disk: Path) -> None:
    options = CalibrateOptions(pace=TINY, device="cuda", output=disk / "box.toml")
    result = calibrate(options)
    gpu, link = result.profile.gpu, result.profile.link

    assert result.problems == ()
    assert gpu is not None and link is not None
    assert gpu.name == torch.cuda.get_device_name()
    assert result.profile.matmul_seconds(64, 64, 64, "fp32") > 0
    assert result.profile.overlap.gemm_under_h2d is not None
    assert result.profile.overlap.update_under_dma is not None
