"""Models in the shape of torchtune's: modules without parameters are one object for a process."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hetero
from hetero.errors import BudgetError
from tests.campaigns.harness import VOCAB, Case, Side, adamw, loss_of_tokens, tokens_of

D = 16


class Rotary(nn.Module):
    """A table that is made once; torchtune's embeddings of positions are such modules."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(0.5, 1.5, D), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table


SILU = nn.SiLU()  # as the default of an argument is


class FeedForward(nn.Module):
    def __init__(self, activation: nn.Module = SILU) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(D)
        self.w1 = nn.Linear(D, 3 * D, bias=False)
        self.w2 = nn.Linear(3 * D, D, bias=False)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return x + self.w2(self.activation(self.w1(self.norm(x))))


class Decoder(nn.Module):
    def __init__(self, rotary: Rotary, n_layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, D)
        self.rotary = rotary
        self.layers = nn.ModuleList(FeedForward() for _ in range(n_layers))
        self.output = nn.Linear(D, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.rotary(self.embed(tokens))
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


def pair() -> tuple[Decoder, Decoder]:
    """Return a policy and its reference."""
    rotary = Rotary()
    policy, reference = Decoder(rotary), Decoder(rotary)
    reference.load_state_dict(policy.state_dict())
    return policy, reference.requires_grad_(False)


def policy_and_reference(side: Side) -> None:
    """Both are prepared, and either is released first."""
    marked = vars(SILU).get("_hetero_part")
    for first in (0, 1):
        policy, reference = pair()
        policy, optimizer = side.prepare(policy, adamw(policy))
        if not side.is_plain:
            reference = hetero.prepare(reference, **{"chunk_bytes": 256, **(side.settings or {})})

        def loss_of(model: nn.Module, number: int, reference: nn.Module = reference) -> Tensor:
            with torch.no_grad():
                aim = reference(tokens_of(number)).log_softmax(-1)
            own = model(tokens_of(number)).log_softmax(-1)
            distance = F.kl_div(own, aim, log_target=True, reduction="batchmean")
            return loss_of_tokens(model, number) + 0.1 * distance

        side.train(policy, optimizer, loss_of, steps=3)
        if not side.is_plain:
            models = [policy, reference]
            hetero.release(models[first], optimizer if first == 0 else None)
            assert hetero.status(models[1 - first]).mode == "paged"
        side.record("policy", policy(tokens_of(7)))
        side.record("reference", reference(tokens_of(7)))
        if not side.is_plain:
            hetero.release(models[1 - first], optimizer if first == 1 else None)
            assert vars(SILU).get("_hetero_part") == marked
            assert not any("_hetero_part" in vars(m) for m in (policy, policy.rotary))
        side.record_all("released", policy)


def a_retry_after_an_error(side: Side) -> None:
    """The model that did not fit is still held when a new one is built."""
    rotary = Rotary()
    model = Decoder(rotary)
    if not side.is_plain:
        small, optimizer = side.prepare(model, adamw(model), hbm=10_000)
        try:
            side.train(small, optimizer, steps=1)
        except BudgetError:
            side.records.clear()
        else:
            raise AssertionError("10 kB are enough")
    torch.manual_seed(12)
    again = Decoder(rotary)
    again, optimizer = side.prepare(again, adamw(again))
    side.train(again, optimizer)


SIM = {"device": "cpu:sim", "hbm": 120_000}
CASES = [Case(policy_and_reference, SIM), Case(a_retry_after_an_error, SIM)]
