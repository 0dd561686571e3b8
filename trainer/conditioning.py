"""Noise -> embedding: softmax(tau xi) W without ever holding the [n, V] softmax.

In arrival-time form softmax(tau xi)_j = F_j^-tau / sum_i F_i^-tau, so one walk over vocabulary
tiles that accumulates sum F^-tau and F^-tau W gives the result, and since the noise is no
parameter, the backward pass is dW_tile = (F_tile^-tau)^T (dY / sum): the same walk over
regenerated tiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from shards.errors import UsageError
from shards.noise import Noise

TILE_POSITIONS = 512
TILE_VOCABULARY = 2048
LARGEST_LOG_RATE = 80.0
"""Rates F^-tau are capped at e^80, so that sums of them stay finite in float32 (and in bf16)."""

Transform = Literal["gumbel", "gaussian", "uniform"]


def gumbel_rates(arrivals: Float[Tensor, "n tile"], tau: float) -> Float[Tensor, "n tile"]:
    """exp(tau xi) with xi = -log F, that is F^-tau; 0 where F is infinite (truncated away)."""
    floor = math.exp(-LARGEST_LOG_RATE / max(tau, 1.0))
    arrivals = arrivals.clamp_min(floor)
    return arrivals.reciprocal() if tau == 1.0 else arrivals.pow(-tau)


def uniform_rates(arrivals: Float[Tensor, "n tile"], tau: float) -> Float[Tensor, "n tile"]:
    """exp(tau U) with U = exp(-F), the Gumbel's distribution function: uniform a priori."""
    rates = torch.exp(tau * torch.exp(-arrivals))
    return torch.where(torch.isinf(arrivals), torch.zeros_like(rates), rates)


def gaussian_rates(arrivals: Float[Tensor, "n tile"], tau: float) -> Float[Tensor, "n tile"]:
    """exp(tau z) with z = Phi^-1(exp(-F)): standard normal a priori.

    The smaller of exp(-F) and 1 - exp(-F) goes into the quantile function, so both tails keep
    their precision.
    """
    tiny = torch.finfo(torch.float32).tiny
    lower = torch.special.ndtri(torch.exp(-arrivals).clamp_min(tiny))
    upper = -torch.special.ndtri(-torch.expm1(-arrivals.clamp_min(tiny)))
    rates = torch.exp(tau * torch.where(arrivals > math.log(2.0), lower, upper))
    return torch.where(torch.isinf(arrivals), torch.zeros_like(rates), rates)


RATES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "gumbel": gumbel_rates,
    "gaussian": gaussian_rates,
    "uniform": uniform_rates,
}


@dataclass(frozen=True)
class Walk:
    """How one noise is turned into unnormalised softmax weights, tile by tile.

    Attributes:
        noise: n positions x V entries.
        tau: Scale of the (transformed) noise.
        transform: Key of ``RATES``.
        prior: q^w per vocabulary id; None for w = 0.
    """

    noise: Noise
    tau: float
    transform: str
    prior: Float[Tensor, "v"] | None = None

    def vocabulary_tiles(self) -> Iterator[tuple[int, int]]:
        """Consecutive (start, stop) of vocabulary ids."""
        size = self.noise.vocab_size
        for start in range(0, size, TILE_VOCABULARY):
            yield start, min(start + TILE_VOCABULARY, size)

    def position_chunks(self) -> Iterator[tuple[slice, Walk]]:
        """The same walk over consecutive groups of positions."""
        for start in range(0, self.noise.num_positions, TILE_POSITIONS):
            stop = min(start + TILE_POSITIONS, self.noise.num_positions)
            index = torch.arange(start, stop, device=self.noise.device)
            part = Walk(self.noise.select(index), self.tau, self.transform, self.prior)
            yield slice(start, stop), part

    def rates(self, start: int, stop: int) -> Float[Tensor, "n tile"]:
        """Unnormalised softmax weights of vocabulary ids start..stop-1."""
        rates = RATES[self.transform](self.noise.tile(start, stop), self.tau)
        return rates if self.prior is None else rates * self.prior[start:stop]


class TiledProjection(torch.autograd.Function):
    """(walk, W [V, D]) -> [n, D]; gradient for W only."""

    @staticmethod
    def forward(ctx: Any, walk: Walk, weight: Float[Tensor, "v d"]) -> Float[Tensor, "n d"]:
        num_positions, width = walk.noise.num_positions, weight.shape[1]
        totals = weight.new_zeros(num_positions, 1, dtype=torch.float32)
        mixed = weight.new_zeros(num_positions, width, dtype=torch.float32)
        for rows, part in walk.position_chunks():
            for start, stop in part.vocabulary_tiles():
                rates = part.rates(start, stop)
                totals[rows] += rates.sum(dim=-1, keepdim=True)
                mixed[rows] += rates.to(weight.dtype) @ weight[start:stop]
        ctx.walk, ctx.weight_shape, ctx.weight_dtype = walk, weight.shape, weight.dtype
        ctx.save_for_backward(totals)
        return (mixed / totals).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Float[Tensor, "n d"]) -> tuple[None, Float[Tensor, "v d"]]:  # type: ignore[override]
        (totals,) = ctx.saved_tensors
        scaled = grad.float() / totals
        grad_weight = scaled.new_zeros(ctx.weight_shape)
        for rows, part in ctx.walk.position_chunks():
            for start, stop in part.vocabulary_tiles():
                grad_weight[start:stop].addmm_(part.rates(start, stop).T, scaled[rows])
        return None, grad_weight.to(ctx.weight_dtype)


class GumbelConditioner(nn.Module):
    """Embeds noise vectors: softmax(tau xi + w log q) W.

    Args:
        vocab_size: V; noise of another size is refused.
        hidden_size: D.
        transform: Marginal of the noise (the ablations use the same draw, transformed).
        prior_weight: w; other than 0 it needs ``unigram_log_probs`` to have been set.
    """

    unigram_log_probs: Tensor | None

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        transform: Transform = "gumbel",
        prior_weight: float = 0.0,
    ) -> None:
        super().__init__()
        self.transform, self.prior_weight = transform, prior_weight
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))
        uniform = torch.full((vocab_size,), float("nan")) if prior_weight else None
        self.register_buffer("unigram_log_probs", uniform)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform(+-1/sqrt V), the default of a linear layer from V to D."""
        bound = self.weight.shape[0] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def set_unigram(self, log_probs: Float[Tensor, "v"]) -> None:
        """Give the conditioner log q; it is saved with the weights.

        Raises:
            UsageError: For a vector of another length or with entries that are not finite.
        """
        if log_probs.shape != self.weight.shape[:1] or not bool(log_probs.isfinite().all()):
            expected = f"{self.weight.shape[0]} finite log-probabilities"
            raise UsageError("bad unigram", got=tuple(log_probs.shape), expected=expected)
        if self.unigram_log_probs is not None:
            self.unigram_log_probs.copy_(log_probs)

    def forward(self, noise: Noise, tau: float = 1.0) -> Float[Tensor, "n d"]:
        """Embeddings of n noise vectors.

        Raises:
            UsageError: For noise over another vocabulary, or a missing unigram.
        """
        if noise.vocab_size != self.weight.shape[0]:
            raise UsageError(
                "noise of another vocabulary than the student's",
                got=noise.vocab_size,
                expected=self.weight.shape[0],
                remedy="train the student on a store of its own teacher",
            )
        walk = Walk(noise, tau, self.transform, self._prior())
        return TiledProjection.apply(walk, self.weight)  # type: ignore[no-any-return]

    def _prior(self) -> Float[Tensor, "v"] | None:
        if not self.prior_weight or self.unigram_log_probs is None:
            return None
        if bool(self.unigram_log_probs.isnan().any()):
            remedy = "call set_unigram with the store's unigram_log_probs"
            raise UsageError("prior_weight needs the corpus unigram", remedy=remedy)
        return torch.exp(self.prior_weight * self.unigram_log_probs)
