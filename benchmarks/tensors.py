"""What ranks move that divide layers, and what it costs that hetero pages their parts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from benchmarks.engine import Figure, Figures
from hetero.api import prepare
from hetero.internals import DispatchMode
from hetero.parallel.recipe import parallelize
from hetero.testing.ranks import run_ranks

WIDTH, HEAD, WORDS = 256, 32, 64
BATCH, TOKENS = 8, 64


class Attention(nn.Module):
    def __init__(self, width: int, head_dim: int = HEAD) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.o_proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.o_proj(mixed.transpose(1, 2).flatten(-2))
        return out


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(F.gelu(self.up(x)))
        return out


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.attention = nn.LayerNorm(width), Attention(width)
        self.second, self.mlp = nn.LayerNorm(width), MLP(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        out: torch.Tensor = x + self.mlp(self.second(x))
        return out


class LM(nn.Module):
    def __init__(self, n_blocks: int, width: int = WIDTH) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(n_blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.blocks(self.tokens(words))))
        return F.cross_entropy(logits.flatten(0, 1), words.flatten())


# -- bytes ---------------------------------------------------------------------------------------

MESHES: Mapping[str, tuple[tuple[int, ...], ...]] = {
    "1d": ((2,), (4,), (8,)),
    "2d": ((2, 2),),
    "2.5d": ((2, 2, 2),),
    "3d": ((2, 2, 2),),
}
AXES = ("a", "b", "c")


class Sent(DispatchMode):
    """Counts the bytes that this rank sends in collectives, which go round in rings."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
        self._sizes = {group.group_name: group.size() for group in groups}
        self.n_bytes = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its collectives, of what it has inside, are seen
        if func.namespace in ("_c10d_functional", "c10d_functional", "c10d"):
            self.n_bytes += self.sent(func.__name__.partition(".")[0], args)
        return func(*args, **(kwargs or {}))

    def sent(self, name: str, args: Any) -> float:
        if name in ("wait_tensor", "_wrap_tensor_autograd"):
            return 0.0
        if name == "all_gather_into_tensor":  # own part, to each of the others
            return float(args[0].nbytes * (args[1] - 1))
        if name == "reduce_scatter_tensor":
            return float(args[0].nbytes * (args[2] - 1) / args[2])
        if name == "all_reduce":
            n = self._sizes[args[2]]
            return float(2 * args[0].nbytes * (n - 1) / n)
        raise NotImplementedError(f"what {name} sends")


def volume(device: str | None = None) -> Figures:
    """Bytes that a rank sends for a layer, forward and backward, over the published formulas."""
    rows, detail = [], {}
    for dims, meshes in MESHES.items():
        for sizes in meshes:
            n_ranks = 1
            for size in sizes:
                n_ranks *= size
            counted = [run_ranks(n_ranks, _sent, dims, sizes, n)[0] for n in (1, 2)]
            a_layer, expected = counted[1] - counted[0], formula(dims, sizes)
            name = f"{dims} on {' x '.join(map(str, sizes))}"
            rows.append(Figure(f"{name}, at least", a_layer / expected, "ratio", ">=", 0.99))
            rows.append(Figure(f"{name}, at most", a_layer / expected, "ratio", "<=", 1.01))
            detail[name] = {"counted_bytes": a_layer, "formula_bytes": expected}
    return Figures(rows, {**detail, "width": WIDTH, "tokens": BATCH * TOKENS, "dtype": "float32"})


def _sent(rank: int, dims: str, sizes: tuple[int, ...], n_blocks: int) -> float:
    torch.manual_seed(0)
    model = LM(n_blocks)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=AXES[: len(sizes)])
    parallelize(model, mesh, dims)
    words = torch.randint(0, WORDS, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))
    with Sent(mesh) as sent:
        model(words).backward()
    return float(sent.n_bytes)


def products(m: int) -> list[tuple[int, int, int]]:
    """Return the products of a layer, [m, k] x [k, n]."""
    h = WIDTH
    return [(m, h, h)] * 4 + [(m, h, 4 * h), (m, 4 * h, h)]


def formula(dims: str, sizes: tuple[int, ...]) -> float:
    """Return what publications say that a rank sends for a layer, forward and backward, in bytes.

    Sums, or parts, go round in rings. m tokens, width h, products of [m, k] and [k, n].

    1d    Megatron-LM (arXiv:1909.08053): an all-reduce of [m, h] forward for each layer cut in
          rows, and backward for each one cut in columns: here q, k, v, up; it has q, k, v in one.
    2d    Optimus (arXiv:2104.05343), three products by SUMMA, in each of which a rank gets the
          q - 1 blocks of each of two matrices that it lacks, or adds up: C = AB moves A and B,
          A' = C'B^T moves B and A', B' = A^T C' moves A and B'.
    2.5d  Tesseract (arXiv:2105.14500): the same of m / d tokens, and an all-reduce of B' over d.
    3d    Bian et al. (arXiv:2105.14450): C = AB moves A, B and C; backward C', which is moved once
          for both products, A, B, A' and B'.
    """
    item, h, m = 4, WIDTH, BATCH * TOKENS
    q = sizes[0]
    if dims == "1d":
        return 6 * item * m * h * 2 * (q - 1) / q
    total = 0.0
    for tokens, k, n in products(m):
        if dims == "3d":
            blocks = 3 * tokens * k + 3 * k * n + 2 * tokens * n
            total += blocks * (q - 1) / q**3
        else:
            d = 1 if dims == "2d" else sizes[2]
            total += 3 * (tokens / d * k + k * n) * (q - 1) / q**2
            total += 2 * k * n / q**2 * (d - 1) / d
    return item * total


# -- pages ---------------------------------------------------------------------------------------


def pages(device: str | None = None, pairs: int = 15) -> Figures:
    """A step of two tensor parallel ranks over plain torch's, where frames hold all; weights."""
    found = run_ranks(2, _paired, device or "cpu", pairs)
    same = all(each["equal"] for each in found)
    rows = [
        Figure("hetero / plain", statistics.median(found[0]["ratios"]), "ratio", "<=", 1.10),
        Figure("weights equal", float(same), "share", "==", 1.0),
    ]
    return Figures(rows, found[0])


def _paired(rank: int, device: str, pairs: int) -> dict[str, Any]:
    loops: list[tuple[Any, Any]] = []
    for is_ours in (False, True):
        torch.manual_seed(0)
        model: nn.Module = LM(6, 2 * WIDTH)
        parallelize(model, init_device_mesh("cpu", (2,)))
        # torch's fused rules refuse plain parameters, as of norms, next to DTensors
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
        loops.append(
            prepare(model, optimizer, device=device, hbm="2GiB") if is_ours else (model, optimizer)
        )
    took: list[list[float]] = [[], []]
    for pair in range(pairs + 3):
        for side in (0, 1) if pair % 2 else (1, 0):
            dist.barrier()
            began = time.perf_counter()
            _step(*loops[side], pair)
            dist.barrier()
            if pair >= 3:
                took[side].append(time.perf_counter() - began)
    ratios = [mine / other for other, mine in zip(*took, strict=True)]
    equal = same(*(model.state_dict().values() for model, _ in loops))
    return {"ratios": ratios, "plain": took[0], "hetero": took[1], "equal": equal}


def _step(model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
    source = torch.Generator().manual_seed(number)
    model(torch.randint(0, WORDS, (BATCH, TOKENS), generator=source)).backward()
    optimizer.step()
    optimizer.zero_grad()


def same(ours: Iterable[torch.Tensor], theirs: Iterable[torch.Tensor]) -> bool:
    pairs = [
        [getattr(each, "_local_tensor", each) for each in pair]
        for pair in zip(ours, theirs, strict=True)
    ]
    return all(torch.equal(*pair) for pair in pairs)
