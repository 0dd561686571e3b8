"""Prior noise of rows, for likelihoods that know nothing of the text they score."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from shards.base import derive_seed
from shards.noise import Noise
from trainer.objective import Places
from trainer.sampling import sampling_noise
from trainer.students import Student


@dataclass(frozen=True)
class PriorRowNoise:
    """Noise of B rows, drawn from the prior and truncated as the student has learnt to read it.

    Attributes:
        student: Who reads it.
        row_ids: Key the noise, with the seed and the draw.
        row_length: L.
        seed: The user's.
        draw: Which independent draw.
    """

    student: Student
    row_ids: Int[Tensor, "b"]
    row_length: int
    seed: int
    draw: int = 0

    def at(self, where: Bool[Tensor, "b l"] | Places) -> Noise:
        """Noise of the masked positions in row-major order."""
        places = Places.of(where)
        noise = sampling_noise(
            derive_seed(self.seed, "likelihood"),
            self.row_ids,
            self.row_length,
            self.student.config.vocab_size,
            codec=self.student.codec,
            draw=self.draw,
        )
        return noise.select(places.rows * self.row_length + places.positions)

    def rows(self, part: slice) -> PriorRowNoise:
        """The noise of some of the rows."""
        return replace(self, row_ids=self.row_ids[part])

    def to(self, device: torch.device) -> PriorRowNoise:
        """The same noise, drawn on that device."""
        return replace(self, row_ids=self.row_ids.to(device))

    def embeddings(self, masked: Bool[Tensor, "b l"]) -> Tensor:
        """[B, L, E] noise embeddings, zeros where a token is known."""
        values = self.student.embed_noise(self.at(masked))
        result = values.new_zeros(*masked.shape, values.shape[-1])
        return result.index_put(masked.nonzero(as_tuple=True), values)
