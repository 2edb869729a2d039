"""The types that editors and checkers see; mypy reads this file with the package.

`tests/test_face.py` runs it, too: what a checker believes is what there is.
"""

from __future__ import annotations

import torch
from torch import nn
from typing_extensions import assert_type

import hetero


class Net(nn.Linear):
    """A model of the user's."""

    def own(self) -> int:
        return self.in_features


def typed() -> list[type]:
    """Return the classes of what the public functions return, as they are when it runs."""
    net = Net(4, 2)
    plain = torch.optim.SGD(net.parameters(), lr=0.1)
    model, optimizer = hetero.prepare(net, plain, device="cpu:sim", hbm="64KiB")
    assert_type(model, Net)
    assert_type(optimizer, hetero.Optimizer)
    assert_type(model.own(), int)
    status = hetero.status(model)
    assert_type(status, hetero.Status)
    back, stepped = hetero.release(model, optimizer)
    assert_type(back, Net)
    assert_type(stepped, torch.optim.Optimizer)
    alone = hetero.prepare(Net(4, 2), device="cpu:sim", hbm="64KiB")
    assert_type(alone, Net)
    return [type(each) for each in (model, optimizer, status, back, stepped, alone)]
