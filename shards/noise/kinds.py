"""Gumbel noise as the rest of the system sees it: arrival times F = exp(-xi), read in tiles.

A ``Noise`` is a flat batch of n token positions with one noise vector of V entries each. Nothing
asks for the whole [n, V] tensor: readers walk the vocabulary in tiles, and a tile that is asked
for twice (once in forward, once in backward) has the same bits both times.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shards.noise.entries import Entries
from shards.noise.gumbel import MIN_ARRIVAL
from shards.noise.keyed_exponentials import first_arrivals, keyed_exponentials
from shards.noise.position_keys import Index, PositionKeys
from shards.noise.probabilities import Probabilities

__all__ = [
    "DenseNoise",
    "KeyedPosterior",
    "KeyedPrior",
    "Noise",
    "PositionKeys",
    "ShiftedNoise",
    "SparseNoise",
    "dense_arrivals",
    "place_tokens",
]


@runtime_checkable
class Noise(Protocol):
    """n positions x V vocabulary entries of arrival times F = exp(-xi), float32."""

    @property
    def num_positions(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def tile(self, start: int, stop: int) -> Float[Tensor, "n tile"]:
        """Arrival times of vocabulary ids start..stop-1; +inf where the entry was truncated away.

        A pure function of its arguments: the same bits at every call.
        """
        ...

    def select(self, index: Index) -> Noise:
        """The noise of some of the positions."""
        ...

    def to(self, device: torch.device | str) -> Noise:
        """The same noise on another device."""
        ...


@dataclass(frozen=True)
class DenseNoise:
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

    def select(self, index: Index) -> DenseNoise:
        return DenseNoise(self.arrivals[index])

    def to(self, device: torch.device | str) -> DenseNoise:
        return DenseNoise(self.arrivals.to(device))


@dataclass(frozen=True)
class KeyedPrior:
    """Prior noise, F_j ~ Exp(1), computed from the keys whenever a tile is read."""

    keys: PositionKeys
    vocab_size: int

    @property
    def num_positions(self) -> int:
        return self.keys.rows.shape[0]

    @property
    def device(self) -> torch.device:
        return self.keys.rows.device

    def tile(self, start: int, stop: int) -> Float[Tensor, "n tile"]:
        return keyed_exponentials(self.keys, start, min(stop, self.vocab_size))

    def select(self, index: Index) -> KeyedPrior:
        return KeyedPrior(self.keys.select(index), self.vocab_size)

    def to(self, device: torch.device | str) -> KeyedPrior:
        return KeyedPrior(self.keys.to(device), self.vocab_size)


@dataclass(frozen=True)
class KeyedPosterior:
    """Posterior noise given the tokens, from the exponentials that the keys name.

    F_x = p_x E_0 and F_j = E_j + p_j E_0, where E_j is what :class:`KeyedPrior` of the same keys
    gives and E_0 comes from a stream of its own. With :class:`DenseProbabilities` the token is the
    argmax of log p + xi at every position; with approximate probabilities it is nearly always.

    Attributes:
        keys: Seed, rows, positions and draw.
        tokens: [n] int64, the observed tokens.
        token_log_probs: [n] float32, their exact log-probabilities, nats.
        probabilities: The teacher's distribution at the n positions.
    """

    keys: PositionKeys
    tokens: Int[Tensor, "n"]
    token_log_probs: Float[Tensor, "n"]
    probabilities: Probabilities

    @property
    def num_positions(self) -> int:
        return self.tokens.shape[0]

    @property
    def vocab_size(self) -> int:
        return self.probabilities.vocab_size

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    @cached_property
    def first(self) -> Float[Tensor, "n"]:
        """E_0."""
        return first_arrivals(self.keys)

    @cached_property
    def token_gumbels(self) -> Float[Tensor, "n"]:
        """xi_x = -log E_0 - log p_x, finite for any p_x."""
        return -(self.token_log_probs + self.first.log())

    def tile(self, start: int, stop: int) -> Float[Tensor, "n tile"]:
        stop = min(stop, self.vocab_size)
        arrivals = keyed_exponentials(self.keys, start, stop)
        arrivals = self.probabilities.add_waits(arrivals, self.first, start, stop)
        return place_tokens(arrivals, self.tokens, self.token_gumbels, start, stop)

    def select(self, index: Index) -> KeyedPosterior:
        return KeyedPosterior(
            self.keys.select(index),
            self.tokens[index],
            self.token_log_probs[index],
            self.probabilities.select(index),
        )

    def to(self, device: torch.device | str) -> KeyedPosterior:
        return KeyedPosterior(
            self.keys.to(device),
            self.tokens.to(device),
            self.token_log_probs.to(device),
            self.probabilities.to(device),
        )


@dataclass(frozen=True)
class ShiftedNoise:
    """Prior noise of the keys with some arrival times multiplied: F_j = E_j * factor_j.

    Attributes:
        keys: Seed, rows, positions and draw.
        tokens: [n] int64, the observed tokens; F_x = p_x E_0.
        token_log_probs: [n] float32, nats.
        factors: The entries that moved.
        vocab_size: V.
    """

    keys: PositionKeys
    tokens: Int[Tensor, "n"]
    token_log_probs: Float[Tensor, "n"]
    factors: Entries
    vocab_size: int

    @property
    def num_positions(self) -> int:
        return self.tokens.shape[0]

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    @cached_property
    def token_gumbels(self) -> Float[Tensor, "n"]:
        """xi_x = -log E_0 - log p_x."""
        return -(self.token_log_probs + first_arrivals(self.keys).log())

    def tile(self, start: int, stop: int) -> Float[Tensor, "n tile"]:
        stop = min(stop, self.vocab_size)
        arrivals = keyed_exponentials(self.keys, start, stop)
        rows, columns, factors = self.factors.in_tile(start, stop)
        arrivals[rows, columns] *= factors
        return place_tokens(arrivals, self.tokens, self.token_gumbels, start, stop)

    def select(self, index: Index) -> ShiftedNoise:
        return ShiftedNoise(
            self.keys.select(index),
            self.tokens[index],
            self.token_log_probs[index],
            self.factors.select(index),
            self.vocab_size,
        )

    def to(self, device: torch.device | str) -> ShiftedNoise:
        return ShiftedNoise(
            self.keys.to(device),
            self.tokens.to(device),
            self.token_log_probs.to(device),
            self.factors.to(device),
            self.vocab_size,
        )


@dataclass(frozen=True)
class SparseNoise:
    """Noise of which only k entries per position are known; the others count in the denominator.

    Attributes:
        ids: [n, k] int64, distinct vocabulary ids.
        arrivals: [n, k] float32, their arrival times.
        vocab_size: V.
        rest_rate: [n] float32, sum of 1/F over the other V - k entries: their share of
            ``sum(1/F)``, the denominator of softmax(xi).
    """

    ids: Int[Tensor, "n k"]
    arrivals: Float[Tensor, "n k"]
    vocab_size: int
    rest_rate: Float[Tensor, "n"]

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

    def select(self, index: Index) -> SparseNoise:
        return SparseNoise(
            self.ids[index], self.arrivals[index], self.vocab_size, self.rest_rate[index]
        )

    def to(self, device: torch.device | str) -> SparseNoise:
        return SparseNoise(
            self.ids.to(device),
            self.arrivals.to(device),
            self.vocab_size,
            self.rest_rate.to(device),
        )


def place_tokens(
    arrivals: Float[Tensor, "n tile"],
    tokens: Int[Tensor, "n"],
    token_gumbels: Float[Tensor, "n"],
    start: int,
    stop: int,
) -> Float[Tensor, "n tile"]:
    """Write F_x = exp(-xi_x) where the token lies in the tile, in place."""
    inside = (tokens >= start) & (tokens < stop)
    columns = (tokens - start).clamp(0, max(0, stop - start - 1))[:, None]
    own = (-token_gumbels).exp().clamp(min=MIN_ARRIVAL)[:, None]
    return arrivals.scatter_(
        1, columns, torch.where(inside[:, None], own, arrivals.gather(1, columns))
    )


def dense_arrivals(noise: Noise) -> Float[Tensor, "n v"]:
    """All arrival times at once; for small vocabularies, tests and diagnostics."""
    return noise.tile(0, noise.vocab_size)
