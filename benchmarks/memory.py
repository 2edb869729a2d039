"""What memory costs: packing waste, and RAM beside the sixteen bytes a parameter."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.engine import Figure, Figures, adamw
from hetero.api import empty_init, engine_of, prepare_tuned
from hetero.bench import CHECKOUT
from hetero.config import Config
from hetero.recipes.gpt import GPT, GPTConfig
from hetero.status import status
from hetero.train.engine.blueprint import draw
from hetero.types import Kind, Tier

ADAMW_BYTES = 16  # fp32 parameter, gradient and two moments


@dataclass(frozen=True)
class Shapes:
    """Published sizes of a Llama-3 model."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int = 128_256


LLAMA3 = {
    "Llama-3-8B": Shapes(4096, 32, 32, 8, 14336),
    "Llama-3-70B": Shapes(8192, 80, 64, 8, 28672),
}


class DecoderLayer(nn.Module):
    """The parameters of a Llama block; it has no forward, only shapes."""

    def __init__(self, s: Shapes) -> None:
        super().__init__()
        kv = s.width // s.heads * s.kv_heads
        self.q = nn.Linear(s.width, s.width, bias=False)
        self.k = nn.Linear(s.width, kv, bias=False)
        self.v = nn.Linear(s.width, kv, bias=False)
        self.o = nn.Linear(s.width, s.width, bias=False)
        self.gate = nn.Linear(s.width, s.hidden, bias=False)
        self.up = nn.Linear(s.width, s.hidden, bias=False)
        self.down = nn.Linear(s.hidden, s.width, bias=False)
        self.norm_in = nn.RMSNorm(s.width)
        self.norm_out = nn.RMSNorm(s.width)


class Decoder(nn.Module):
    def __init__(self, s: Shapes) -> None:
        super().__init__()
        self.embed = nn.Embedding(s.vocab, s.width)
        self.layers = nn.ModuleList(DecoderLayer(s) for _ in range(s.layers))
        self.norm = nn.RMSNorm(s.width)
        self.head = nn.Linear(s.width, s.vocab, bias=False)


def waste(device: str | None = None) -> Figures:
    """Packing waste of Llama-3-8B and 70B shapes, chunk size chosen by hetero."""
    rows, detail = [], {}
    for name, shapes in LLAMA3.items():
        with empty_init():
            model = Decoder(shapes)
        layout = draw(model, None, Config()).layout
        rows.append(Figure(name, 100 * layout.waste, "%", "<", 1.0))
        detail[name] = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "chunk_bytes": 4 * layout.chunk_numel,
            "chunks": layout.n_chunks,
        }
    return Figures(rows, detail)


def host(device: str | None = None) -> Figures:
    """RAM per fp32 parameter with AdamW beyond the 16 bytes needed, and the set-up peak."""
    rows, detail = [], {}
    for mode in ("resident", "paged"):
        command = [sys.executable, "-m", "benchmarks.memory", mode]
        out = subprocess.run(command, check=True, capture_output=True, text=True, cwd=CHECKOUT)
        found = json.loads(out.stdout.splitlines()[-1])
        rows.append(Figure(f"{mode}: beyond 16 bytes", 100 * found["extra"], "%", "<=", 2.0))
        rows.append(Figure(f"{mode}: set-up peak / final", found["setup"], "ratio", "<=", 1.1))
        detail[mode] = found
    return Figures(rows, detail)


def memory_of_this_process(key: str) -> int:
    """Return ``VmRSS`` or ``VmHWM`` of this process in bytes."""
    with open("/proc/self/status") as lines:
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))


def reset_peak() -> None:
    """Let VmHWM start over from the present size."""
    with open("/proc/self/clear_refs", "w") as control:
        control.write("5")


def measure_host(mode: str) -> dict[str, Any]:
    """Train a 60 M parameter model two steps in this process and account for its RAM."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    warm = GPT(GPTConfig(width=64, layers=1, heads=4, context=16))
    optimizer: Any = adamw(warm)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    warm(tokens, tokens).backward()
    optimizer.step()
    start = memory_of_this_process("VmRSS")
    model: nn.Module = GPT(GPTConfig(width=512, layers=19, heads=8, context=64))
    n_params = sum(p.numel() for p in model.parameters())
    hbm = None if mode == "resident" else 80 * 2**20
    optimizer = adamw(model)
    reset_peak()
    model, optimizer = prepare_tuned(model, optimizer, Config.load(device="cpu", hbm=hbm), None)
    setup_peak = memory_of_this_process("VmHWM") - start
    after_setup = memory_of_this_process("VmRSS") - start
    for _ in range(2):
        optimizer.zero_grad()
        model(tokens, tokens).backward()
        optimizer.step()
    held = memory_of_this_process("VmRSS") - start
    # Frames are the HBM tier: on "cpu" they are RAM too, but no cost of being at home.
    frames = engine_of(model).setup.ledger.peak(Tier.HBM, Kind.PARAM) if mode == "paged" else 0
    need = ADAMW_BYTES * n_params
    return {
        "mode": status(model).mode,
        "parameters": n_params,
        "rss_bytes": held,
        "frame_bytes": frames,
        "bytes_per_parameter": (held - frames) / n_params,
        "extra": (held - frames - need) / need,
        "setup": setup_peak / after_setup,
        "setup_peak_bytes": setup_peak,
        "after_setup_bytes": after_setup,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure_host(sys.argv[1])) + "\n")
