"""The k largest of V Gumbels without drawing the V: O(k) per position.

In arrival-time form the largest xi are the first arrivals. With V independent Exp(1) waits the
gaps between arrivals are independent, the r-th (from 1) being Exp(1) / (V - r + 1) (Renyi, 1953),
and the ids are a uniform sample without replacement. The V - k others arrive at f + Exp(1), f the
k-th arrival; their total rate sum 1/F has known cumulants, being a sum of V - k independent terms.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shards.noise.embedding import Weighting
from shards.noise.kinds import KeyedPrior, SparseNoise
from shards.noise.philox import PositionKeys, keyed_exponentials, stream_bits, stream_exponentials

GAP_STREAM, ID_STREAM, REST_STREAM = 1, 2, 3
DENSE_VOCABULARY = 1024
SPARE_IDS = 16

# Abramowitz and Stegun 5.1.53: E1(x) + log x on (0, 1], error below 2e-7.
EXPONENTIAL_INTEGRAL = (-0.57721566, 0.99999193, -0.24991055, 0.05519968, -0.00976004, 0.00107857)


@dataclass(frozen=True)
class TopPrior(KeyedPrior):
    """Prior noise of which a student is shown the ``num_kept`` largest entries; drawn when read.

    Attributes:
        keys: Seed, rows, positions and draw.
        vocab_size: V.
        num_kept: k; all V where V is less.
    """

    keys: PositionKeys
    num_kept: int

    @cached_property
    def drawn(self) -> SparseNoise:
        """The entries; a pure function of the keys."""
        return first_arrivals_of(self.keys, self.vocab_size, self.num_kept)

    def tile(self, start: int, stop: int) -> Float[Tensor, "n tile"]:
        return self.drawn.tile(start, stop)

    def softmax_embed(
        self, weight: Float[Tensor, "v d"], weighting: Weighting | None = None
    ) -> Float[Tensor, "n d"]:
        return self.drawn.softmax_embed(weight, weighting)


def first_arrivals_of(keys: PositionKeys, vocab_size: int, num_kept: int) -> SparseNoise:
    """Prior noise of which the ``num_kept`` largest entries are kept, keyed by position.

    Small vocabularies (V <= 1024 or V <= 4 k) are drawn in full and cut, which has the same law.
    """
    num_kept = min(num_kept, vocab_size)
    if vocab_size <= max(DENSE_VOCABULARY, 4 * num_kept):
        return keep_first(keyed_exponentials(keys, 0, vocab_size), num_kept)
    remaining = torch.arange(vocab_size, vocab_size - num_kept, -1, device=keys.rows.device)
    gaps = stream_exponentials(keys, GAP_STREAM, num_kept).double() / remaining
    arrivals = gaps.cumsum(1)
    ids = distinct_ids(keys, vocab_size, num_kept)
    rest = rest_rate(arrivals[:, -1], vocab_size - num_kept, _standard_normal(keys))
    return SparseNoise(ids, arrivals.float(), vocab_size, rest.float())


def keep_first(arrivals: Float[Tensor, "n v"], num_kept: int) -> SparseNoise:
    """The first arrivals of given noise, and the total rate of the others."""
    kept, ids = arrivals.topk(num_kept, dim=1, largest=False, sorted=True)
    rates = arrivals.reciprocal().scatter_(1, ids, 0.0)
    return SparseNoise(ids, kept, arrivals.shape[1], rates.sum(1))


def distinct_ids(keys: PositionKeys, vocab_size: int, count: int) -> Int[Tensor, "n count"]:
    """``count`` distinct uniform ids per position: the first distinct ones of an iid sequence."""
    length = count + SPARE_IDS
    while True:
        candidates = stream_bits(keys, ID_STREAM, length) * vocab_size >> 32
        ids, enough = _first_distinct(candidates, count)
        if bool(enough.all()):
            return ids
        length *= 2


def _first_distinct(
    candidates: Int[Tensor, "n c"], count: int
) -> tuple[Int[Tensor, "n count"], Bool[Tensor, "n"]]:
    ordered, order = candidates.sort(dim=1, stable=True)
    again = torch.zeros_like(ordered)
    again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    repeated = torch.zeros_like(again).scatter_(1, order, again)
    places = repeated.argsort(dim=1, stable=True)[:, :count]
    return candidates.gather(1, places), (repeated == 0).sum(1) >= count


def mean_rate(after: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    """E[1 / (f + Exp(1))] = e^f E1(f) for f in (0, 1], float64."""
    series = sum(c * after**i for i, c in enumerate(EXPONENTIAL_INTEGRAL))
    return after.exp() * (series - after.log())


def rest_rate(
    after: Float[Tensor, "n"], num_rest: int, normal: Float[Tensor, "n"]
) -> Float[Tensor, "n"]:
    """Sum of 1/F over ``num_rest`` entries that arrive after f, from one standard normal each.

    A shifted gamma variate of the exact mean, variance and skewness (Wilson-Hilferty); the skewness
    is about 0.05, so that the error of the law is far below what any use can tell.
    """
    first = mean_rate(after)
    second = after.reciprocal() - first
    third = (after.square().reciprocal() - second) / 2
    variance = second - first.square()
    third_cumulant = third - 3 * first * second + 2 * first**3
    shape = 4 * num_rest * variance**3 / third_cumulant.square()
    cube = (1 - 1 / (9 * shape) + normal / (3 * shape.sqrt())) ** 3
    return num_rest * first + (num_rest * variance * shape).sqrt() * (cube - 1)


def _standard_normal(keys: PositionKeys) -> Float[Tensor, "n"]:
    bits = stream_bits(keys, REST_STREAM, 1)[:, 0]
    return torch.special.ndtri((bits.double() + 0.5) * 2.0**-32)
