"""Random draws of the samplers, each a pure function of (seed, purpose, sample, position, attempt).

Nothing here has state, so a sample depends neither on the batch it is drawn in nor on the order:
only on the seed and on its own index. Categorical draws are races: see :func:`shards.noise.race`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shards.base import derive_seed
from shards.noise import PositionKeys, uniforms
from trainer.objective import Places

ELEMENTS_PER_CHUNK = 1 << 22
"""Most float64 probabilities at a time: 32 MiB, of which a draw holds a dozen copies."""
ELEMENTS_PER_GPU_CHUNK = 1 << 25
"""The same on a GPU, which small chunks would leave idle."""


@dataclass(frozen=True)
class SampleKeys:
    """Names the randomness of B samples.

    Attributes:
        seed: The user's seed.
        sample_ids: [B] int64, index of each sample in the run.
        attempt: How often the sample has been drawn before (an entropy stop draws anew).
    """

    seed: int
    sample_ids: Int[Tensor, "b"]
    attempt: int = 0

    def at(
        self, purpose: str, where: Bool[Tensor, "b l"] | Places, first_position: int = 0
    ) -> PositionKeys:
        """Keys of the positions marked in ``where``, row-major.

        Args:
            purpose: Name of the use, which separates it from other uses of the seed.
            where: Positions; column 0 is row position ``first_position``.
            first_position: Row position of column 0.
        """
        rows, positions = Places.of(where).index
        seed = derive_seed(self.seed, purpose)
        ids = self.sample_ids.to(rows.device)[rows]
        return PositionKeys(seed, ids, positions + first_position, self.attempt)

    def select(self, rows: Int[Tensor, "m"] | Bool[Tensor, "b"]) -> SampleKeys:
        """The keys of some of the samples."""
        return SampleKeys(self.seed, self.sample_ids[rows], self.attempt)


def position_uniforms(
    keys: SampleKeys, purpose: str, num_positions: int, first_position: int = 0
) -> Float[Tensor, "b l"]:
    """One float64 uniform for each of ``num_positions`` consecutive positions of each sample."""
    count, device = len(keys.sample_ids), keys.sample_ids.device
    rows = torch.arange(count, device=device).repeat_interleave(num_positions)
    everywhere = Places(rows, torch.arange(num_positions, device=device).repeat(count))
    named = keys.at(purpose, everywhere, first_position)
    return uniforms(named, 0, 1).view(count, num_positions)


def position_chunks(num_positions: int, size: int, device: torch.device) -> Iterator[slice]:
    """Groups of positions whose float64 probabilities of ``size`` tokens fit in memory.

    There is always one, which is empty where there are no positions.
    """
    most = ELEMENTS_PER_CHUNK if device.type == "cpu" else ELEMENTS_PER_GPU_CHUNK
    step = max(1, most // size)
    for first in range(0, max(1, num_positions), step):
        yield slice(first, first + step)
