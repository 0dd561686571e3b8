"""A few listed entries per position, found again by vocabulary tile."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shards.noise.position_keys import Index


@dataclass(frozen=True)
class Entries:
    """Up to m (id, value) pairs at each of n positions.

    Attributes:
        ids: [n, m] int64; the used ones of a row are distinct.
        values: [n, m] float32.
        used: [n, m]; the other slots count for nothing.
    """

    ids: Int[Tensor, "n m"]
    values: Float[Tensor, "n m"]
    used: Bool[Tensor, "n m"]

    @cached_property
    def _by_id(self) -> tuple[Tensor, Tensor, Tensor]:
        """Used slots as (ids, rows, values) with ids ascending, so that a tile is one slice."""
        rows, slots = self.used.nonzero(as_tuple=True)
        ids, order = self.ids[rows, slots].sort(stable=True)
        return ids, rows[order], self.values[rows, slots][order]

    def in_tile(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """(rows, columns in the tile, values) of the entries with ids start..stop-1."""
        ids, rows, values = self._by_id
        bounds = torch.tensor([start, stop], device=ids.device)
        low, high = torch.searchsorted(ids, bounds).tolist()
        return rows[low:high], ids[low:high] - start, values[low:high]

    def select(self, index: Index | slice) -> Entries:
        """The entries of some of the positions."""
        return Entries(self.ids[index], self.values[index], self.used[index])

    def to(self, device: torch.device | str) -> Entries:
        """The same entries on another device."""
        return Entries(self.ids.to(device), self.values.to(device), self.used.to(device))
