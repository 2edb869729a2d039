"""Units that are not pure: what they change is changed once, and gradients are those of torch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.campaigns.harness import Case, Net, Side, adamw


class RoutingBias(nn.Module):
    """DeepSeek-V3's balancing: a bias buffer steers the routing."""

    def __init__(self, d: int = 32, n: int = 4) -> None:
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


def routing_bias(side: Side) -> None:
    net = Net(3, block=RoutingBias)
    model, optimizer = side.prepare(net, adamw(net))
    side.train(model, optimizer)


CASES = [Case(routing_bias)]
