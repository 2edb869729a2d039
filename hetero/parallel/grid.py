"""Layers of which ranks divide the weights and the activations along two or three axes (floor 3).

A product y = x W' is made in one piece on each rank: what its ranks lack of x and W is gathered
along one axis each, and where the axis of the sum is divided, too, the sums are scattered. Backward
gathers x and W again, so that between the passes a rank has its parts alone.

2D    q x q: SUMMA as in Optimus (Xu et al., arXiv:2104.05343), each block received once
2.5D  q x q x d: the same on each of d parts of the batch, whose gradients add up: Tesseract
      (Wang et al., arXiv:2105.14500)
3D    q x q x q: Bian et al., arXiv:2105.14450

Layers give and take plain tensors: this rank's part of the batch (dimension 0) and of the features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from hetero.errors import ConfigError
from hetero.internals import all_gathered, all_reduced, apply_function, reduce_scattered


class Along(NamedTuple):
    """The ranks of one axis of a mesh, and the dimension of a tensor of which they have parts."""

    group: str
    """torch's name of it."""
    n: int
    rank: int
    dim: int


def gather(part: torch.Tensor, over: Along) -> torch.Tensor:
    whole = all_gathered(part.contiguous(), over.n, over.group)
    if over.dim % part.dim() == 0:
        return whole
    return torch.cat(whole.chunk(over.n), dim=over.dim)


def gather_weight(part: torch.Tensor, over: Along) -> torch.Tensor:
    """Gather a copy: gloo lets go of what it sends late, and would lease the frames of a page."""
    return gather(part.clone(), over)


def scatter_sum(addend: torch.Tensor, over: Along) -> torch.Tensor:
    """Return this rank's part of the sum of all ranks' addends."""
    if over.dim % addend.dim():
        addend = torch.cat(addend.chunk(over.n, dim=over.dim))
    return reduce_scattered(addend.contiguous(), over.n, over.group)


def sum_over(addend: torch.Tensor, axes: Sequence[Along]) -> torch.Tensor:
    for over in axes:
        addend = all_reduced(addend.contiguous(), over.group)
    return addend


def own(whole: torch.Tensor, over: Along) -> torch.Tensor:
    """Return this rank's part of what all have."""
    return whole.chunk(over.n, dim=over.dim)[over.rank]


# -- what becomes of a layer's operands ------------------------------------------------------------


class Divided(NamedTuple):
    """Which axes of the mesh divide activations."""

    batch: tuple[int, ...]
    """From the outermost parts to the innermost."""
    features: int


class Grid(NamedTuple):
    """How a mesh divides a transformer: its pairs of layers lead from one level to another, and
    back."""

    outside: Divided
    inside: Divided
    """Between the layers of a pair, and after the head."""
    weights: int
    """The axis along which weights are gathered."""
    n_axes: int


GRIDS = {
    "2d": Grid(Divided((0,), 1), Divided((0,), 1), 0, 2),
    "2.5d": Grid(Divided((0, 2), 1), Divided((0, 2), 1), 0, 3),
    "3d": Grid(Divided((0, 2), 1), Divided((1, 2), 0), 2, 3),
}


def along(mesh: DeviceMesh, axis: int, dim: int) -> Along:
    return Along(mesh.get_group(axis).group_name, mesh.size(axis), mesh.get_local_rank(axis), dim)


def batch_parts(mesh: DeviceMesh, level: Divided) -> tuple[Along, ...]:
    return tuple(along(mesh, axis, 0) for axis in level.batch)


def vector_placements(grid: Grid, level: Divided) -> list[Placement]:
    """Return those of a bias, or of a norm's weight: parts of the features, on all of the batch."""
    return [Shard(0) if axis == level.features else Replicate() for axis in range(grid.n_axes)]


def weight_placements(grid: Grid, before: Divided, after: Divided) -> list[Placement]:
    """Return those of a linear layer's weight, [outputs, inputs]."""
    found: list[Placement] = [Replicate()] * grid.n_axes
    if before != after:
        found[before.features] = Shard(1)
    found[after.features], found[grid.weights] = Shard(0), Shard(1)
    return found


def words_placements(grid: Grid) -> list[Placement]:
    """Return those of an embedding of words: no axis has copies."""
    level = grid.outside
    return [Shard(1) if axis == level.features else Shard(0) for axis in range(grid.n_axes)]


def places_placements(grid: Grid) -> list[Placement]:
    """Return those of an embedding of positions, which are the same in all of the batch."""
    level = grid.outside
    return [Shard(1) if axis == level.features else Replicate() for axis in range(grid.n_axes)]


# -- linear layers -------------------------------------------------------------------------------


class Moves(NamedTuple):
    """Over which ranks the operands of a linear layer move."""

    inputs: Along
    weight: Along
    outputs: Along | None
    """Over which sums are scattered, if ranks divide the inputs' features."""
    copies: tuple[Along, ...]
    """With the same part of the weight."""
    bias_copies: tuple[Along, ...]


def product(mesh: DeviceMesh, grid: Grid, before: Divided, after: Divided) -> Moves:
    placements = weight_placements(grid, before, after)
    twins = (axis for axis, placement in enumerate(placements) if placement.is_replicate())
    is_cut = before != after
    return Moves(
        inputs=along(mesh, after.features, 0) if is_cut else along(mesh, before.features, -1),
        weight=along(mesh, grid.weights, 1),
        outputs=along(mesh, before.features, 0) if is_cut else None,
        copies=tuple(along(mesh, axis, 0) for axis in twins),
        bias_copies=batch_parts(mesh, after),
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, moves: Moves
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.moves = moves
        y = F.linear(gather(x, moves.inputs), gather_weight(weight, moves.weight))
        if moves.outputs is not None:
            y = scatter_sum(y, moves.outputs)
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        moves: Moves = ctx.moves
        x, weight = ctx.saved_tensors
        dx = dw = db = None
        if ctx.needs_input_grad[2]:
            db = sum_over(grad.flatten(0, -2).sum(0), moves.bias_copies)
        dy = grad if moves.outputs is None else gather(grad, moves.outputs)
        if ctx.needs_input_grad[0]:
            dx = scatter_sum(dy @ gather_weight(weight, moves.weight), moves.inputs)
        if ctx.needs_input_grad[1]:
            addend = dy.flatten(0, -2).T @ gather(x, moves.inputs).flatten(0, -2)
            dw = sum_over(scatter_sum(addend, moves.weight), moves.copies)
        return dx, dw, db, None


class CutLinear(nn.Linear):
    """A linear layer of which ranks divide the weight and the inputs."""

    moves: Moves
    joins: tuple[Along, ...]
    """Over which outputs are gathered, after each other, so that all ranks have the whole."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        operands = cast_alike(input, local(self.weight), local_or_none(self.bias))
        y = apply_function(_Linear, *operands, self.moves)
        return apply_function(_Whole, y, self.joins) if self.joins else y


class _Whole(torch.autograd.Function):
    """The whole on all ranks, which compute the same from it: a rank's gradient of it is all."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, joins: tuple[Along, ...]) -> torch.Tensor:
        ctx.joins = joins
        for over in joins:
            part = gather(part, over)
        return part

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        for over in reversed(ctx.joins):
            grad = own(grad, over)
        return grad.contiguous(), None


def joins_of(mesh: DeviceMesh, level: Divided) -> tuple[Along, ...]:
    return (along(mesh, level.features, -1), *reversed(batch_parts(mesh, level)))


# -- embeddings ----------------------------------------------------------------------------------


class OwnWords(NamedTuple):
    """Whose words an embedding's part has, and which ranks have parts of the batch."""

    first: int
    n: int
    padding: int
    parts: tuple[Along, ...]


class _Words(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, words: torch.Tensor, cut: OwnWords) -> torch.Tensor:
        here = words - cut.first
        others = (here < 0) | (here >= cut.n)
        here = here.masked_fill(others, 0)
        ctx.save_for_backward(here, others)
        ctx.cut = cut
        rows = F.embedding(here, weight).masked_fill_(others[..., None], 0)
        for over in cut.parts:
            rows = scatter_sum(rows, over)
        return rows

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        here, others = ctx.saved_tensors
        cut: OwnWords = ctx.cut
        for over in reversed(cut.parts):
            grad = gather(grad, over)
        grad = grad.masked_fill(others[..., None], 0)
        padding = cut.padding - cut.first
        if 0 <= padding < cut.n and cut.padding >= 0:
            grad = grad.masked_fill((here == padding)[..., None], 0)
        rows = grad.new_zeros(cut.n, grad.shape[-1])
        return rows.index_add_(0, here.flatten(), grad.flatten(0, -2)), None, None


class CutWords(nn.Embedding):
    """An embedding of words, of which all ranks get the same batch, and give their part."""

    parts: tuple[Along, ...]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        check_batch(len(input), self.parts)
        weight, first = local(self.weight), 0
        n = self.num_embeddings
        for over in self.parts:
            n //= over.n
            first += over.rank * n
        padding = -1 if self.padding_idx is None else self.padding_idx
        return apply_function(_Words, weight, input, OwnWords(first, n, padding, self.parts))


def check_batch(n: int, parts: Sequence[Along]) -> None:
    """Refuse, on all ranks alike, a batch that they cannot divide."""
    size = 1
    for over in parts:
        size *= over.n
    if n % size:
        raise ConfigError(
            f"a batch of {n} samples, which {size} parts of the mesh divide",
            advice=f"give all ranks the same batch, of a multiple of {size} samples",
        )


class _Copied(torch.autograd.Function):
    """A parameter of which several ranks have the same part, for each its own part of a batch."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, copies: tuple[Along, ...]) -> torch.Tensor:
        ctx.copies = copies
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return sum_over(grad, ctx.copies), None


class CutPlaces(nn.Embedding):
    """An embedding of positions, the same in all of a batch."""

    copies: tuple[Along, ...]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = apply_function(_Copied, local(self.weight), self.copies)
        return F.embedding(input, weight, self.padding_idx)


# -- norms ---------------------------------------------------------------------------------------


class Norm(NamedTuple):
    """A norm over features that ranks divide."""

    n: int
    """Features, on all ranks."""
    eps: float | None
    """None is the machine's, as in torch."""
    is_centered: bool
    features: Along
    copies: tuple[Along, ...]


class _Normed(torch.autograd.Function):
    """x / sqrt(mean x^2 + eps), of x less its mean if it is centered; in fp32 at least."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = None
        if norm.is_centered:
            mean = sum_over(wide.sum(-1, keepdim=True), (norm.features,)) / norm.n
            wide = wide - mean
        squares = sum_over(wide.square().sum(-1, keepdim=True), (norm.features,))
        eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
        factor = (squares / norm.n + eps).rsqrt()
        ctx.save_for_backward(x, mean, factor)
        ctx.norm = norm
        return (wide * factor).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, mean, factor = ctx.saved_tensors
        norm: Norm = ctx.norm
        normed = (x.to(factor.dtype) if mean is None else x.to(factor.dtype) - mean) * factor
        wide = grad.to(factor.dtype)
        sums = [(wide * normed).sum(-1, keepdim=True)]
        sums += [wide.sum(-1, keepdim=True)] if norm.is_centered else []
        along_both = sum_over(torch.cat(sums, -1), (norm.features,)) / norm.n
        wide = wide - normed * along_both[..., :1]
        if norm.is_centered:
            wide = wide - along_both[..., 1:]
        return (wide * factor).to(x.dtype), None


class CutNorm(nn.Module):
    """A norm whose features ranks divide."""

    weight: nn.Parameter | None
    norm: Norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = apply_function(_Normed, x, self.norm)
        for name in ("weight", "bias"):
            param = getattr(self, name, None)
            if param is not None:
                part = apply_function(_Copied, local(param), self.norm.copies)
                y = y * part if name == "weight" else y + part
        return y


# -- parts -----------------------------------------------------------------------------------------


def local(param: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter, to which gradients come."""
    return cast("DTensor", param).to_local()


def local_or_none(param: torch.Tensor | None) -> torch.Tensor | None:
    return None if param is None else local(param)


def cast_alike(*operands: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Cast as autocast does, before anything moves."""
    first = operands[0]
    assert first is not None
    kind = first.device.type
    if not torch.is_autocast_enabled(kind):
        return operands
    dtype = torch.get_autocast_dtype(kind)
    return tuple(None if each is None else each.to(dtype) for each in operands)
