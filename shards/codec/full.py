"""``full``: every xi of one posterior draw in half precision; 2 V bytes per token.

The yardstick: nothing is approximated but by rounding, and nothing is saved. With it stands what
the codecs share that store one draw: the draw itself, and its way back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shards.codec.protocol import (
    Arrays,
    ArraySpec,
    Codec,
    LogProbs,
    TeacherOutput,
    Tokens,
    encode_in_parts,
    position_keys,
)
from shards.noise.gumbel import DenseProbabilities, KeyedPosterior, TokenNoise, arrivals_from_gumbel
from shards.noise.philox import PositionKeys


def frozen_posterior(output: TeacherOutput, seed: int) -> KeyedPosterior:
    """The exact posterior of the teacher's output: draw 0 of the keys."""
    keys, probabilities = position_keys(output, seed), output.log_probs.flatten(0, 1)
    tokens, own = output.tokens.flatten(), output.token_log_probs.flatten()
    return KeyedPosterior(keys, tokens, own, DenseProbabilities(probabilities))


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


def half_gumbels(noise: KeyedPosterior, arrivals: Float[Tensor, "n v"]) -> Float[Tensor, "n v"]:
    """xi = -log F as float16, rounded so that no entry passes the token's."""
    exact = -arrivals.log()
    rounded = exact.half()
    rows, columns, passes = passes_token(noise, rounded.float())
    lower = round_down_to_half(exact[rows, columns])
    rounded[rows, columns] = torch.where(passes, lower, rounded[rows, columns])
    return rounded


def round_down_to_half(values: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    """The largest float16 not above each value."""
    nearest = values.half()
    bits = nearest.view(torch.int16)
    below = torch.where(nearest > 0, bits - 1, torch.where(nearest < 0, bits + 1, -0x7FFF))
    return torch.where(nearest.float() > values, below.to(torch.int16).view(torch.half), nearest)


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
    decode_tile: Callable[[tuple[Tensor, ...], int, int], Tensor]
    tokens: Int[Tensor, "n"]
    token_gumbels: Float[Tensor, "n"]
    vocab_size: int

    def other_gumbels(self, start: int, stop: int) -> Float[Tensor, "n tile"]:
        return self.decode_tile(self.columns, start, stop)

    def other_arrivals(self, start: int, stop: int) -> Float[Tensor, "n tile"]:
        return arrivals_from_gumbel(self.other_gumbels(start, stop))


@dataclass(frozen=True)
class FullCodec(Codec):
    """Arrays: ``gumbels`` [V] float16, xi; ``token_gumbels`` float32, xi of the token.

    Entries that rounding would lift past the token are rounded down, so that the token is the
    argmax of the stored vector with the teacher's log-probabilities.
    """

    name: ClassVar[str] = "full"
    resource_names: ClassVar[tuple[str, ...]] = ()

    def array_specs(self, vocab_size: int, hidden_size: int | None) -> dict[str, ArraySpec]:
        gumbels = ArraySpec("float16", (vocab_size,))
        return {"gumbels": gumbels, "token_gumbels": ArraySpec("float32")}

    def encode(self, output: TeacherOutput, seed: int, resources: Arrays) -> dict[str, Tensor]:
        def encode(noise: KeyedPosterior) -> dict[str, Tensor]:
            gumbels = half_gumbels(noise, noise.tile(0, noise.vocab_size))
            return {"gumbels": gumbels, "token_gumbels": noise.token_gumbels}

        return encode_draw(output, seed, encode)

    def decode(
        self, arrays: Arrays, tokens: Tokens, log_p: LogProbs, keys: PositionKeys, resources: Arrays
    ) -> StoredNoise:
        gumbels = arrays["gumbels"]
        return StoredNoise((gumbels,), _tile, tokens, arrays["token_gumbels"], gumbels.shape[1])


def _tile(columns: tuple[Tensor, ...], start: int, stop: int) -> Float[Tensor, "n tile"]:
    return columns[0][:, start:stop].float()
