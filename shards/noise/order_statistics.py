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
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import embedding_bag

from shards.noise.embedding import Embeddings, Noise, Weight, Weighting
from shards.noise.gumbel import KeyedPrior, place_tokens
from shards.noise.philox import PositionKeys, keyed_exponentials, stream_bits, stream_exponentials

GAP_STREAM, ID_STREAM, REST_STREAM = 1, 2, 3
DENSE_VOCABULARY = 1024
SPARE_IDS = 16

# Abramowitz and Stegun 5.1.53: E1(x) + log x on (0, 1], error below 2e-7.
EXPONENTIAL_INTEGRAL = (-0.57721566, 0.99999193, -0.24991055, 0.05519968, -0.00976004, 0.00107857)


@dataclass(frozen=True)
class SparseNoise(Noise):
    """Noise of which only k entries per position are known; the others count in the denominator.

    Attributes:
        ids: [n, k] int64, distinct vocabulary ids.
        arrivals: [n, k] float32, their arrival times.
        vocab_size: V.
        rest_rate: [n] float32, sum of 1/F over the other V - k entries: their share of
            ``sum(1/F)``, the denominator of softmax(xi).
        own: The observed tokens [n] and their xi [n], where those are known apart. A student is not shown them (it
            could tell the token by an entry below the cut): they are in :meth:`gumbels` alone.
    """

    ids: Int[Tensor, "n k"]
    arrivals: Float[Tensor, "n k"]
    vocab_size: int
    rest_rate: Float[Tensor, "n"]
    own: tuple[Int[Tensor, "n"], Float[Tensor, "n"]] | None = None

    @property
    def num_positions(self) -> int:
        return self.ids.shape[0]

    @property
    def device(self) -> torch.device:
        return self.ids.device

    def tile(self, start: int, stop: int) -> Float[Tensor, "n tile"]:
        width = stop - start
        padded = torch.full((self.num_positions, width + 1), torch.inf, device=self.device)
        inside = (self.ids >= start) & (self.ids < start + width)
        columns = torch.where(inside, self.ids - start, width)
        return padded.scatter_(1, columns, self.arrivals)[:, :width]

    def gumbels(self, start: int = 0, stop: int | None = None) -> Float[Tensor, "n tile"]:
        stop = self.vocab_size if stop is None else stop
        others = super().gumbels(start, stop)
        return others if self.own is None else place_tokens(others, *self.own, start, stop)

    def softmax_embed(self, weight: Weight, weighting: Weighting | None = None) -> Embeddings:
        """A gather of k rows of W.

        The V - k unknown entries only enter the denominator, as V - k equal arrival times whose
        rates 1/F sum to ``rest_rate``; for tau = 1 and w = 0 that is exactly ``rest_rate``.
        """
        weighting = weighting or Weighting()
        rates, prior = weighting.rates(self.arrivals), weighting.prior
        num_rest = weight.shape[0] - self.ids.shape[1]
        rest = torch.zeros_like(self.rest_rate)
        if num_rest:
            rest = num_rest * weighting.rates(num_rest / self.rest_rate)
        if prior is not None:
            kept = prior[self.ids]
            rates = rates * kept
            rest = rest * (prior.sum() - kept.sum(dim=-1)).clamp_min(0) / max(1, num_rest)
        shares = (rates / (rates.sum(dim=-1) + rest)[:, None]).to(weight.dtype)
        return embedding_bag(self.ids, weight, per_sample_weights=shares, mode="sum")


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

    def softmax_embed(self, weight: Weight, weighting: Weighting | None = None) -> Embeddings:
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
    bits = stream_bits(keys, REST_STREAM, 1)[:, 0]
    normal = torch.special.ndtri((bits.double() + 0.5) * 2.0**-32)
    rest = rest_rate(arrivals[:, -1], vocab_size - num_kept, normal)
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
        ordered, order = candidates.sort(dim=1, stable=True)
        again = torch.zeros_like(ordered)
        again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
        repeated = torch.zeros_like(again).scatter_(1, order, again)
        if bool(((repeated == 0).sum(1) >= count).all()):
            return candidates.gather(1, repeated.argsort(dim=1, stable=True)[:, :count])
        length *= 2


def mean_rate(after: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    """E[1 / (f + Exp(1))] = e^f E1(f) for f in (0, 1], float64."""
    series = sum(c * after**i for i, c in enumerate(EXPONENTIAL_INTEGRAL))
    return after.exp() * (series - after.log())


def rest_rate(after: Float[Tensor, "n"], num_rest: int, normal: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
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
