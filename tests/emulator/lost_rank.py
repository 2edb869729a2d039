"""A rank that gathers on an emulated device, and one that is lost in the middle of a gather:
``-m tests.emulator.lost_rank``, started as torchrun does."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist

from hetero.errors import RankLost
from tests.emulator import fake, nccl
from tests.emulator.rank import Case, place, train

LOST = 7
"""The exit status of a rank that lost another one."""
N_GATHERS = 12  # more than one step has


def leave_in_a_gather(number: signal.Signals) -> None:
    """Let this process get a signal when it would launch a gather of which it told the others."""
    plain, n_gathers = nccl.Communicator.all_gather_single, 0

    def leave(self: nccl.Communicator, *arguments: Any) -> nccl.Gather:
        nonlocal n_gathers
        n_gathers += 1
        if n_gathers > N_GATHERS:
            os.kill(os.getpid(), number)
        return plain(self, *arguments)

    nccl.Communicator.all_gather_single = leave  # as if lost


def main(case: Case, number: signal.Signals) -> None:
    fake.load()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    place(case, rank)
    if rank == 1:
        leave_in_a_gather(number)
    try:
        train(case, rank)
    except RankLost as error:
        print(error, file=sys.stderr)
        sys.exit(LOST)


if __name__ == "__main__":
    main(Case(**json.loads(sys.argv[1])), signal.Signals[sys.argv[2]])
