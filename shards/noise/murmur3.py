"""vLLM's own noise: Gumbel variates as a pure function of (seed, position, token id).

vLLM's V2 runner samples argmax(l / T + g), with g from a murmur3 hash of the request's seed, the
position of the token before, and the token's id (``v1/worker/gpu/sample/gumbel.py`` of vLLM 0.32,
Apache-2.0). There is no state, so whoever knows a request's seed knows its noise: the engine that
serves it, a drafter that wants the same token, and who checks the answer afterwards.

Here are the same numbers in torch: the 32 bits and the uniforms bit for bit, the variates to the
rounding of the logarithm.

Words are int32. Products wrap around, as the hash wants; a shift to the right brings copies of the
sign bit, so it is masked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shards.noise.philox import OfPositions

MASK = 0xFFFFFFFF
SECOND_WORD = 0x9E3779B9
"""Domain of the other 32 bits of a float64 uniform."""
FIRST_ARRIVAL = 0x6C8E9CF5
"""Domain of draws that belong to a position and to no token: a stream that vLLM does not use."""
STRIDE = 0x2545F491
"""Between the domains of a position's draws."""


def engine_bits(
    seeds: Int[Tensor, "n"], positions: Int[Tensor, "n"], start: int, stop: int, domain: int = 0
) -> Int[Tensor, "n tile"]:
    """32 random bits per position and token id start..stop-1, int32.

    Args:
        seeds: int64, the requests' seeds, on the CPU.
        positions: int64, of the token before the drawn one, counted from 0 with the prompt.
        start: First token id.
        stop: Behind the last token id.
        domain: Which of several independent streams; 0 is the engine's.
    """
    begun = [hashed_seed(seed, domain) for seed in seeds.tolist()]
    prefix = torch.tensor(begun, dtype=torch.int32, device=positions.device)
    prefix = _mix(prefix, _scramble(_low_word(positions)))
    h = _mix(prefix[:, None], scrambled_ids(start, stop, positions.device))
    h ^= 16
    h ^= (h >> 16) & 0xFFFF
    h *= _signed(0x85EBCA6B)
    h ^= (h >> 13) & 0x7FFFF
    h *= _signed(0xC2B2AE35)
    h ^= (h >> 16) & 0xFFFF
    return h


def uniforms(bits: Int[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """(bits + 1/2) 2^-32, rounded once to float32: above 0, and 1 for the largest bits."""
    high = ((bits >> 16) & 0xFFFF).float()
    low = (bits & 0xFFFF).float()
    return high.mul_(2.0**-16).add_(low.add_(0.5).mul_(2.0**-32))


def uniforms64(low: Int[Tensor, "*s"], high: Int[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """(the upper 53 of 64 bits + 1/2) 2^-53, float64, in the open interval (0, 1)."""
    words = ((high.long() & 0xFFFFFFFF) << 21) | ((low.long() & 0xFFFFFFFF) >> 11)
    u = (words.double() + 0.5) * 2.0**-53
    return torch.where(u == 1.0, u - 2.0**-53, u)


def exponentials(u: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """-log(1 - u) of float32 uniforms, by the engine's polynomial where u < 1/4."""
    series = torch.full_like(u, 1.0 / 8.0)
    for n in (7, 6, 5, 4, 3, 2, 1):
        series.mul_(u).add_(1.0 / n)
    series.mul_(u)
    direct = (1.0 - u).clamp_min_(5.960464477539063e-08).log_().neg_()
    return torch.where(u < 0.25, series, direct)


def engine_arrivals(
    seeds: Int[Tensor, "n"],
    positions: Int[Tensor, "n"],
    start: int,
    stop: int,
    dtype: torch.dtype = torch.float32,
    domain: int = 0,
) -> Float[Tensor, "n tile"]:
    """F = exp(-g), Exp(1) variates; see :func:`engine_bits`.

    Args:
        dtype: float32 is what the engine draws; float64 what it draws when it is started with
            ``use_fp64_gumbel``. They are two streams, not two precisions of one.
    """
    bits = engine_bits(seeds, positions, start, stop, domain)
    if dtype == torch.float64:
        other = engine_bits(seeds, positions, start, stop, domain ^ SECOND_WORD)
        return uniforms64(bits, other).log_().neg_()
    return exponentials(uniforms(bits))


def engine_gumbels(
    seeds: Int[Tensor, "n"], positions: Int[Tensor, "n"], start: int, stop: int, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "n tile"]:
    """g of n positions and token ids start..stop-1; see :func:`engine_arrivals`."""
    return engine_arrivals(seeds, positions, start, stop, dtype).log_().neg_()


@dataclass(frozen=True)
class EngineKeys(OfPositions):
    """Names n positions for the engine's generator, as PositionKeys do for ours.

    :class:`~shards.noise.gumbel.KeyedPrior` of them is the noise that an engine draws the tokens of
    its requests with, and :class:`~shards.noise.gumbel.KeyedPosterior` decodes a store under it.

    Attributes:
        seeds: The requests' seeds; [n] int64.
        positions: Of the tokens, from 0 with the prompt; [n] int64. No engine draws position 0.
        draw: 0 is the engine's; others are streams that it does not use.
        dtype: See :func:`engine_arrivals`.
    """

    seeds: Int[Tensor, "n"]
    positions: Int[Tensor, "n"]
    draw: int = 0
    dtype: torch.dtype = torch.float32

    @property
    def num_positions(self) -> int:
        return self.positions.shape[0]

    def redrawn(self, draw: int) -> EngineKeys:
        """The same positions, ``draw`` draws further on."""
        return replace(self, draw=self.draw + draw)

    def exponentials(self, start: int, stop: int) -> Float[Tensor, "n tile"]:
        """E_j, Exp(1), of token ids start..stop-1, float32."""
        domain = self.draw * STRIDE & MASK
        before = self.positions - 1
        return engine_arrivals(self.seeds, before, start, stop, self.dtype, domain).float()

    def first_arrivals(self) -> Float[Tensor, "n"]:
        """E_0, Exp(1), float32: a stream that the engine does not use."""
        domain = self.draw * STRIDE & MASK ^ FIRST_ARRIVAL
        arrivals = engine_arrivals(self.seeds, self.positions - 1, 0, 1, self.dtype, domain)
        return arrivals[:, 0].float()


def wrapped(seed: int) -> int:
    """A seed as int64: the hash reads 64 bits, and a request's last answers may count past 2^63."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


@lru_cache(maxsize=1 << 14)
def hashed_seed(seed: int, domain: int) -> int:
    """The hash once it has read a seed, as int32: alike for all of a request's tokens."""
    h = domain
    for word in (seed & MASK, (seed >> 32) & MASK):
        key = word * 0xCC9E2D51 & MASK
        key = ((key << 15) | (key >> 17)) * 0x1B873593 & MASK
        h ^= key
        h = (((h << 13) | (h >> 19)) * 5 + 0xE6546B64) & MASK
    return _signed(h)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def _low_word(value: Int[Tensor, "n"]) -> Int[Tensor, "n"]:
    """The low 32 bits of int64, as int32."""
    low = value & 0xFFFFFFFF
    return torch.where(low >= 1 << 31, low - (1 << 32), low).int()


def _rotate(word: Int[Tensor, "*s"], by: int) -> Int[Tensor, "*s"]:
    return (word << by) | ((word >> (32 - by)) & ((1 << by) - 1))


def _scramble(key: Int[Tensor, "*s"]) -> Int[Tensor, "*s"]:
    return _rotate(key * _signed(0xCC9E2D51), 15) * 0x1B873593


def _mix(h: Int[Tensor, "*s"], scrambled: Int[Tensor, "*k"]) -> Int[Tensor, "*broadcast"]:
    return _rotate(h ^ scrambled, 13).mul_(5).add_(_signed(0xE6546B64))


@lru_cache(maxsize=128)
def scrambled_ids(start: int, stop: int, device: torch.device) -> Int[Tensor, "tile"]:
    """Alike for all positions, and so kept (4 bytes a token id)."""
    with torch.inference_mode(False):
        return _scramble(torch.arange(start, stop, dtype=torch.int32, device=device))
