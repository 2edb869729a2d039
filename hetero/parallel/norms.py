"""Norms of gradients that cross the stages of a pipeline (floor 3).

torch takes a norm of each tensor, and then the norm of these norms, in the order of the model's
parameters. A rank has some of the tensors, so ranks tell each other the norm of each, and all of
them take the same norm of norms.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from hetero.device.comm import Company
from hetero.errors import DivergenceError
from hetero.parallel.stages import stages_in
from hetero.train.model.parts import Parts

Place = tuple[int, int]
"""Of a parameter among those of all stages."""


class StageNorms:
    """The norms of the gradients of all stages, of which this rank has its own.

    Args:
        model: has this rank's stages.
        company: all ranks of the pipeline.
        n_ranks: with stages of their own.
        place: where norms are taken.
    """

    def __init__(
        self, model: nn.Module, company: Company, n_ranks: int, parts: Parts, place: torch.device
    ) -> None:
        self._company = company
        self._n_ranks = n_ranks
        self._parts = parts
        self._device = place
        at = dist.get_rank() // (dist.get_world_size() // n_ranks)
        self._places = places_of(model, at)

    def everywhere(
        self, params: Sequence[nn.Parameter], norms: Sequence[torch.Tensor], how: str
    ) -> list[torch.Tensor]:
        """Return the norms of all stages' gradients, in the order of the whole model.

        Each counts once: of ranks that have the same stages, those answer that have the same parts
        of tensors, and the same share, as this one.

        Args:
            params: this rank's, that have a gradient.
            norms: of these gradients.
            how: this rank clips. Raises DivergenceError where another one does otherwise.
        """
        sent = [self._parts.sent(norm) for norm in norms]
        mine = [(self._places[id(p)], one) for p, one in zip(params, sent, strict=True)]
        answers = self._company.agree(pickle.dumps((how, mine)), "norms of gradients")
        ways, rows = zip(*map(pickle.loads, answers), strict=True)  # of this very program
        if len(set(ways)) > 1:
            said = self._company.members.listed(ways)
            raise DivergenceError(
                f"ranks of a pipeline clip in different ways ({said})",
                advice="clip by the same norm on every rank",
            )
        n_stage = len(rows) // self._n_ranks
        like_this = rows[dist.get_rank() % n_stage :: n_stage]
        told = [each for row in like_this for each in row]
        told.sort(key=lambda each: each[0])
        return [self._parts.taken(one, self._device) for _, one in told]


def places_of(model: nn.Module, at: int) -> dict[int, Place]:
    """Return the place of each parameter among those of all stages, by its id.

    Stages that `split` cut know those of the whole model, where a weight that several of them share
    has its first one. Others come in the order of their ranks.

    Args:
        at: the number of this rank's stages in the pipeline.
    """
    found: dict[int, Place] = {}
    for _, stage in stages_in(model):
        for name, param in stage.model.named_parameters():
            place = 0, stage.order[name]
            found[id(param)] = min(place, found.get(id(param), place))
    for number, param in enumerate(model.parameters()):
        found.setdefault(id(param), (1 + at, number))
    return found
