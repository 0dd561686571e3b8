"""``full``: every xi of one posterior draw in half precision; 2 V bytes per token.

The yardstick: nothing is approximated but by rounding, and nothing is saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shards.codec.protocol import (
    Arrays,
    ArraySpec,
    Codec,
    StoredNoise,
    TeacherOutput,
    encode_draw,
    passes_token,
)
from shards.noise.kinds import KeyedPosterior
from shards.noise.philox import PositionKeys


@dataclass(frozen=True)
class FullCodec(Codec):
    """Arrays: ``gumbels`` [V] float16, xi; ``token_gumbels`` float32, xi of the token.

    Entries that rounding would lift past the token are rounded down, so that the token is the
    argmax of the stored vector with the teacher's log-probabilities.
    """

    name: ClassVar[str] = "full"
    resource_names: ClassVar[tuple[str, ...]] = ()

    def array_specs(self, vocab_size: int, hidden_size: int | None) -> dict[str, ArraySpec]:
        return {
            "gumbels": ArraySpec("float16", (vocab_size,)),
            "token_gumbels": ArraySpec("float32"),
        }

    def encode(self, output: TeacherOutput, seed: int, resources: Arrays) -> dict[str, Tensor]:
        return encode_draw(output, seed, _encode)

    def decode(
        self,
        arrays: Arrays,
        tokens: Int[Tensor, "n"],
        token_log_probs: Float[Tensor, "n"],
        keys: PositionKeys,
        resources: Arrays,
    ) -> StoredNoise:
        gumbels = arrays["gumbels"]
        columns = (gumbels,)
        return StoredNoise(columns, _tile, tokens, arrays["token_gumbels"], gumbels.shape[1])


def _tile(columns: tuple[Tensor, ...], start: int, stop: int) -> Float[Tensor, "n tile"]:
    return columns[0][:, start:stop].float()


def _encode(noise: KeyedPosterior) -> dict[str, Tensor]:
    gumbels = half_gumbels(noise, noise.tile(0, noise.vocab_size))
    return {"gumbels": gumbels, "token_gumbels": noise.token_gumbels}


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
