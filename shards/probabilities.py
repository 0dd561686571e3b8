"""The teacher's probabilities at n positions, read in vocabulary tiles like the noise itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shards.gumbel import add_wait

Index = Int[Tensor, "m"] | Bool[Tensor, "n"] | slice


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
        """E_j + p_j E_0 of a tile of E_j, which may be overwritten."""
        ...

    def select(self, index: Index) -> Probabilities: ...

    def to(self, device: torch.device | str) -> Probabilities: ...


@dataclass(frozen=True)
class DenseProbabilities:
    """All probabilities in memory, as log-probabilities; [n, V] float32."""

    log_probs: Float[Tensor, "n v"]

    @property
    def vocab_size(self) -> int:
        return self.log_probs.shape[1]

    def tile(self, start: int, stop: int) -> Float[Tensor, "n tile"]:
        return self.log_probs[:, start:stop].exp()

    def add_waits(
        self, arrivals: Float[Tensor, "n tile"], first: Float[Tensor, "n"], start: int, stop: int
    ) -> Float[Tensor, "n tile"]:
        return add_wait(arrivals, self.tile(start, stop) * first[:, None])

    def select(self, index: Index) -> DenseProbabilities:
        return DenseProbabilities(self.log_probs[index])

    def to(self, device: torch.device | str) -> DenseProbabilities:
        return DenseProbabilities(self.log_probs.to(device))


@dataclass(frozen=True)
class HeadAndTail:
    """A few known probabilities per position, the rest spread in proportion to the unigram.

    Attributes:
        ids: [n, m] int64, distinct in a row where ``probs`` is not negative.
        probs: [n, m] float32; negative where a slot is unused.
        tail_scale: [n] float32; an id not listed has probability tail_scale * unigram_probs[id].
        unigram_probs: [V] float32.
    """

    ids: Int[Tensor, "n m"]
    probs: Float[Tensor, "n m"]
    tail_scale: Float[Tensor, "n"]
    unigram_probs: Float[Tensor, "v"]

    @property
    def vocab_size(self) -> int:
        return self.unigram_probs.shape[0]

    @cached_property
    def _by_id(self) -> tuple[Tensor, Tensor, Tensor]:
        """Used slots as (ids, rows, probs), ids ascending, so that a tile is one slice."""
        rows, slots = (self.probs >= 0).nonzero(as_tuple=True)
        ids, order = self.ids[rows, slots].sort(stable=True)
        return ids, rows[order], self.probs[rows, slots][order]

    def _in_tile(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        ids, rows, probs = self._by_id
        low, high = torch.searchsorted(ids, torch.tensor([start, stop], device=ids.device)).tolist()
        return ids[low:high] - start, rows[low:high], probs[low:high]

    def tile(self, start: int, stop: int) -> Float[Tensor, "n tile"]:
        columns, rows, probs = self._in_tile(start, stop)
        result = self.tail_scale[:, None] * self.unigram_probs[start:stop]
        result[rows, columns] = probs
        return result

    def add_waits(
        self, arrivals: Float[Tensor, "n tile"], first: Float[Tensor, "n"], start: int, stop: int
    ) -> Float[Tensor, "n tile"]:
        columns, rows, probs = self._in_tile(start, stop)
        known = add_wait(arrivals[rows, columns], probs * first[rows])
        tail = (self.tail_scale * first)[:, None]
        arrivals.addcmul_(tail, self.unigram_probs[None, start:stop])
        arrivals[rows, columns] = known
        return arrivals

    def select(self, index: Index) -> HeadAndTail:
        return HeadAndTail(
            self.ids[index], self.probs[index], self.tail_scale[index], self.unigram_probs
        )

    def to(self, device: torch.device | str) -> HeadAndTail:
        return HeadAndTail(
            self.ids.to(device),
            self.probs.to(device),
            self.tail_scale.to(device),
            self.unigram_probs.to(device),
        )
