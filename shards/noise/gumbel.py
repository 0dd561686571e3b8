"""Gumbel noise as arrival times: F = exp(-xi), so that softmax(xi) = (1/F) / sum(1/F).

Prior: F_j ~ Exp(1). Given that token x was drawn from p by argmax(log p + xi), the posterior is
(Algorithm 1 of Zhang et al., ICLR 2026, with E_j = exp(-zeta_j), E_0 = exp(-zeta_0))

    F_x = p_x E_0        F_j = E_j + p_j E_0   (j != x)

Read as a race: token j arrives at rate p_j; E_0 is when the winner x arrived, and every other
token is still to come, so its remaining wait E_j adds to what it has waited already. Token x wins
because p_j / F_j < 1 / E_0 = p_x / F_x. Rounding keeps that order: E_j counts as at least
``64 * machine epsilon`` of p_j E_0, a change of the law of 8e-6 in total variation in float32.

Nothing here holds state: draws take a ``torch.Generator`` or the exponentials themselves.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shards.noise.embedding import Noise, Tile
from shards.noise.murmur3 import EngineKeys
from shards.noise.philox import OfPositions, PositionKeys, This

MIN_ARRIVAL = 2.0**-126
"""Smallest arrival time (xi = 87.3): 1/F stays finite in float32 for tokens of any probability.
Where the order of log p + xi matters, xi itself is read: ``Noise.gumbels``."""
PerPosition = Float[Tensor, "n"]


def add_wait_(remaining: Float[Tensor, "*shape"], waited: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """E_j + p_j E_0 in place, strictly above p_j E_0 whatever the rounding."""
    margin = 64 * torch.finfo(waited.dtype).eps
    return torch.maximum(remaining, waited * margin, out=remaining).add_(waited)


def token_gumbels(token_log_probs: Float[Tensor, "*batch"], first: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """xi_x = -log E_0 - log p_x of the tokens, finite for any p_x; never below the exact value."""
    exact = -(token_log_probs.double() + first.double().log())
    nearest = exact.to(token_log_probs.dtype)
    above = nearest.nextafter(torch.full_like(nearest, torch.inf))
    return torch.where(nearest.double() < exact, above, nearest)


def place_tokens(values: Tile, tokens: Int[Tensor, "n"], own: PerPosition, start: int, stop: int) -> Tile:
    """Write each token's own value where the token lies in the tile start..stop-1, in place."""
    inside = ((tokens >= start) & (tokens < stop))[:, None]
    columns = (tokens - start).clamp(0, max(0, stop - start - 1))[:, None]
    return values.scatter_(1, columns, torch.where(inside, own[:, None], values.gather(1, columns)))


def arrivals_from_gumbel(gumbels: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """F = exp(-xi), kept within float32's normal range."""
    return (-gumbels).exp().clamp(min=MIN_ARRIVAL)


def gumbel_argmax(log_probs: Float[Tensor, "*batch v"], arrivals: Float[Tensor, "*batch v"]) -> Int[Tensor, "*batch"]:
    """argmax_j (log p_j + xi_j), compared in float64; log_probs need not be normalised."""
    return (log_probs.double() - arrivals.double().log()).argmax(-1)


class TokenNoise(Noise):
    """Noise whose entry of the observed token is known by itself; among the others it counts for nothing."""

    tokens: Int[Tensor, "n"]
    token_gumbels: PerPosition

    @abstractmethod
    def other_arrivals(self, start: int, stop: int) -> Tile:
        """F_j of ids start..stop-1, in memory of its own."""

    def other_gumbels(self, start: int, stop: int) -> Tile:
        """xi_j of ids start..stop-1, in memory of its own."""
        return -self.other_arrivals(start, stop).log()

    @property
    def num_positions(self) -> int:
        return self.tokens.shape[0]

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    @cached_property
    def own_arrivals(self) -> PerPosition:
        """F of the tokens."""
        return arrivals_from_gumbel(self.token_gumbels)

    def tile(self, start: int, stop: int) -> Tile:
        return place_tokens(self.other_arrivals(start, stop), self.tokens, self.own_arrivals, start, stop)

    def gumbels(self, start: int = 0, stop: int | None = None) -> Tile:
        stop = self.vocab_size if stop is None else stop
        return place_tokens(self.other_gumbels(start, stop), self.tokens, self.token_gumbels, start, stop)


@dataclass(frozen=True)
class KeyedPrior(Noise):
    """Prior noise, F_j ~ Exp(1), computed from the keys whenever a tile is read."""

    keys: PositionKeys | EngineKeys
    vocab_size: int

    @property
    def num_positions(self) -> int:
        return self.keys.num_positions

    @property
    def device(self) -> torch.device:
        return self.keys.positions.device

    def tile(self, start: int, stop: int) -> Tile:
        return self.keys.exponentials(start, stop)

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
        tokens: [n] int64, the observed tokens.
        token_log_probs: [n] float32, their exact log-probabilities, nats.
        is_prior: [n], positions where the tokens are as good as not observed: F_x = E_0 and
            F_j = E_j, prior noise. None where all are observed.
    """

    keys: PositionKeys | EngineKeys
    tokens: Int[Tensor, "n"]
    token_log_probs: PerPosition
    probabilities: Probabilities
    is_prior: Bool[Tensor, "n"] | None = None

    @property
    def vocab_size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.probabilities.vocab_size

    @cached_property
    def first(self) -> PerPosition:
        """E_0."""
        return self.keys.first_arrivals()

    @cached_property
    def token_gumbels(self) -> PerPosition:  # pyright: ignore[reportIncompatibleVariableOverride]
        """xi_x."""
        log_probs = self.token_log_probs
        if self.is_prior is not None:
            log_probs = log_probs.masked_fill(self.is_prior, 0.0)
        return token_gumbels(log_probs, self.first)

    @cached_property
    def _waited(self) -> PerPosition:
        """By how much the others wait, per unit of p: E_0, nothing where the token is unknown."""
        return self.first if self.is_prior is None else self.first.masked_fill(self.is_prior, 0.0)

    def remaining(self, start: int, stop: int) -> Tile:
        """E_j of a tile."""
        return self.keys.exponentials(start, stop)

    def other_arrivals(self, start: int, stop: int) -> Tile:
        """E_j + p_j E_0 of a tile."""
        return self.probabilities.add_waits(self.remaining(start, stop), self._waited, start, stop)


class Probabilities(OfPositions):
    """n positions x V vocabulary entries of (nearly) normalised probabilities, float32."""

    vocab_size: int

    @abstractmethod
    def tile(self, start: int, stop: int) -> Tile:
        """Probabilities of vocabulary ids start..stop-1, in memory of its own."""

    def add_waits(self, arrivals: Tile, first: PerPosition, start: int, stop: int) -> Tile:
        """E_j + p_j E_0 of a tile of E_j, which is overwritten."""
        return add_wait_(arrivals, self.tile(start, stop).mul_(first[:, None]))


@dataclass(frozen=True)
class DenseProbabilities(Probabilities):
    """All probabilities in memory, as log-probabilities; [n, V] float32."""

    log_probs: Float[Tensor, "n v"]

    @property
    def num_positions(self) -> int:
        return self.log_probs.shape[0]

    @property
    def vocab_size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.log_probs.shape[1]

    def tile(self, start: int, stop: int) -> Tile:
        return self.log_probs[:, start:stop].exp()


GRAIN = 512
"""Ids between two counts of entries; every tile of :mod:`shards.noise.embedding` begins at one."""


class ById(NamedTuple):
    """(id, row, value) entries by rising id, and how many there are below id 0, GRAIN, 2 GRAIN, ..., V."""

    ids: Int[Tensor, "k"]
    rows: Int[Tensor, "k"]
    values: Float[Tensor, "k"]
    offsets: list[int]


@dataclass(frozen=True)
class Entries(OfPositions):
    """Up to m (id, value) pairs at each of n positions; the used ids of a row are distinct."""

    ids: Int[Tensor, "n m"]
    values: Float[Tensor, "n m"]
    used: Bool[Tensor, "n m"]
    vocab_size: int

    @property
    def num_positions(self) -> int:
        return self.ids.shape[0]

    @cached_property
    def by_id(self) -> ById:
        """Used slots by id, so that those of a tile are one slice."""
        return self._sorted(max(1, self.num_positions))[0]

    def in_tile(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """(rows, columns in the tile, values) of the entries with ids start..stop-1."""
        ids, rows, values, offsets = self.by_id
        if start % GRAIN == 0 and (stop % GRAIN == 0 or stop == self.vocab_size):
            low, high = offsets[start // GRAIN], offsets[-(-stop // GRAIN)]
        else:
            low, high = torch.searchsorted(ids, torch.tensor([start, stop], device=ids.device)).tolist()
        return rows[low:high], ids[low:high] - start, values[low:high]

    def split(self: This, width: int) -> list[This]:
        parts, entries = super().split(width), cast(Entries, self)
        for part, by_id in zip(parts, entries._sorted(width), strict=True):
            vars(part)["by_id"] = by_id
        return parts

    def _sorted(self, width: int) -> list[ById]:
        """Of ``width`` consecutive positions at a time, all at once: a GPU is waited for twice."""
        rows, slots = self.used.nonzero(as_tuple=True)
        part = rows // width
        keys, order = (part * self.vocab_size + self.ids[rows, slots]).sort(stable=True)
        rows, slots, part = rows[order], slots[order], part[order]
        ids, values, rows = self.ids[rows, slots], self.values[rows, slots], rows - part * width
        num_parts = max(1, -(-self.num_positions // width))
        grains = torch.arange(-(-self.vocab_size // GRAIN) + 1, device=rows.device) * GRAIN
        first = torch.arange(num_parts, device=rows.device)[:, None] * self.vocab_size
        found = []
        for counts in torch.searchsorted(keys, first + grains.clamp(max=self.vocab_size)).tolist():
            some = slice(counts[0], counts[-1])
            found.append(ById(ids[some], rows[some], values[some], [count - counts[0] for count in counts]))
        return found


@dataclass(frozen=True)
class HeadAndTail(Probabilities):
    """A few known probabilities per position; any other id has tail_scale * unigram_probs[id]."""

    head: Entries
    tail_scale: PerPosition
    unigram_probs: Float[Tensor, "v"]

    of_vocabulary: ClassVar[tuple[str, ...]] = ("unigram_probs",)

    @property
    def num_positions(self) -> int:
        return self.tail_scale.shape[0]

    @property
    def vocab_size(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.unigram_probs.shape[0]

    @property
    def tail_mass(self) -> PerPosition:
        """Probability of all ids that are not listed, together."""
        unigram = torch.where(self.head.used, self.unigram_probs[self.head.ids], 0.0)
        rest = (1 - unigram.sum(1, dtype=torch.float64)).clamp(min=1e-9)
        return (self.tail_scale * rest).float()

    def tile(self, start: int, stop: int) -> Tile:
        rows, columns, probs = self.head.in_tile(start, stop)
        result = self.tail_scale[:, None] * self.unigram_probs[start:stop]
        result[rows, columns] = probs
        return result

    def add_waits(self, arrivals: Tile, first: PerPosition, start: int, stop: int) -> Tile:
        rows, columns, probs = self.head.in_tile(start, stop)
        known = add_wait_(arrivals[rows, columns], probs * first[rows])
        tail = (self.tail_scale * first)[:, None]
        arrivals.addcmul_(tail, self.unigram_probs[None, start:stop])
        arrivals[rows, columns] = known
        return arrivals
