"""What the codecs share that store the teacher's distribution instead of a draw from it."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from jaxtyping import Float, Int
from torch import Tensor

from shards.codec.protocol import Arrays, Codec
from shards.noise import KeyedPosterior, PositionKeys, Probabilities


class FreshDraws(Codec):
    """A codec whose noise is drawn when it is decoded: anew at every visit, by the keys."""

    is_fresh: ClassVar[bool] = True

    @abstractmethod
    def distribution(
        self,
        arrays: Arrays,
        tokens: Int[Tensor, "n"],
        token_log_probs: Float[Tensor, "n"],
        resources: Arrays,
    ) -> Probabilities:
        """The teacher's distribution as stored, with p_x exact (for distillation losses too)."""

    def decode(
        self,
        arrays: Arrays,
        tokens: Int[Tensor, "n"],
        token_log_probs: Float[Tensor, "n"],
        keys: PositionKeys,
        resources: Arrays,
    ) -> KeyedPosterior:
        """Posterior noise of n positions (Algorithm 1), drawn by ``keys``."""
        distribution = self.distribution(arrays, tokens, token_log_probs, resources)
        return KeyedPosterior(keys, tokens, token_log_probs, distribution)
