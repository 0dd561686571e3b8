"""Where a mask is true, listed once: a list of unknown length makes the host wait for the GPU."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Bool, Int, Shaped
from torch import Tensor


@dataclass(frozen=True)
class Places:
    """n places of a [B, L] batch, row by row.

    Attributes:
        rows: [n] int64.
        positions: [n] int64.
    """

    rows: Int[Tensor, "n"]
    positions: Int[Tensor, "n"]

    @classmethod
    def of(cls, where: Bool[Tensor, "b l"] | Places) -> Places:
        """The places of a mask, which are counted (one wait on a GPU); of places, themselves."""
        return where if isinstance(where, Places) else cls(*where.nonzero(as_tuple=True))

    @property
    def index(self) -> tuple[Int[Tensor, "n"], Int[Tensor, "n"]]:
        """For ``index_put``."""
        return self.rows, self.positions

    def __len__(self) -> int:
        return self.rows.shape[0]

    def read(self, values: Shaped[Tensor, "b l *d"]) -> Shaped[Tensor, "n *d"]:
        """What stands there."""
        return values[self.rows, self.positions]

    def shifted(self, num_columns: int) -> Places:
        """The same places behind so many further columns."""
        return Places(self.rows, self.positions + num_columns)
