"""Noise held in memory, for cases whose arrival times are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from shards.noise.embedding import Noise
from shards.noise.gumbel import DenseProbabilities, KeyedPosterior
from shards.noise.philox import PositionKeys


@dataclass(frozen=True)
class DenseNoise(Noise):
    """Noise whose arrival times are all in memory; [n, V] float32."""

    arrivals: Float[Tensor, "n v"]

    @property
    def num_positions(self) -> int:
        return self.arrivals.shape[0]

    @property
    def vocab_size(self) -> int:
        return self.arrivals.shape[1]

    @property
    def device(self) -> torch.device:
        return self.arrivals.device

    def tile(self, start: int, stop: int) -> Float[Tensor, "n tile"]:
        return self.arrivals[:, start:stop]


@dataclass(frozen=True)
class GivenPosterior(KeyedPosterior):
    """A posterior whose E_j and E_0 are given; everything else is the code that runs."""

    others: Tensor = cast(Tensor, None)
    first: Tensor = cast(Tensor, None)  # pyright: ignore[reportIncompatibleVariableOverride]

    def remaining(self, start: int, stop: int) -> Tensor:
        return self.others[:, start:stop].clone()


def given_posterior(log_probs: Tensor, tokens: Tensor, others: Tensor, first: Tensor) -> GivenPosterior:
    """The posterior of n positions: log_probs, others [n, V]; tokens, first [n]."""
    index = torch.arange(len(tokens))
    own = log_probs.gather(1, tokens[:, None]).squeeze(1)
    keys = PositionKeys(0, index, index)
    dense = DenseProbabilities(log_probs)
    return GivenPosterior(keys, tokens, own, dense, others=others, first=first)
