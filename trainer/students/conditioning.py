"""Noise -> embedding, with the weights that are learnt: softmax(tau xi + w log q) W.

W is V x D; of low rank it is W_r A with W_r V x r, tied it is E A with the token embedding E: what
V costs shrinks by D / r, or vanishes, and A costs r D or D^2.

Which entries of the noise there are, and how they are walked, the noise knows itself
(:mod:`shards.noise.embedding`): what a student is shown in training it is shown in sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from shards.errors import UsageError
from shards.noise.embedding import Noise, Weighting
from trainer.objective.batch import Places
from trainer.students.configuration import NoiseSettings


@dataclass(frozen=True)
class EmbeddedNoise:
    """What a student reads of the noise of n positions, or of rows of them (zero at known tokens).

    Attributes:
        embedding: [*shape, D] softmax(tau xi + w log q) W, for the first layer.
        scores: [*shape, K] float32, tau xi + w log q less a number per position, for the layers of
            ``noise.layers``; None without these.
        ids: [*shape, K] int32, which entries of the vocabulary they are of; None is all of them.
    """

    embedding: Float[Tensor, "*shape d"]
    scores: Float[Tensor, "*shape k"] | None = None
    ids: Int[Tensor, "*shape k"] | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> EmbeddedNoise:
        """All parts changed alike."""
        parts = (self.embedding, self.scores, self.ids)
        return EmbeddedNoise(*(None if part is None else change(part) for part in parts))  # type: ignore[arg-type]

    def __getitem__(self, index: Any) -> EmbeddedNoise:
        return self.map(lambda part: part[index])

    def laid_out(self, index: tuple[Tensor, ...], shape: Sequence[int]) -> EmbeddedNoise:
        """A batch of that shape: these positions at ``index``, zero elsewhere."""
        return self.map(lambda part: part.new_zeros(*shape, part.shape[-1]).index_put(index, part))

    @classmethod
    def cat(cls, parts: Sequence[EmbeddedNoise]) -> EmbeddedNoise:
        columns = zip(*((p.embedding, p.scores, p.ids) for p in parts), strict=True)
        return cls(*(None if each[0] is None else torch.cat(each) for each in columns))  # type: ignore[arg-type]


@dataclass(frozen=True)
class LayerNoise:
    """What later layers read of the noise at n places: scores and ids of :class:`EmbeddedNoise`, [n, K]."""

    places: Places
    scores: Float[Tensor, "n k"]
    ids: Int[Tensor, "n k"] | None = None

    @classmethod
    def of(cls, noise: EmbeddedNoise, places: Places) -> LayerNoise | None:
        """That of n positions; None where no later layer reads any."""
        return None if noise.scores is None else cls(places, noise.scores, noise.ids)


class GumbelConditioner(nn.Module):
    """Embeds noise vectors: softmax(tau xi + w log q) W.

    ``settings`` say the transform of the noise, w, and whether W is whole, of low rank or tied. A w
    other than 0 needs :meth:`set_unigram`.
    """

    weight: Any
    unigram_log_probs: Tensor | None

    def __init__(self, vocab_size: int, hidden_size: int, settings: NoiseSettings | None = None) -> None:
        super().__init__()
        self.settings = settings = settings or NoiseSettings()
        self.vocab_size, is_tied = vocab_size, settings.projection == "tied"
        width = settings.rank or hidden_size
        self.register_parameter("weight", None if is_tied else nn.Parameter(torch.empty(vocab_size, width)))
        is_direct = settings.rank is None and not is_tied
        self.map = None if is_direct else nn.Linear(width, hidden_size, bias=False)
        unknown = torch.full((vocab_size,), float("nan")) if settings.prior_weight else None
        self.register_buffer("unigram_log_probs", unknown)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """W uniform(+-1/sqrt V), the default of a linear layer from V to D; a tied A is the identity."""
        if self.weight is None:
            assert self.map is not None
            nn.init.eye_(self.map.weight)
            return
        bound = self.vocab_size**-0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def set_unigram(self, log_probs: Float[Tensor, "v"]) -> None:
        """Give the conditioner log q, which the weights keep; a UsageError for another size, or if not finite."""
        if log_probs.shape != (self.vocab_size,) or not bool(log_probs.isfinite().all()):
            expected = f"{self.vocab_size} finite log-probabilities"
            raise UsageError("bad unigram", got=tuple(log_probs.shape), expected=expected)
        if self.unigram_log_probs is not None:
            self.unigram_log_probs.copy_(log_probs)

    def forward(
        self, noise: Noise, tau: float = 1.0, table: Float[Tensor, "v d"] | None = None
    ) -> Float[Tensor, "n d"]:
        """Embeddings of n noise vectors of scale tau; ``table`` is the token embedding where W is tied to it.

        Raises:
            UsageError: For noise over another vocabulary, or a missing unigram.
        """
        if noise.vocab_size != self.vocab_size:
            raise UsageError(
                "noise of another vocabulary than the student's",
                got=noise.vocab_size,
                expected=self.vocab_size,
                remedy="train the student on a store of its own teacher",
            )
        prior = None
        if self.unigram_log_probs is not None:
            if bool(self.unigram_log_probs.isnan().any()):
                remedy = "call set_unigram with the store's unigram_log_probs"
                raise UsageError("prior_weight needs the corpus unigram", remedy=remedy)
            prior = torch.exp(self.settings.prior_weight * self.unigram_log_probs)
        weighting = Weighting(tau, self.settings.transform, prior)
        embedded = noise.softmax_embed(self.weight if table is None else table, weighting)
        return embedded if self.map is None else self.map(embedded)
