"""Gumbel noise as the rest of the system sees it: arrival times F = exp(-xi), read in tiles.

A ``Noise`` is a flat batch of n token positions with one noise vector of V entries each. Nothing
asks for the whole [n, V] tensor: readers walk the vocabulary in tiles, and a tile that is asked
for twice (once in forward, once in backward) has the same bits both times. Every kind knows itself
how it is embedded, so that noise from a store and noise to sample with are treated alike.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shards.noise.embedding import Tiles, Weighting, embed_entries, embed_tiles
from shards.noise.gumbel import arrivals_from_gumbel, place_tokens, token_gumbels
from shards.noise.murmur3 import EngineKeys
from shards.noise.philox import Index, OfPositions, PositionKeys
from shards.noise.probabilities import Entries, Probabilities


@runtime_checkable
class Noise(Tiles, Protocol):
    """n positions x V vocabulary entries of arrival times F = exp(-xi), float32.

    ``tile`` is a pure function of its arguments: the same bits at every call. +inf stands where an
    entry was truncated away. (Over other positions the product behind the codec ``hidden`` may
    round its last bit differently, since matrix products do.)
    """

    def gumbels(self, start: int = 0, stop: int | None = None) -> Float[Tensor, "n tile"]:
        """xi of vocabulary ids start..stop-1 (all by default), -inf where truncated away.

        Not always -log of the tile: the token's own xi may lie beyond what F can hold.
        """
        ...

    def softmax_embed(
        self, weight: Float[Tensor, "v d"], weighting: Weighting | None = None
    ) -> Float[Tensor, "n d"]:
        """softmax(xi) @ weight in float32, without the [n, V] softmax; differentiable in weight.

        Args:
            weight: [V, D], one row per vocabulary id.
            weighting: tau, a transform of the noise, a prior over ids; softmax(xi) by default.
        """
        ...

    def select(self, index: Index) -> Noise:
        """The noise of some of the positions."""
        ...

    def to(self, device: torch.device | str) -> Noise:
        """The same noise on another device."""
        ...


@runtime_checkable
class PriorNoise(Noise, Protocol):
    """Noise to sample with: it has further independent draws."""

    def redrawn(self, draw: int) -> PriorNoise:
        """The ``draw``-th draw after this one, of the same positions."""
        ...

    def select(self, index: Index) -> PriorNoise: ...

    def to(self, device: torch.device | str) -> PriorNoise: ...


class TiledNoise(OfPositions):
    """What follows from ``tile`` and the fields alone."""

    def gumbels(self: Tiles, start: int = 0, stop: int | None = None) -> Float[Tensor, "n tile"]:
        return -self.tile(start, self.vocab_size if stop is None else stop).log()

    def softmax_embed(
        self: Tiles, weight: Float[Tensor, "v d"], weighting: Weighting | None = None
    ) -> Float[Tensor, "n d"]:
        return embed_tiles(self, weight, weighting or Weighting())


class TokenNoise(TiledNoise):
    """Noise whose entry of the observed token is known by itself.

    Subclasses say what the others are, by arrival time and, where that is not all, by xi; the
    token's own entry among them counts for nothing.
    """

    tokens: Int[Tensor, "n"]
    vocab_size: int
    token_gumbels: Float[Tensor, "n"]

    @abstractmethod
    def other_arrivals(self, start: int, stop: int) -> Float[Tensor, "n tile"]:
        """F_j of ids start..stop-1, in memory of its own."""

    def other_gumbels(self, start: int, stop: int) -> Float[Tensor, "n tile"]:
        """xi_j of ids start..stop-1, in memory of its own."""
        return -self.other_arrivals(start, stop).log()

    @property
    def num_positions(self) -> int:
        return self.tokens.shape[0]

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    @cached_property
    def own_arrivals(self) -> Float[Tensor, "n"]:
        """F of the tokens."""
        return arrivals_from_gumbel(self.token_gumbels)

    def tile(self, start: int, stop: int) -> Float[Tensor, "n tile"]:
        stop = min(stop, self.vocab_size)
        others = self.other_arrivals(start, stop)
        return place_tokens(others, self.tokens, self.own_arrivals, start, stop)

    def gumbels(self, start: int = 0, stop: int | None = None) -> Float[Tensor, "n tile"]:
        stop = self.vocab_size if stop is None else min(stop, self.vocab_size)
        others = self.other_gumbels(start, stop)
        return place_tokens(others, self.tokens, self.token_gumbels, start, stop)


@dataclass(frozen=True)
class KeyedPrior(TiledNoise):
    """Prior noise, F_j ~ Exp(1), computed from the keys whenever a tile is read."""

    keys: PositionKeys | EngineKeys
    vocab_size: int

    @property
    def num_positions(self) -> int:
        return self.keys.num_positions

    @property
    def device(self) -> torch.device:
        return self.keys.positions.device

    def tile(self, start: int, stop: int) -> Float[Tensor, "n tile"]:
        return self.keys.exponentials(start, min(stop, self.vocab_size))

    def redrawn(self, draw: int) -> KeyedPrior:
        """The ``draw``-th draw after this one, of the same positions."""
        return replace(self, keys=self.keys.redrawn(draw))


@dataclass(frozen=True)
class KeyedPosterior(TokenNoise):
    """Posterior noise given the tokens (Algorithm 1), from the exponentials that the keys name.

    F_x = p_x E_0 and F_j = E_j + p_j E_0, where E_j is what :class:`KeyedPrior` of the same keys
    gives and E_0 comes from a stream of its own. With :class:`DenseProbabilities` the token is the
    argmax of log p + xi at every position; with approximate probabilities it is nearly always.

    Attributes:
        keys: Seed, rows, positions and draw.
        tokens: [n] int64, the observed tokens.
        token_log_probs: [n] float32, their exact log-probabilities, nats.
        probabilities: The teacher's distribution at the n positions.
        is_prior: [n], positions where the tokens are as good as not observed: F_x = E_0 and
            F_j = E_j, prior noise. None where all are observed.
    """

    keys: PositionKeys | EngineKeys
    tokens: Int[Tensor, "n"]
    token_log_probs: Float[Tensor, "n"]
    probabilities: Probabilities
    is_prior: Bool[Tensor, "n"] | None = None

    @property
    def vocab_size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.probabilities.vocab_size

    @cached_property
    def first(self) -> Float[Tensor, "n"]:
        """E_0."""
        return self.keys.first_arrivals()

    @cached_property
    def token_gumbels(self) -> Float[Tensor, "n"]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """xi_x."""
        log_probs = self.token_log_probs
        if self.is_prior is not None:
            log_probs = log_probs.masked_fill(self.is_prior, 0.0)
        return token_gumbels(log_probs, self.first)

    @cached_property
    def _waited(self) -> Float[Tensor, "n"]:
        """By how much the others wait, per unit of p: E_0, nothing where the token is unknown."""
        return self.first if self.is_prior is None else self.first.masked_fill(self.is_prior, 0.0)

    def remaining(self, start: int, stop: int) -> Float[Tensor, "n tile"]:
        """E_j of a tile."""
        return self.keys.exponentials(start, stop)

    def other_arrivals(self, start: int, stop: int) -> Float[Tensor, "n tile"]:
        """E_j + p_j E_0 of a tile."""
        return self.probabilities.add_waits(self.remaining(start, stop), self._waited, start, stop)

    def split(self, width: int) -> list[KeyedPosterior]:
        parts = zip(super().split(width), self.probabilities.split(width), strict=True)
        return [replace(part, probabilities=probabilities) for part, probabilities in parts]


@dataclass(frozen=True)
class ShiftedNoise(TokenNoise):
    """Prior noise of the keys with some arrival times multiplied: F_j = E_j * factor_j.

    Attributes:
        keys: Seed, rows, positions and draw.
        tokens: [n] int64, the observed tokens; F_x = p_x E_0.
        token_log_probs: [n] float32, nats.
        factors: The entries that moved.
        vocab_size: V.
    """

    keys: PositionKeys | EngineKeys
    tokens: Int[Tensor, "n"]
    token_log_probs: Float[Tensor, "n"]
    factors: Entries
    vocab_size: int

    @cached_property
    def token_gumbels(self) -> Float[Tensor, "n"]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """xi_x = -log E_0 - log p_x."""
        return token_gumbels(self.token_log_probs, self.keys.first_arrivals())

    def other_arrivals(self, start: int, stop: int) -> Float[Tensor, "n tile"]:
        arrivals = self.keys.exponentials(start, stop)
        rows, columns, factors = self.factors.in_tile(start, stop)
        arrivals[rows, columns] *= factors
        return arrivals

    def split(self, width: int) -> list[ShiftedNoise]:
        parts = zip(super().split(width), self.factors.split(width, self.vocab_size), strict=True)
        return [replace(part, factors=factors) for part, factors in parts]


@dataclass(frozen=True)
class SparseNoise(TiledNoise):
    """Noise of which only k entries per position are known; the others count in the denominator.

    Attributes:
        ids: [n, k] int64, distinct vocabulary ids.
        arrivals: [n, k] float32, their arrival times.
        vocab_size: V.
        rest_rate: [n] float32, sum of 1/F over the other V - k entries: their share of
            ``sum(1/F)``, the denominator of softmax(xi).
        own: The observed tokens [n] and their xi [n], where those are known apart. A student is not
            shown them (it could tell the token by an entry below the cut): they are in
            :meth:`gumbels` alone.
    """

    ids: Int[Tensor, "n k"]
    arrivals: Float[Tensor, "n k"]
    vocab_size: int
    rest_rate: Float[Tensor, "n"]
    own: tuple[Int[Tensor, "n"], Float[Tensor, "n"]] | None = None

    @property
    def num_positions(self) -> int:
        return self.ids.shape[0]

    @property
    def device(self) -> torch.device:
        return self.ids.device

    def tile(self, start: int, stop: int) -> Float[Tensor, "n tile"]:
        width = min(stop, self.vocab_size) - start
        padded = torch.full((self.num_positions, width + 1), torch.inf, device=self.device)
        inside = (self.ids >= start) & (self.ids < start + width)
        columns = torch.where(inside, self.ids - start, width)
        return padded.scatter_(1, columns, self.arrivals)[:, :width]

    def gumbels(self, start: int = 0, stop: int | None = None) -> Float[Tensor, "n tile"]:
        stop = self.vocab_size if stop is None else min(stop, self.vocab_size)
        others = super().gumbels(start, stop)
        return others if self.own is None else place_tokens(others, *self.own, start, stop)

    def softmax_embed(
        self, weight: Float[Tensor, "v d"], weighting: Weighting | None = None
    ) -> Float[Tensor, "n d"]:
        weighting = weighting or Weighting()
        return embed_entries(self.ids, self.arrivals, self.rest_rate, weight, weighting)


def dense_arrivals(noise: Tiles) -> Float[Tensor, "n v"]:
    """All arrival times at once; for small vocabularies, tests and diagnostics."""
    return noise.tile(0, noise.vocab_size)
