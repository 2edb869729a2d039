"""Units that are not pure: what they change is changed once, and gradients are those of torch.

Each program runs under the default, where nothing that fails its proof may be computed again, and
under activations="recompute", where it gives the same bits or is an error that names the unit.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations

from hetero.errors import StateError
from tests.campaigns.harness import (
    Block,
    Case,
    Net,
    Program,
    Side,
    adamw,
    loss_of_tokens,
    tokens_of,
)

D = 32


def trains(block: Callable[[], nn.Module], n_blocks: int = 4) -> Program:
    """Return a plain loop over a net of such blocks."""

    def program(side: Side) -> None:
        net = Net(n_blocks, block=block)
        side.train(*side.prepare(net, adamw(net)), steps=6)

    return program


# -- buffers ---------------------------------------------------------------------------------------


class RoutingBias(nn.Module):
    """DeepSeek-V3's balancing: a bias buffer steers the routing."""

    def __init__(self, d: int = D, n: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(d, n, bias=False)
        self.experts = nn.ModuleList(nn.Linear(d, d) for _ in range(n))
        self.register_buffer("bias", torch.zeros(n))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).sigmoid()
        top = (weights + self.bias).topk(2, -1).indices
        load = torch.zeros(4).scatter_add_(0, top.flatten(), torch.ones(top.numel()))
        self.bias.add_(0.05 * (load.mean() - load).sign())
        out = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            chosen = (top == k).any(-1, keepdim=True)
            out = out + expert(x) * (weights[..., k : k + 1] * chosen)
        return x + out


class Spectral(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up = parametrizations.spectral_norm(self.up)


class OldSpectral(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.spectral_norm(self.up)


class Codebook(nn.Module):
    """Vector quantisation whose codes follow their inputs, written through ``.data``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.register_buffer("codes", torch.randn(8, D))
        self.register_buffer("counts", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        near = torch.cdist(y.flatten(0, -2), self.codes).argmin(-1)
        found = self.codes[near].view_as(y)
        hot = F.one_hot(near, 8).float()
        self.counts.data.mul_(0.9).add_(0.1 * hot.sum(0))
        self.codes.data.lerp_((hot.T @ y.detach().flatten(0, -2)) / self.counts[:, None], 0.1)
        return x + y + (found - y).detach() + F.mse_loss(y, found) * 0.1


class Observed(nn.Module):
    """A quantisation observer: the range of what it saw scales what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.register_buffer("low", torch.zeros(()))
        self.register_buffer("high", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.low = self.low + 0.1 * (y.detach().min() - self.low)
        self.high.copy_(self.high + 0.1 * (y.detach().max() - self.high))
        scale = float(self.high - self.low) / 255 + 1e-6
        return x + torch.fake_quantize_per_tensor_affine(y, scale, 128, 0, 255)


class RunningMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.register_buffer("mean", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.mean.mul_(0.9).add_(0.1 * y.detach().abs().mean())
        return x + y / self.mean


class Gated(Block):
    """A buffer that counts calls chooses the branch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) if self.calls % 2 else super().forward(x).tanh()


class Attribute(Block):
    """A tensor that is no buffer, and one of the last call."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(())
        self.last = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) * self.scale.clone()
        self.scale.mul_(1.01)
        if self.last is not None:
            y = y + 0.1 * self.last
        self.last = y.detach().mean()
        return y


# -- containers ------------------------------------------------------------------------------------


class Adds(nn.Module):
    """Adds to a list that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor, aux: list[Tensor]) -> Tensor:
        h = torch.tanh(self.linear(x))
        aux.append(h.pow(2).mean())
        return x + h


class Carries(nn.Module):
    """Carries a value on in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor, carry: dict[str, Tensor]) -> Tensor:
        h = torch.tanh(self.linear(x + carry["h"]))
        carry["h"] = h
        return x + h


def auxiliary_losses(side: Side) -> None:
    class Model(Net):
        def forward(self, tokens: Tensor) -> Any:
            x, aux = self.embed(tokens), []
            for block in self.blocks:
                x = block(x, aux)
            return self.head(self.norm(x)) + sum(aux) * 0.1 * len(aux)

    net = Model(4, block=Adds)
    side.train(*side.prepare(net, adamw(net)))


def carried_value(side: Side) -> None:
    class Model(Net):
        def forward(self, tokens: Tensor) -> Any:
            x = self.embed(tokens)
            carry = {"h": torch.zeros_like(x)}
            for block in self.blocks:
                x = block(x, carry)
            return self.head(self.norm(x + carry["h"]))

    net = Model(4, block=Carries)
    side.train(*side.prepare(net, adamw(net)))


class Down(Block):
    def forward(self, x: Tensor, skips: list[Tensor]) -> Tensor:
        y = super().forward(x)
        skips.append(y)
        return y


class Up(Block):
    def forward(self, x: Tensor, skips: list[Tensor]) -> Tensor:
        return super().forward(x + skips.pop())


def skips_of_a_u_net(side: Side) -> None:
    class Model(Net):
        def forward(self, tokens: Tensor) -> Tensor:
            x, skips = self.embed(tokens), []
            for block in self.blocks:
                x = block(x, skips)
            return self.head(self.norm(x))

    net = Model(0)
    net.blocks = nn.ModuleList([Down(), Down(), Up(), Up()])
    side.train(*side.prepare(net, adamw(net)))


class State:
    """An object of the user's that blocks write to."""

    def __init__(self) -> None:
        self.total = torch.zeros(())
        self.seen: list[int] = []


class Notes(Block):
    def forward(self, x: Tensor, state: State) -> Tensor:
        state.total = state.total + x.detach().mean()
        state.seen.append(len(state.seen))
        return super().forward(x) * (1 + 0.1 * state.total) + len(state.seen)


def object_that_blocks_write_to(side: Side) -> None:
    class Model(Net):
        def forward(self, tokens: Tensor) -> Tensor:
            x, state = self.embed(tokens), State()
            for block in self.blocks:
                x = block(x, state)
            side.record("seen", len(state.seen), state.total)
            return self.head(self.norm(x))

    net = Model(4, block=Notes)
    side.train(*side.prepare(net, adamw(net)))


# -- state that is neither -------------------------------------------------------------------------


class Switched(Block):
    """Two adapters, of which an attribute names one."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleDict({name: nn.Linear(D, D) for name in "ab"})
        self.active = "a"

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.adapters[self.active](x).tanh()


def switched_adapters(side: Side) -> None:
    def loss_of(model: nn.Module, number: int) -> Tensor:
        losses = []
        for name in "ab":
            for block in model.blocks:
                block.active = name
            losses.append(loss_of_tokens(model, number))
        return losses[0] + 0.5 * losses[1]

    net = Net(4, block=Switched)
    side.train(*side.prepare(net, adamw(net)), loss_of)


def switched_after_the_proof(side: Side) -> None:
    """Adapters take turns only when units are known to be pure."""

    def loss_of(model: nn.Module, number: int) -> Tensor:
        losses = []
        for name in "ab" if number > 3 else "a":
            for block in model.blocks:
                block.active = name
            losses.append(loss_of_tokens(model, number))
        return sum(losses, torch.zeros(()))

    net = Net(4, block=Switched)
    side.train(*side.prepare(net, adamw(net)), loss_of, steps=8)


class Factor(Block):
    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


def attribute_between_two_forwards(side: Side) -> None:
    def loss_of(model: nn.Module, number: int) -> Tensor:
        losses = []
        for factor in (1.0, 0.5):
            for block in model.blocks:
                block.factor = factor
            losses.append(loss_of_tokens(model, number))
        return losses[0] + losses[1]

    net = Net(4, block=Factor)
    side.train(*side.prepare(net, adamw(net)), loss_of)


class Counter(Block):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.history: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.history.append(self.calls)
        return super().forward(x) * (1 + self.calls % 3) + 0.1 * len(self.history)


def python_call_counter(side: Side) -> None:
    net = Net(4, block=Counter)
    model, optimizer = side.prepare(net, adamw(net))
    side.train(model, optimizer, steps=6)
    side.record("calls", *(block.calls for block in model.blocks))
    side.record("history", *(len(block.history) for block in model.blocks))


SHARED = {"numpy": np.random.default_rng(3), "python": random.Random(3)}
torch_generator = torch.Generator()
tally = 0


class Draws(Block):
    """Draws from generators that are no attributes of a module."""

    def forward(self, x: Tensor) -> Tensor:
        global tally
        tally += 1
        noise = float(SHARED["numpy"].random()) + SHARED["python"].random()
        mask = torch.rand(x.shape, generator=torch_generator) > 0.2
        return super().forward(x) * mask * (1 + noise) + 0.01 * (tally % 5)


def generators_of_others(side: Side) -> None:
    global tally
    tally = 0
    SHARED["numpy"], SHARED["python"] = np.random.default_rng(3), random.Random(3)
    torch_generator.manual_seed(3)
    net = Net(4, block=Draws)
    side.train(*side.prepare(net, adamw(net)), steps=6)
    side.record("drawn", SHARED["numpy"].random(), SHARED["python"].random(), tally)


class Hidden:
    """What no snapshot finds: state behind a call into another class's object."""

    def __init__(self) -> None:
        self.values = iter(range(1, 10**6))

    def __call__(self) -> float:
        return next(self.values) * 1e-3


class Behind(Block):
    def __init__(self) -> None:
        super().__init__()
        self.next = Hidden()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.next())


def evaluated_before_backward(side: Side) -> None:
    class Drops(Block):
        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(super().forward(x), 0.3, self.training)

    def loss_of(model: nn.Module, number: int) -> Tensor:
        model.train()
        loss = loss_of_tokens(model, number)
        model.eval()
        return loss

    net = Net(4, block=Drops)
    side.train(*side.prepare(net, adamw(net)), loss_of)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (2, -1)).transpose(-3, -2).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(-3, -2).flatten(-2))


def attention_kernel_of_the_forward_alone(side: Side) -> None:
    def loss_of(model: nn.Module, number: int) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return loss_of_tokens(model, number)

    net = Net(4, block=Attention)
    side.train(*side.prepare(net, adamw(net)), loss_of)


def functional_call_of_other_weights(side: Side) -> None:
    net = Net(4)
    model, optimizer = side.prepare(net, adamw(net))
    other = {f"blocks.{i}.up.weight": torch.full((3 * D, D), 0.01) for i in range(4)}

    def loss_of(model: nn.Module, number: int) -> Tensor:
        tokens = tokens_of(number)
        logits = torch.func.functional_call(model, other, (tokens,))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    side.train(model, optimizer, loss_of)


class StartsWithTanh(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tanh(x))


def residual_in_place(side: Side) -> None:
    class Model(Net):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens) * 1.0
            for block in self.blocks:
                x += block(x)
            return self.head(self.norm(x))

    net = Model(4, block=StartsWithTanh)
    side.train(*side.prepare(net, adamw(net)))


class Masked(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x + 0.1 * mask)


def mask_refilled_for_each_block(side: Side) -> None:
    class Model(Net):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            mask = torch.empty(7, 1, dtype=torch.bool)
            for number, block in enumerate(self.blocks):
                mask.copy_((torch.arange(7) % (number + 2) > 0)[:, None])
                x = block(x, mask)
            return self.head(self.norm(x))

    net = Model(4, block=Masked)
    side.train(*side.prepare(net, adamw(net)))


class Rescaled(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.mul_(0.999)
        return super().forward(x)


class Every2nd(Block):
    made = 0

    def __init__(self) -> None:
        super().__init__()
        self.writes = bool(Every2nd.made % 2)
        Every2nd.made += 1

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            x = x.add_(1.0)
        return super().forward(x)


def one_of_two_writes_to_its_input(side: Side) -> None:
    Every2nd.made = 0

    class Model(Net):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens) * 1.0
            for block in self.blocks:
                x = block(x) * 1.0
            return self.head(self.norm(x))

    net = Model(4, block=Every2nd)
    side.train(*side.prepare(net, adamw(net)))


def named(name: str, program: Program) -> Program:
    program.__name__ = name
    return program


REFUSED = (StateError, "cannot be computed again")
PURE = [  # what stood before a forward can be had again
    *(
        named(f"{block.__name__}_blocks", trains(block))
        for block in (
            *(
                RoutingBias,
                Spectral,
                OldSpectral,
                Codebook,
                Observed,
                RunningMean,
                Gated,
                Attribute,
            ),
        )
    ),
    *(auxiliary_losses, carried_value, skips_of_a_u_net, object_that_blocks_write_to),
    *(switched_adapters, switched_after_the_proof, attribute_between_two_forwards),
    *(python_call_counter, generators_of_others, evaluated_before_backward),
    *(attention_kernel_of_the_forward_alone, functional_call_of_other_weights),
]
IMPURE = [  # what is gone, or out of reach
    named("Behind_blocks", trains(Behind)),
    *(residual_in_place, mask_refilled_for_each_block, one_of_two_writes_to_its_input),
    named("Rescaled_blocks", trains(Rescaled)),
]
CASES = [
    *(Case(program) for program in (*PURE, *IMPURE)),
    *(Case(program, {"device": "cpu:sim"}) for program in (*PURE[::3], *IMPURE[::2])),
    *(Case(program, {"activations": "recompute"}) for program in PURE),
    *(Case(program, {"activations": "recompute", "hbm": None}) for program in PURE[::2]),
    *(Case(program, {"activations": "recompute"}, REFUSED) for program in IMPURE),
    *(Case(program, {"activations": "recompute", "hbm": None}, REFUSED) for program in IMPURE),
]
