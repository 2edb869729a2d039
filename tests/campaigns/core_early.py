"""What programs hold, write and change while updates begin in backward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetero.errors import StateError
from tests.campaigns.harness import Case, Net, Program, Side, adamw, loss_of_tokens

EARLY = {"updates": "backward"}
SMALL = {**EARLY, "hbm": 110_000}  # pages, and every case below fits


def train(
    side: Side,
    *,
    hold: Callable[[Net, Any], Any] = lambda model, optimizer: None,
    between: Callable[[Any], None] = lambda held: None,
    install: Callable[[Side, Net], None] = lambda side, model: None,
) -> None:
    """Train; ``hold`` takes something after the third step, and before each later step
    ``between`` does something with it."""
    net = Net()
    model, optimizer = side.prepare(net, adamw(net))
    install(side, model)
    held = None
    for number in range(6):
        loss_of_tokens(model, number).backward()
        if held is not None:
            between(held)
            side.record(f"held {number}", *(v for v in leaves(held) if isinstance(v, Tensor)))
        optimizer.step()
        optimizer.zero_grad()
        if number == 2:
            held = hold(model, optimizer)
    del held
    side.record_all("end", model, optimizer)


def leaves(value: Any) -> list[Any]:
    """Return what containers hold."""
    if isinstance(value, dict):
        return [leaf for _, v in value.items() for leaf in leaves(v)]
    return [leaf for v in value for leaf in leaves(v)] if isinstance(value, list) else [value]


def some(model: Net) -> list[nn.Parameter]:
    return [model.head.weight, model.blocks[5].up.weight, model.blocks[3].norm.bias]


# -- states that a program holds show the last step's numbers until `step` -------------------------


def holds_step_counts(side: Side) -> None:
    train(side, hold=lambda model, optimizer: [optimizer.state[p]["step"] for p in some(model)])


def holds_states_of_parameters(side: Side) -> None:
    train(side, hold=lambda model, optimizer: [optimizer.state[p] for p in some(model)])


def holds_all_states(side: Side) -> None:
    train(side, hold=lambda model, optimizer: optimizer.state)


def holds_moments(side: Side) -> None:
    train(side, hold=lambda model, optimizer: [optimizer.state[p]["exp_avg"] for p in some(model)])


def holds_views_of_step_counts(side: Side) -> None:
    train(side, hold=lambda m, optimizer: [optimizer.state[p]["step"].view(1) for p in some(m)])


def writes_step_counts_that_it_holds(side: Side) -> None:
    def write(held: list[Tensor]) -> None:
        for count in held:
            count.fill_(1.0)

    train(
        side,
        hold=lambda model, optimizer: [optimizer.state[p]["step"] for p in some(model)],
        between=write,
    )


def clears_a_state_that_it_holds(side: Side) -> None:
    def clear(held: list[dict[str, Any]]) -> None:
        for state in held:
            state.clear()

    train(
        side,
        hold=lambda model, optimizer: [optimizer.state[p] for p in some(model)],
        between=clear,
    )


def clears_all_states_that_it_holds(side: Side) -> None:
    train(side, hold=lambda model, optimizer: optimizer.state, between=lambda held: held.clear())


def assigns_states_before_the_step(side: Side) -> None:
    def assign(held: list[Any]) -> None:
        held[0].state = defaultdict(dict)

    class Out(list[Any]):  # no leaves to record
        pass

    train(side, hold=lambda model, optimizer: Out([optimizer]), between=assign)


def looks_at_states_right_after_the_step(side: Side) -> None:
    net = Net()
    model, optimizer = side.prepare(net, adamw(net))
    held: list[dict[str, Any]] = []
    for number in range(6):
        loss_of_tokens(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
        side.record(f"held {number}", *(v for state in held for v in state.values()))
        held = held or [optimizer.state[p] for p in model.parameters()]


# -- hooks that write weights while backward holds their unit --------------------------------------


def data_is_written_by_a_hook(side: Side) -> None:
    def install(_: Side, model: Net) -> None:
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(decay)

    def decay(param: Tensor) -> None:
        param.data.mul_(0.99)

    train(side, install=install)


def a_detached_weight_is_written_by_a_hook(side: Side) -> None:
    def install(_: Side, model: Net) -> None:
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(decay)

    def decay(param: Tensor) -> None:
        param.detach().mul_(0.99)

    train(side, install=install)


# -- models that need weights otherwise from some step on ------------------------------------------


class Changing(Net):
    """A net whose forward changes after its third step."""

    how = ""

    def forward(self, tokens: Tensor) -> Tensor:
        x, blocks = self.embed(tokens), list(self.blocks)
        if self.how == "twice":
            blocks = [*blocks, blocks[2]]
        if self.how == "skipped":
            del blocks[3]
        if self.how == "reversed":
            blocks.reverse()
        for block in blocks:
            x = block(x)
        if self.how == "detached":
            x = x + F.linear(x, self.blocks[4].up.weight.detach()).mean(-1, keepdim=True)
        if self.how == "without graph":
            with torch.no_grad():
                x = x + self.blocks[1](x)
        if self.how == "tied":
            return F.linear(self.norm(x), self.embed.weight)
        return self.head(self.norm(x))


def changes(how: str) -> Program:
    def program(side: Side) -> None:
        net = Changing()
        model, optimizer = side.prepare(net, adamw(net))

        def loss_of(model: nn.Module, number: int) -> Tensor:
            net.how = how if number >= 3 else ""
            return loss_of_tokens(model, number)

        for number in range(6):
            loss = loss_of(model, number)
            loss.backward()
            side.record(f"loss {number}", loss)
            optimizer.step()
            optimizer.zero_grad()
        side.record_all("end", model, optimizer)

    program.__name__ = f"forward_changes_{how.replace(' ', '_')}"
    return program


def a_skipped_step_leaves_no_settings(side: Side) -> None:
    net = Net()
    model, optimizer = side.prepare(net, adamw(net))
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
    for number in range(6):
        for at in {3: [1], 4: [4]}.get(number, [1, 4]):
            model.blocks[at](x).square().mean().backward()
        if number == 3:
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] *= 0.5
            continue
        optimizer.step()
        optimizer.zero_grad()
        if number == 2:
            optimizer.state.pop(model.blocks[1].up.weight)
    side.record_all("end", model, optimizer)


HELD = (
    *(holds_step_counts, holds_states_of_parameters, holds_all_states, holds_moments),
    *(holds_views_of_step_counts, writes_step_counts_that_it_holds, clears_a_state_that_it_holds),
    *(clears_all_states_that_it_holds, looks_at_states_right_after_the_step),
)
HOOKS = (data_is_written_by_a_hook, a_detached_weight_is_written_by_a_hook)
FLOWS = ("twice", "skipped", "reversed", "detached", "without graph", "tied")
CASES = (
    *(Case(program, SMALL) for program in (*HELD, *HOOKS)),
    *(Case(program, {"hbm": 110_000}) for program in HOOKS),
    Case(looks_at_states_right_after_the_step, {"hbm": 110_000}),
    Case(assigns_states_before_the_step, SMALL, (StateError, "states are read")),
    *(Case(changes(how), SMALL) for how in FLOWS),
    Case(a_skipped_step_leaves_no_settings, SMALL),
)
