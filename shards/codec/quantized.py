"""``quantized``: every xi of one posterior draw at 8 or 4 bits; V or V / 2 bytes per token.

Between the least and the largest xi of its position, apart from the token's, which has a field of
its own, xi is rounded to the nearest of 256 or 16 evenly spaced levels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from shards.codec.full import StoredNoise, encode_draw, passes_token
from shards.codec.protocol import Arrays, ArraySpec, Codec, LogProbs, TeacherOutput, Tokens
from shards.noise.gumbel import KeyedPosterior
from shards.noise.philox import PositionKeys


@dataclass(frozen=True)
class QuantizedCodec(Codec):
    """Arrays: ``levels`` uint8, [V] or two per byte [(V + 1) // 2], the even id in the low half;
    ``lowest`` and ``spacing`` float32; ``token_gumbels`` float32, xi of the token.

    Entries that rounding would lift past the token are rounded down, so that the token is the
    argmax of the stored vector with the teacher's log-probabilities.

    Attributes:
        bits: 8 or 4.
    """

    bits: Literal[4, 8] = 8

    name: ClassVar[str] = "quantized"

    def array_specs(self, vocab_size: int, hidden_size: int | None) -> dict[str, ArraySpec]:
        levels = ArraySpec("uint8", (-(-vocab_size * self.bits // 8),))
        numbers = ("lowest", "spacing", "token_gumbels")
        return {"levels": levels, **dict.fromkeys(numbers, ArraySpec("float32"))}

    def encode(self, output: TeacherOutput, seed: int, resources: Arrays) -> dict[str, Tensor]:
        return encode_draw(output, seed, self._encode)

    def _encode(self, noise: KeyedPosterior) -> dict[str, Tensor]:
        gumbels = -noise.tile(0, noise.vocab_size).log()
        own = noise.tokens[:, None]
        lowest = gumbels.scatter(1, own, torch.inf).amin(1)
        highest = gumbels.scatter(1, own, -torch.inf).amax(1)
        spacing = ((highest - lowest) / (2**self.bits - 1)).clamp(min=1e-6)
        scaled = (gumbels - lowest[:, None]) / spacing[:, None]
        levels = scaled.round().clamp(0, 2**self.bits - 1)
        rounded = lowest[:, None] + levels * spacing[:, None]
        rows, columns, passes = passes_token(noise, rounded)
        lower = scaled[rows, columns].floor()
        levels[rows, columns] = torch.where(passes, lower, levels[rows, columns])
        return {
            "levels": _pack(levels.to(torch.uint8), self.bits),
            "lowest": lowest,
            "spacing": spacing,
            "token_gumbels": noise.token_gumbels,
        }

    def decode(
        self, arrays: Arrays, tokens: Tokens, log_p: LogProbs, keys: PositionKeys, resources: Arrays
    ) -> StoredNoise:
        columns = (arrays["levels"], arrays["lowest"], arrays["spacing"])
        tile = _tile_of_bytes if self.bits == 8 else _tile_of_nibbles
        vocab_size = len(resources["unigram_log_probs"])
        return StoredNoise(columns, tile, tokens, arrays["token_gumbels"], vocab_size)


def _pack(levels: UInt8[Tensor, "n v"], bits: int) -> UInt8[Tensor, "n w"]:
    if bits == 8:
        return levels
    padded = torch.nn.functional.pad(levels, (0, levels.shape[1] % 2))
    return padded[:, 0::2] | padded[:, 1::2] << 4


def _tile_of_bytes(columns: tuple[Tensor, ...], start: int, stop: int) -> Float[Tensor, "n tile"]:
    levels, lowest, spacing = columns
    return lowest[:, None] + levels[:, start:stop] * spacing[:, None]


def _tile_of_nibbles(columns: tuple[Tensor, ...], start: int, stop: int) -> Float[Tensor, "n tile"]:
    packed, lowest, spacing = columns
    first = start // 2
    pairs = packed[:, first : -(-stop // 2)]
    levels = torch.stack([pairs & 0xF, pairs >> 4], dim=-1).flatten(1)
    levels = levels[:, start - 2 * first : stop - 2 * first]
    return lowest[:, None] + levels * spacing[:, None]
