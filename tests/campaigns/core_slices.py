"""``micro_batch=``: what is cut is what has a row for each sample, and each slice's forward is had
again in backward. Plain torch accumulates over the same slices."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from hetero.errors import StateError
from tests.campaigns.core_purity import Adds, Codebook
from tests.campaigns.harness import Block, Case, Net, Side, tokens_of

BATCH = LENGTH = 7  # as long as the batch, by chance
D = 32
SETTINGS = {"hbm": 1 << 20, "micro_batch": 1, "chunk_bytes": 256}


class Attention(nn.Module):
    """Is given a causal mask, or positions, of no sample."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.places = nn.Embedding(LENGTH, D)

    def forward(self, x: Tensor, mask: Tensor, places: Tensor) -> Tensor:
        q, k, v = self.qkv(x + self.places(places)).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


class Masked(Net):
    mask = torch.ones(LENGTH, LENGTH).tril().bool()

    def forward(self, tokens: Tensor) -> Tensor:
        x, places = self.embed(tokens), torch.arange(tokens.shape[1])
        for block in self.blocks:
            x = block(x, self.mask, places)
        return self.head(self.norm(x))


class Added(Masked):
    mask = torch.zeros(LENGTH, LENGTH).masked_fill(~torch.ones(LENGTH, LENGTH).tril().bool(), -9.0)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def slices_of(side: Side, net: nn.Module, steps: int = 3) -> None:
    """Train on the whole batch with hetero, sample by sample with plain torch."""
    model, optimizer = side.prepare(net, sgd(net))
    for number in range(steps):
        torch.manual_seed(number)
        random.seed(number)
        np.random.seed(number)
        tokens = tokens_of(number, BATCH, LENGTH)
        parts = tokens.split(1) if side.is_plain else [tokens]
        losses = [
            F.cross_entropy(model(t).flatten(0, 1), t.flatten(), reduction="none") for t in parts
        ]
        torch.cat(losses).sum().backward() if not side.is_plain else [
            l.sum().backward() for l in losses
        ]
        side.record(f"losses {number}", torch.cat(losses))
        optimizer.step()
        optimizer.zero_grad()
        side.record_all(f"step {number}", model)
    with torch.no_grad():
        tokens = tokens_of(9, BATCH, LENGTH)
        parts = tokens.split(1) if side.is_plain else [tokens]
        side.record("evaluated", torch.cat([model(t) for t in parts]))


def boolean_mask_as_long_as_the_batch(side: Side) -> None:
    slices_of(side, Masked(3, block=Attention))


def float_mask_as_long_as_the_batch(side: Side) -> None:
    slices_of(side, Added(3, block=Attention))


class Draws(Block):
    draws = True

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(3)
        self.numpy = np.random.default_rng(3)

    def forward(self, x: Tensor) -> Tensor:
        if not self.draws:
            return super().forward(x)
        noise = random.random() + np.random.rand() + float(self.numpy.random())
        keep = torch.rand(x.shape[1:], generator=self.own) > 0.2
        return super().forward(x) * keep * (1 + noise)


def generators_in_slices(side: Side) -> None:
    """Each slice draws once: what is left of the generators shows it."""
    net = Net(2, block=Draws)
    net.blocks[1].draws = False  # layer by layer, both would draw in another order
    model, optimizer = side.prepare(net, sgd(net))
    tokens = tokens_of(0, BATCH, LENGTH)
    random.seed(5)
    np.random.seed(5)
    for part in tokens.split(1) if side.is_plain else [tokens]:
        logits = model(part)
        F.cross_entropy(logits.flatten(0, 1), part.flatten(), reduction="sum").backward()
    side.record("drawn", random.random(), np.random.rand(), model.blocks[0].numpy.random())
    side.record("own", model.blocks[0].own.get_state())
    optimizer.step()
    side.record_all("step", model)


class Spectral(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up = parametrizations.spectral_norm(self.up)


def buffers_in_slices(side: Side) -> None:
    net = Net(2, block=Spectral)
    model, optimizer = side.prepare(net, sgd(net))
    tokens = tokens_of(0, BATCH, LENGTH)
    for part in tokens.split(1) if side.is_plain else [tokens]:
        logits = model(part)
        F.cross_entropy(logits.flatten(0, 1), part.flatten(), reduction="sum").backward()
    side.record("buffers", *model.blocks[0].buffers())
    optimizer.step()
    side.record_all("step", model)


class Shared:
    """An object of the user's that blocks draw from."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)


class DrawsFrom(Block):
    def forward(self, x: Tensor, shared: Shared) -> Tensor:
        return super().forward(x) * (1 + torch.rand(x.shape[1:], generator=shared.generator))


def object_with_a_generator_in_slices(side: Side) -> None:
    shared = Shared()

    class Model(Net):
        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.norm(self.blocks[0](self.embed(tokens), shared)))

    net = Model(2, block=DrawsFrom)
    model, optimizer = side.prepare(net, sgd(net))
    tokens = tokens_of(0, BATCH, LENGTH)
    for part in tokens.split(1) if side.is_plain else [tokens]:
        F.cross_entropy(model(part).flatten(0, 1), part.flatten(), reduction="sum").backward()
    side.record("drawn", shared.generator.get_state())
    optimizer.step()
    side.record_all("step", model)


def list_that_a_unit_adds_to(side: Side) -> None:
    class Model(Net):
        def forward(self, tokens: Tensor) -> Tensor:
            x, aux = self.embed(tokens), []
            for block in self.blocks:
                x = block(x, aux)
            return self.head(self.norm(x)) + sum(aux)

    slices_of(side, Model(2, block=Adds))


def samples_that_meet_in_a_codebook(side: Side) -> None:
    slices_of(side, Net(2, block=Codebook))


CASES = [
    *(
        Case(program, SETTINGS)
        for program in (
            *(boolean_mask_as_long_as_the_batch, float_mask_as_long_as_the_batch),
            *(generators_in_slices, buffers_in_slices, object_with_a_generator_in_slices),
        )
    ),
    Case(list_that_a_unit_adds_to, SETTINGS, (StateError, "writes to a list or dictionary")),
    Case(samples_that_meet_in_a_codebook, SETTINGS, (StateError, "mixes samples|one row for each")),
]
