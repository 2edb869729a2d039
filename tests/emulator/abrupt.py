"""A process that comes to its end while the thread of a device's backward runs Python:
``-m tests.emulator.abrupt``. Its status says whether that thread was waited for."""

from __future__ import annotations

import atexit
import os
import threading
import time

import torch
from torch import nn

import hetero
from hetero.config import Config
from tests.emulator import fake

WAITED, CUT_SHORT = 0, 3
ended = threading.Event()


def main() -> None:
    # The first one to be registered is the last one to be called.
    atexit.register(lambda: os._exit(WAITED if ended.is_set() else CUT_SHORT))
    fake.load()
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hetero.prepare(model, optimizer, config=Config.load(device=fake.device(), hbm=2**20))
    out = model(torch.ones(2, 4).to(fake.PLACE))
    begun = threading.Event()

    def linger(_: torch.Tensor) -> None:
        begun.set()
        time.sleep(0.5)  # and other threads go on
        ended.set()

    out.register_hook(linger)
    threading.Thread(target=hetero.backward, args=(out.sum(),), daemon=True).start()
    begun.wait()


if __name__ == "__main__":
    main()
