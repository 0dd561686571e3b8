"""The teacher's probabilities at n positions, read in vocabulary tiles like the noise itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shards.noise.gumbel import add_wait_
from shards.noise.philox import Index, OfPositions

GRAIN = 512
"""Ids between two counts of entries; every tile of :mod:`shards.noise.embedding` begins at one."""


@runtime_checkable
class Probabilities(Protocol):
    """n positions x V vocabulary entries of (nearly) normalised probabilities, float32."""

    @property
    def vocab_size(self) -> int: ...

    def tile(self, start: int, stop: int) -> Float[Tensor, "n tile"]:
        """Probabilities of vocabulary ids start..stop-1."""
        ...

    def add_waits(
        self, arrivals: Float[Tensor, "n tile"], first: Float[Tensor, "n"], start: int, stop: int
    ) -> Float[Tensor, "n tile"]:
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
        low, high = self._bounds(start, stop)
        return self.rows[low:high], self.ids[low:high] - start, self.values[low:high]

    def _bounds(self, start: int, stop: int) -> tuple[int, int]:
        is_counted = start % GRAIN == 0 and (stop % GRAIN == 0 or stop == self.vocab_size)
        if self.offsets and is_counted:
            return self.offsets[start // GRAIN], self.offsets[-(-stop // GRAIN)]
        bounds = torch.tensor([start, stop], device=self.ids.device)
        low, high = torch.searchsorted(self.ids, bounds).tolist()
        return low, high


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
        rows = rows - part * width
        return [
            Entries(
                self.ids[index * width : (index + 1) * width],
                self.values[index * width : (index + 1) * width],
                self.used[index * width : (index + 1) * width],
                ById(
                    ids[offsets[0] : offsets[-1]],
                    rows[offsets[0] : offsets[-1]],
                    values[offsets[0] : offsets[-1]],
                    tuple(offset - offsets[0] for offset in offsets),
                    vocab_size,
                ),
            )
            for index, offsets in enumerate(counts)
        ]

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

    def tile(self, start: int, stop: int) -> Float[Tensor, "n tile"]:
        return self.log_probs[:, start:stop].exp()

    def add_waits(
        self, arrivals: Float[Tensor, "n tile"], first: Float[Tensor, "n"], start: int, stop: int
    ) -> Float[Tensor, "n tile"]:
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
    tail_scale: Float[Tensor, "n"]
    unigram_probs: Float[Tensor, "v"]

    of_vocabulary: ClassVar[tuple[str, ...]] = ("unigram_probs",)

    @property
    def num_positions(self) -> int:
        return self.tail_scale.shape[0]

    @property
    def vocab_size(self) -> int:
        return self.unigram_probs.shape[0]

    @property
    def tail_mass(self) -> Float[Tensor, "n"]:
        """Probability of all ids that are not listed, together."""
        unigram = torch.where(self.head.used, self.unigram_probs[self.head.ids], 0.0)
        rest = (1 - unigram.sum(1, dtype=torch.float64)).clamp(min=1e-9)
        return (self.tail_scale * rest).float()

    def tile(self, start: int, stop: int) -> Float[Tensor, "n tile"]:
        rows, columns, probs = self.head.in_tile(start, stop)
        result = self.tail_scale[:, None] * self.unigram_probs[start:stop]
        result[rows, columns] = probs
        return result

    def add_waits(
        self, arrivals: Float[Tensor, "n tile"], first: Float[Tensor, "n"], start: int, stop: int
    ) -> Float[Tensor, "n tile"]:
        rows, columns, probs = self.head.in_tile(start, stop)
        known = add_wait_(arrivals[rows, columns], probs * first[rows])
        tail = (self.tail_scale * first)[:, None]
        arrivals.addcmul_(tail, self.unigram_probs[None, start:stop])
        arrivals[rows, columns] = known
        return arrivals

    def split(self, width: int) -> list[HeadAndTail]:
        parts = zip(super().split(width), self.head.split(width, self.vocab_size), strict=True)
        return [replace(part, head=head) for part, head in parts]


@dataclass(frozen=True)
class HeadLogits(OfPositions):
    """Probabilities rebuilt from hidden states, one matrix product per tile.

    Attributes:
        hidden: [n, D] float32.
        log_normalizers: [n] float32, log-sum-exp of the logits.
        weight: [V, D] float32, the LM head.
        bias: [V] float32.
    """

    hidden: Float[Tensor, "n d"]
    log_normalizers: Float[Tensor, "n"]
    weight: Float[Tensor, "v d"]
    bias: Float[Tensor, "v"]

    of_vocabulary: ClassVar[tuple[str, ...]] = ("weight", "bias")

    @property
    def num_positions(self) -> int:
        return self.hidden.shape[0]

    @property
    def vocab_size(self) -> int:
        return self.weight.shape[0]

    def logits_at(self, ids: Int[Tensor, "n"]) -> Float[Tensor, "n"]:
        """The logit of one id per position."""
        return (self.hidden * self.weight[ids]).sum(1) + self.bias[ids]

    def log_tile(self, start: int, stop: int) -> Float[Tensor, "n tile"]:
        """Log-probabilities of vocabulary ids start..stop-1."""
        logits = torch.addmm(self.bias[start:stop], self.hidden, self.weight[start:stop].T)
        return logits.sub_(self.log_normalizers[:, None])

    def tile(self, start: int, stop: int) -> Float[Tensor, "n tile"]:
        return self.log_tile(start, stop).exp_()

    def add_waits(
        self, arrivals: Float[Tensor, "n tile"], first: Float[Tensor, "n"], start: int, stop: int
    ) -> Float[Tensor, "n tile"]:
        return add_wait_(arrivals, self.tile(start, stop).mul_(first[:, None]))
