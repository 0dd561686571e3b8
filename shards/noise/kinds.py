"""Gumbel noise as the rest of the system sees it: arrival times F = exp(-xi), read in tiles.

A ``Noise`` is a flat batch of n token positions with one noise vector of V entries each. Nothing
asks for the whole [n, V] tensor: readers walk the vocabulary in tiles, and a tile that is asked
for twice (once in forward, once in backward) has the same bits both times. Every kind knows itself
how it is embedded, so that noise from a store and noise to sample with are treated alike:
``noise.softmax_embed(weight)``. With it stand the teacher's probabilities at n positions, which the
posterior is drawn from, read in tiles too.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shards.noise.embedding import Tiles, Weighting, embed_tiles
from shards.noise.gumbel import PerPosition, Tile, add_wait_, arrivals_from_gumbel, place_tokens, token_gumbels
from shards.noise.murmur3 import EngineKeys
from shards.noise.philox import Index, OfPositions, PositionKeys

Weight = Float[Tensor, "v d"]
Embeddings = Float[Tensor, "n d"]


@runtime_checkable
class Noise(Tiles, Protocol):
    """n positions x V vocabulary entries of arrival times F = exp(-xi), float32.

    ``tile`` is a pure function of its arguments: the same bits at every call. +inf stands where an
    entry was truncated away. (Over other positions the product behind the codec ``hidden`` may
    round its last bit differently, since matrix products do.)
    """

    def gumbels(self, start: int = 0, stop: int | None = None) -> Tile:
        """xi of vocabulary ids start..stop-1 (all by default), -inf where truncated away.

        Not always -log of the tile: the token's own xi may lie beyond what F can hold.
        """
        ...

    def softmax_embed(self, weight: Weight, weighting: Weighting | None = None) -> Embeddings:
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

    def gumbels(self: Tiles, start: int = 0, stop: int | None = None) -> Tile:
        return -self.tile(start, self.vocab_size if stop is None else stop).log()

    def softmax_embed(self: Tiles, weight: Weight, weighting: Weighting | None = None) -> Embeddings:
        return embed_tiles(self, weight, weighting or Weighting())


class TokenNoise(TiledNoise):
    """Noise whose entry of the observed token is known by itself.

    Subclasses say what the others are, by arrival time and, where that is not all, by xi; the
    token's own entry among them counts for nothing.
    """

    tokens: Int[Tensor, "n"]
    vocab_size: int
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
        stop = min(stop, self.vocab_size)
        others = self.other_arrivals(start, stop)
        return place_tokens(others, self.tokens, self.own_arrivals, start, stop)

    def gumbels(self, start: int = 0, stop: int | None = None) -> Tile:
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

    def tile(self, start: int, stop: int) -> Tile:
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

    def split(self, width: int) -> list[KeyedPosterior]:
        parts = zip(super().split(width), self.probabilities.split(width), strict=True)
        return [replace(part, probabilities=probabilities) for part, probabilities in parts]


def dense_arrivals(noise: Tiles) -> Float[Tensor, "n v"]:
    """All arrival times at once; for small vocabularies, tests and diagnostics."""
    return noise.tile(0, noise.vocab_size)


GRAIN = 512
"""Ids between two counts of entries; every tile of :mod:`shards.noise.embedding` begins at one."""


@runtime_checkable
class Probabilities(Protocol):
    """n positions x V vocabulary entries of (nearly) normalised probabilities, float32."""

    @property
    def vocab_size(self) -> int: ...

    def tile(self, start: int, stop: int) -> Tile:
        """Probabilities of vocabulary ids start..stop-1."""
        ...

    def add_waits(self, arrivals: Tile, first: PerPosition, start: int, stop: int) -> Tile:
        """E_j + p_j E_0 of a tile of E_j, which is overwritten."""
        ...

    def select(self, index: Index) -> Probabilities: ...

    def split(self, width: int) -> Sequence[Probabilities]:
        """Those of ``width`` consecutive positions at a time."""
        ...

    def to(self, device: torch.device | str) -> Probabilities: ...


@dataclass(frozen=True)
class ById:
    """(id, row, value) entries in ascending order of their ids.

    Attributes:
        offsets: Entries below id 0, GRAIN, 2 GRAIN, ..., V; empty where nobody has counted them.
        vocab_size: V, where they were counted.
    """

    ids: Int[Tensor, "k"]
    rows: Int[Tensor, "k"]
    values: Float[Tensor, "k"]
    offsets: tuple[int, ...] = ()
    vocab_size: int = 0

    def in_tile(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """See :meth:`Entries.in_tile`."""
        is_counted = start % GRAIN == 0 and (stop % GRAIN == 0 or stop == self.vocab_size)
        if self.offsets and is_counted:
            low, high = self.offsets[start // GRAIN], self.offsets[-(-stop // GRAIN)]
        else:
            bounds = torch.tensor([start, stop], device=self.ids.device)
            low, high = torch.searchsorted(self.ids, bounds).tolist()
        return self.rows[low:high], self.ids[low:high] - start, self.values[low:high]


@dataclass(frozen=True)
class Entries:
    """Up to m (id, value) pairs at each of n positions.

    Attributes:
        ids: [n, m] int64; the used ones of a row are distinct.
        values: [n, m] float32.
        used: [n, m]; the other slots count for nothing.
        sorted: The used ones by id, where that is known already.
    """

    ids: Int[Tensor, "n m"]
    values: Float[Tensor, "n m"]
    used: Bool[Tensor, "n m"]
    sorted: ById | None = None

    @cached_property
    def by_id(self) -> ById:
        """Used slots by id, so that those of a tile are one slice."""
        if self.sorted is not None:
            return self.sorted
        rows, slots = self.used.nonzero(as_tuple=True)
        ids, order = self.ids[rows, slots].sort(stable=True)
        return ById(ids, rows[order], self.values[rows, slots][order])

    def in_tile(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """(rows, columns in the tile, values) of the entries with ids start..stop-1."""
        return self.by_id.in_tile(start, stop)

    def split(self, width: int, vocab_size: int) -> list[Entries]:
        """The entries of ``width`` consecutive positions at a time, each part sorted by id.

        All parts are sorted, and the entries of all tiles counted, at once: a GPU is waited for
        twice, however many parts and tiles there are.
        """
        num_parts = max(1, -(-len(self.ids) // width))
        rows, slots = self.used.nonzero(as_tuple=True)
        part = rows // width
        keys, order = (part * vocab_size + self.ids[rows, slots]).sort(stable=True)
        rows, slots, part = rows[order], slots[order], part[order]
        ids, values = self.ids[rows, slots], self.values[rows, slots]
        grains = torch.arange(-(-vocab_size // GRAIN) + 1, device=rows.device) * GRAIN
        first = torch.arange(num_parts, device=rows.device)[:, None] * vocab_size
        counts = torch.searchsorted(keys, first + grains.clamp(max=vocab_size)).tolist()
        rows, parts = rows - part * width, []
        for index, offsets in enumerate(counts):
            here, some = slice(index * width, (index + 1) * width), slice(offsets[0], offsets[-1])
            counted = tuple(offset - offsets[0] for offset in offsets)
            by_id = ById(ids[some], rows[some], values[some], counted, vocab_size)
            parts.append(replace(self.select(here), sorted=by_id))
        return parts

    def select(self, index: Index) -> Entries:
        """The entries of some of the positions."""
        return Entries(self.ids[index], self.values[index], self.used[index])

    def to(self, device: torch.device | str) -> Entries:
        """The same entries on another device."""
        return Entries(self.ids.to(device), self.values.to(device), self.used.to(device))


@dataclass(frozen=True)
class DenseProbabilities(OfPositions):
    """All probabilities in memory, as log-probabilities; [n, V] float32."""

    log_probs: Float[Tensor, "n v"]

    @property
    def num_positions(self) -> int:
        return self.log_probs.shape[0]

    @property
    def vocab_size(self) -> int:
        return self.log_probs.shape[1]

    def tile(self, start: int, stop: int) -> Tile:
        return self.log_probs[:, start:stop].exp()

    def add_waits(self, arrivals: Tile, first: PerPosition, start: int, stop: int) -> Tile:
        return add_wait_(arrivals, self.tile(start, stop) * first[:, None])


@dataclass(frozen=True)
class HeadAndTail(OfPositions):
    """A few known probabilities per position, the rest spread in proportion to the unigram.

    Attributes:
        head: The known probabilities.
        tail_scale: [n] float32; an id not listed has probability tail_scale * unigram_probs[id].
        unigram_probs: [V] float32.
    """

    head: Entries
    tail_scale: PerPosition
    unigram_probs: Float[Tensor, "v"]

    of_vocabulary: ClassVar[tuple[str, ...]] = ("unigram_probs",)

    @property
    def num_positions(self) -> int:
        return self.tail_scale.shape[0]

    @property
    def vocab_size(self) -> int:
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

    def split(self, width: int) -> list[HeadAndTail]:
        parts = zip(super().split(width), self.head.split(width, self.vocab_size), strict=True)
        return [replace(part, head=head) for part, head in parts]
