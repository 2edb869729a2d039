"""Many parameters at once on CUDA: what frames lack is there while nothing computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hetero
from hetero.errors import BudgetError
from tests.emulator import fake

WIDTH, DEPTH = 64, 8
UNIT = (WIDTH + 1) * WIDTH * 4  # bytes of its parameters
ALL = DEPTH * UNIT  # 133 KB
HBM = 2 * ALL


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(DEPTH)))


class Training:
    """A model prepared on the emulated device, or plain."""

    def __init__(self, *, prepared: bool, hbm: int = HBM) -> None:
        self.model: Any = net()
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self._number = 0
        if prepared:
            self.model, self.optimizer = hetero.prepare(
                *(self.model, self.optimizer), device=fake.device(), hbm=hbm, chunk_bytes=4096
            )
        else:
            fake.on_device(self.model)

    def backward(self, between: Callable[[nn.Module], Tensor] | None = None) -> Tensor:
        self._number += 1
        x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(self._number))
        loss = self.model(x.to(fake.PLACE)).square().mean()
        if between is not None:
            between(self.model)
        loss.backward()
        return loss.detach().cpu()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def norms(model: nn.Module) -> Tensor:
    return torch.stack(torch._foreach_norm(list(model.parameters())))


def vector(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def held_views(model: nn.Module) -> Tensor:
    views = [param.detach() for param in model.parameters()]
    return torch.stack([view.sum() for view in views])


def average(model: nn.Module) -> Tensor:
    average = [param.detach().clone() for param in model.parameters()]
    torch._foreach_lerp_(average, [param.detach() for param in model.parameters()], 0.5)
    return torch.cat([a.flatten() for a in average])


def gathered(model: nn.Module) -> Tensor:
    with hetero.gathered(model) if hasattr(model, "_hetero_engine") else torch.no_grad():
        return torch.cat([param.detach().flatten() for param in model.parameters()])


LOOKS = [norms, vector, held_views, average, gathered]


@pytest.mark.campaign(seconds=1)
@pytest.mark.parametrize("look", LOOKS)
def test_all_parameters_can_be_looked_at_between_steps(
    watched: None, look: Callable[[nn.Module], Tensor]
) -> None:
    plain, ours = Training(prepared=False), Training(prepared=True)
    for _ in range(4):  # before the first step, after a backward, and after a step
        assert torch.equal(look(plain.model).cpu(), look(ours.model).cpu())
        assert torch.equal(plain.backward(), ours.backward())
        assert torch.equal(look(plain.model).cpu(), look(ours.model).cpu())
        plain.step()
        ours.step()


def test_looks_between_steps_leave_frames_as_they_were(watched: None) -> None:
    one, other = Training(prepared=True), Training(prepared=True)
    for _ in range(4):
        for training in (one, other):
            if training is one:
                vector(training.model)
            training.backward(between=norms if training is one else None)
            if training is one:
                vector(training.model)
            training.step()
        ours, theirs = hetero.status(one.model), hetero.status(other.model)
        # but for a few blocks of the allocator: when gradients have landed is the threads' timing
        assert abs(ours.division["frames"] - theirs.division["frames"]) < UNIT


def test_views_that_outlive_a_step_take_frames_and_give_them_back(watched: None) -> None:
    plain, ours = Training(prepared=False), Training(prepared=True)
    for number in range(5):
        if number == 2:
            kept = [param.detach() for param in (*ours.model.parameters(),)[: DEPTH // 2]]
        if number == 4:
            kept.clear()
        assert torch.equal(plain.backward(), ours.backward())
        plain.step()
        ours.step()


def test_views_for_which_there_is_no_room_are_refused(watched: None) -> None:
    ours = Training(prepared=True, hbm=ALL // 2)
    with pytest.raises(BudgetError, match="leases"):
        held_views(ours.model)


def test_a_first_step_may_differentiate_its_gradients(watched: None) -> None:
    def train(training: Training) -> list[Tensor]:
        found = []
        for number in range(3):
            x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(number))
            loss = training.model(x.to(fake.PLACE)).square().mean()
            weights = [training.model[3][0].weight, training.model[5][0].weight]
            grads = torch.autograd.grad(loss, weights, create_graph=True)
            total = loss + sum(grad.square().sum() for grad in grads)
            total.backward()
            training.step()
            found.append(total.detach().cpu())
        return found

    plain, ours = train(Training(prepared=False)), train(Training(prepared=True, hbm=8 * ALL))
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


def test_an_update_waits_for_copies_of_the_weights_that_it_changes(watched: None) -> None:
    """The device reads them late: the host must not have changed them until then."""
    plain, ours = Training(prepared=False), Training(prepared=True)
    for _ in range(4):
        found = []
        for training in (plain, ours):
            training.backward()
            found.append([param.detach().norm() for param in training.model.parameters()])
            training.optimizer.step()
            training.step()  # prefetches for the next forward are under way
        assert torch.equal(*(torch.stack(norms).cpu() for norms in found))


def test_a_deep_copy_is_in_ram_with_its_buffers(watched: None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*net(), nn.BatchNorm1d(WIDTH))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer = hetero.prepare(
        model, optimizer, device=fake.device(), hbm=ALL, chunk_bytes=4096
    )
    model(torch.randn(4, WIDTH).to(fake.PLACE)).square().mean().backward()
    optimizer.step()
    assert hetero.status(model).mode == "paged"

    twin = copy.deepcopy(model)

    values = {name: value.cpu() for name, value in model.state_dict().items()}
    copies = twin.state_dict()
    assert all(value.device.type == "cpu" for value in copies.values())
    assert all(torch.equal(values[name], value) for name, value in copies.items())
    assert twin.eval()(torch.ones(2, WIDTH)).shape == (2, WIDTH)
