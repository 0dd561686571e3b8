"""What the codecs share that store one draw of the noise: the draw itself, and its way back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shards.codec.protocol import TeacherOutput
from shards.noise.gumbel import arrivals_from_gumbel
from shards.noise.kinds import KeyedPosterior, TokenNoise
from shards.noise.philox import PositionKeys
from shards.noise.probabilities import DenseProbabilities

PART_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 23}
"""Temporaries should stay in a core's cache, and should fill a GPU."""


def position_keys(output: TeacherOutput, seed: int, draw: int = 0) -> PositionKeys:
    """Keys of the B x T scored positions in row-major order; T counts from position 1."""
    num_rows, num_tokens = output.tokens.shape
    positions = torch.arange(1, num_tokens + 1, device=output.tokens.device)
    rows = output.rows.to(output.tokens.device)
    return PositionKeys(seed, rows.repeat_interleave(num_tokens), positions.repeat(num_rows), draw)


def frozen_posterior(output: TeacherOutput, seed: int) -> KeyedPosterior:
    """The exact posterior of the teacher's output: draw 0 of the keys."""
    return KeyedPosterior(
        position_keys(output, seed),
        output.tokens.flatten(),
        output.token_log_probs.flatten(),
        DenseProbabilities(output.log_probs.flatten(0, 1)),
    )


def encode_in_parts(
    output: TeacherOutput, encode: Callable[[slice], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Encode some of the B x T positions at a time; arrays [B, T, ...].

    A codec makes several temporaries as large as the log-probabilities it is given; this keeps
    them small. The result does not depend on the parts.
    """
    device = output.log_probs.device.type
    step = max(1, PART_ELEMENTS.get(device, 1 << 20) // output.log_probs.shape[-1])
    num_positions = output.tokens.numel()
    parts = [encode(slice(first, first + step)) for first in range(0, num_positions, step)]
    return {
        name: torch.cat([part[name] for part in parts]).unflatten(0, output.tokens.shape)
        for name in parts[0]
    }


def encode_draw(
    output: TeacherOutput, seed: int, encode: Callable[[KeyedPosterior], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Encode the frozen draw, some positions at a time."""
    noise = frozen_posterior(output, seed)
    return encode_in_parts(output, lambda part: encode(noise.select(part)))


def passes_token(
    noise: KeyedPosterior, gumbels: Float[Tensor, "n v"]
) -> tuple[Int[Tensor, "k"], Int[Tensor, "k"], Bool[Tensor, "k"]]:
    """Where rounding of xi has lifted log p_j + xi_j to the token's value or past it.

    The exact xi never does; rounding those entries down instead of to the nearest restores the
    order, so that the token stays the argmax of what is stored.

    Returns:
        Rows and columns of the entries that come close, and which of them pass the token.
    """
    assert isinstance(noise.probabilities, DenseProbabilities)
    log_probs = noise.probabilities.log_probs
    winner = noise.token_log_probs.double() + noise.token_gumbels.double()
    close = log_probs + gumbels > (winner - 1e-3).float()[:, None]
    close.scatter_(1, noise.tokens[:, None], False)
    rows, columns = close.nonzero(as_tuple=True)
    sums = log_probs[rows, columns].double() + gumbels[rows, columns].double()
    return rows, columns, sums >= winner[rows]


TileDecoder = Callable[[tuple[Tensor, ...], int, int], Tensor]


@dataclass(frozen=True)
class StoredNoise(TokenNoise):
    """Frozen noise in its stored form: a table of xi, decoded a tile at a time.

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

    def other_gumbels(self, start: int, stop: int) -> Float[Tensor, "n tile"]:
        return self.decode_tile(self.columns, start, stop)

    def other_arrivals(self, start: int, stop: int) -> Float[Tensor, "n tile"]:
        return arrivals_from_gumbel(self.other_gumbels(start, stop))
