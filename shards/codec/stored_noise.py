"""Noise read from a table of stored xi, decoded a tile at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shards.noise import Index, arrivals_from_gumbel, place_tokens

TileDecoder = Callable[[tuple[Tensor, ...], int, int], Tensor]


@dataclass(frozen=True)
class StoredNoise:
    """Frozen noise in its stored form.

    Attributes:
        columns: Stored arrays of n positions each; the first axis is the position.
        decode_tile: (columns, start, stop) -> xi of that tile, [n, tile] float32.
        tokens: [n] int64.
        token_gumbels: [n] float32, xi of the token, stored apart.
        vocab_size: V.
    """

    columns: tuple[Tensor, ...]
    decode_tile: TileDecoder
    tokens: Int[Tensor, "n"]
    token_gumbels: Float[Tensor, "n"]
    vocab_size: int

    @property
    def num_positions(self) -> int:
        return self.tokens.shape[0]

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    def tile(self, start: int, stop: int) -> Float[Tensor, "n tile"]:
        stop = min(stop, self.vocab_size)
        arrivals = arrivals_from_gumbel(self.decode_tile(self.columns, start, stop))
        return place_tokens(arrivals, self.tokens, self.token_gumbels, start, stop)

    def _map(self, function: Callable[[Tensor], Tensor]) -> StoredNoise:
        return StoredNoise(
            tuple(function(column) for column in self.columns),
            self.decode_tile,
            function(self.tokens),
            function(self.token_gumbels),
            self.vocab_size,
        )

    def select(self, index: Index | slice) -> StoredNoise:
        return self._map(lambda column: column[index])

    def to(self, device: torch.device | str) -> StoredNoise:
        return self._map(lambda column: column.to(device))
