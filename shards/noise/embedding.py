"""Noise -> embedding: softmax(tau xi) W without ever holding the [n, V] softmax.

In arrival-time form softmax(tau xi)_j = F_j^-tau / sum_i F_i^-tau, so one walk over vocabulary
tiles that accumulates sum F^-tau and F^-tau W gives the result, and since the noise is no
parameter, the backward pass is dW_tile = (F_tile^-tau)^T (dY / sum): the same walk over
regenerated tiles. Where only k entries are known, it is a gather of k rows of W.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from shards.noise.philox import OfPositions

TILES = {"cpu": (1024, 512), "cuda": (8192, 2048)}
"""(positions, vocabulary ids) of a tile: within a core's cache, or at most so many on a GPU, where
a float32 tile is to take three quarters of the level-2 cache or less."""
FEWEST_POSITIONS = 1024
"""Smaller tiles leave a GPU idle, whatever its cache."""

LARGEST_LOG_RATE = 80.0
"""Rates F^-tau are capped at e^80, so that sums of them stay finite in float32 (and in bf16)."""
Transform = Literal["gumbel", "gaussian", "uniform"]
Weight = Float[Tensor, "v d"]
Embeddings = Float[Tensor, "n d"]
Tile = Float[Tensor, "n tile"]
"""Of n positions, vocabulary ids start..stop-1."""


def gumbel_rates(arrivals: Float[Tensor, "*s"], tau: float) -> Float[Tensor, "*s"]:
    """exp(tau xi) with xi = -log F, that is F^-tau; 0 where F is infinite (truncated away)."""
    arrivals = arrivals.clamp_min(math.exp(-LARGEST_LOG_RATE / max(tau, 1.0)))
    return arrivals.reciprocal_() if tau == 1.0 else arrivals.pow_(-tau)


def uniform_rates(arrivals: Float[Tensor, "*s"], tau: float) -> Float[Tensor, "*s"]:
    """exp(tau U) with U = exp(-F), the Gumbel's distribution function: uniform a priori."""
    rates = torch.exp(tau * torch.exp(-arrivals))
    return torch.where(torch.isinf(arrivals), torch.zeros_like(rates), rates)


def gaussian_rates(arrivals: Float[Tensor, "*s"], tau: float) -> Float[Tensor, "*s"]:
    """exp(tau z) with z = Phi^-1(exp(-F)): standard normal a priori; both tails keep their precision."""
    lower = torch.special.ndtri(torch.exp(-arrivals))
    upper = -torch.special.ndtri(-torch.expm1(-arrivals))
    return torch.exp(tau * torch.where(arrivals > math.log(2.0), lower, upper))


RATES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "gumbel": gumbel_rates,
    "gaussian": gaussian_rates,
    "uniform": uniform_rates,
}


@dataclass(frozen=True)
class Weighting:
    """What the softmax is taken of: tau times the (transformed) noise, plus log prior.

    Attributes:
        tau: Scale of the (transformed) noise.
        transform: Marginal of the noise (the ablations use the same draw, transformed).
        prior: [V] float32 unnormalised q^w per vocabulary id; None for w = 0.
    """

    tau: float = 1.0
    transform: Transform = "gumbel"
    prior: Float[Tensor, "v"] | None = None

    def rates(self, arrivals: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
        """Softmax weights of arrival times, without the prior and not normalised."""
        return RATES[self.transform](arrivals, self.tau)

    def tile(self, noise: Noise, ids: slice) -> Tile:
        """Softmax weights of a range of vocabulary ids, not normalised, float32."""
        rates = self.rates(noise.tile(ids.start, ids.stop))
        return rates if self.prior is None else rates.mul_(self.prior[ids])


class Noise(OfPositions):
    """n positions x V vocabulary entries of arrival times F = exp(-xi), float32, read in tiles.

    Nothing asks for the whole [n, V] tensor: readers walk the vocabulary, and a tile that is asked for twice (in
    forward and in backward) has the same bits both times.
    """

    vocab_size: int

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @abstractmethod
    def tile(self, start: int, stop: int) -> Tile:
        """Arrival times of vocabulary ids start..stop-1; +inf where an entry was cut off."""

    def gumbels(self, start: int = 0, stop: int | None = None) -> Tile:
        """xi of vocabulary ids start..stop-1 (all by default), -inf where cut off.

        Not always -log of the tile: the token's own xi may lie beyond what F can hold.
        """
        return -self.tile(start, self.vocab_size if stop is None else stop).log()

    def softmax_embed(self, weight: Weight, weighting: Weighting | None = None) -> Embeddings:
        """softmax(xi) @ weight in float32, without the [n, V] softmax; differentiable in weight [V, D]."""
        return TiledProjection.apply(self, weighting or Weighting(), weight, product_dtype(weight))


def dense_arrivals(noise: Noise) -> Float[Tensor, "n v"]:
    """All arrival times at once; for small vocabularies, tests and diagnostics."""
    return noise.tile(0, noise.vocab_size)


def even_width(size: int, most: int) -> int:
    """The width at which ``size`` is cut into as few parts as at ``most``, none of them a scrap."""
    return -(-size // max(1, -(-size // most))) or most


def tile_shape(device: torch.device) -> tuple[int, int]:
    """(positions, vocabulary ids) of a tile on a device; the most on a GPU that is not here."""
    positions, ids = TILES.get(device.type, TILES["cuda"])
    if device.type == "cuda" and torch.cuda.is_available():
        # Halved until a float32 tile fits into the level-2 cache; an H100's where PyTorch does not say.
        cache_bytes = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 50 << 20)
        while positions > FEWEST_POSITIONS and 4 * positions * ids > 0.75 * cache_bytes:
            positions //= 2
    return positions, ids


def product_dtype(weight: Tensor) -> torch.dtype:
    """The precision of the matrix products: autocast's where it is on, else the weight's own."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


class TiledProjection(torch.autograd.Function):
    """(noise, weighting, W [V, D], dtype of a tile's product) -> [n, D], sums in float32; gradient for W only."""

    @staticmethod
    def forward(
        ctx: Any, noise: Noise, weighting: Weighting, weight: Weight, dtype: torch.dtype
    ) -> Float[Tensor, "n d"]:
        size, (positions, ids) = noise.num_positions, tile_shape(noise.device)
        width = even_width(size, positions)
        parts = [*zip((slice(i, i + width) for i in range(0, size, width)), noise.split(width), strict=False)]
        tiles = [slice(i, min(i + ids, noise.vocab_size)) for i in range(0, noise.vocab_size, ids)]
        totals = torch.zeros(size, 1, device=weight.device)
        mixed = torch.zeros(size, weight.shape[1], device=weight.device)
        with torch.autocast(weight.device.type, enabled=False):
            for rows, part in parts:
                for tile in tiles:
                    rates = weighting.tile(part, tile)
                    totals[rows] += rates.sum(dim=-1, keepdim=True)
                    add_product(mixed[rows], rates.to(dtype), weight[tile].to(dtype))
        ctx.weighting, ctx.parts, ctx.tiles, ctx.dtype = weighting, parts, tiles, dtype
        ctx.weight_shape, ctx.weight_dtype = weight.shape, weight.dtype
        ctx.save_for_backward(totals)
        return mixed.div_(totals)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Float[Tensor, "n d"]) -> tuple[None, None, Float[Tensor, "v d"], None]:
        (totals,) = ctx.saved_tensors
        scaled = (grad.float() / totals).to(ctx.dtype)
        grad_weight = torch.zeros(ctx.weight_shape, device=grad.device)
        with torch.autocast(grad.device.type, enabled=False):
            for tile in ctx.tiles:
                for rows, part in ctx.parts:
                    rates = ctx.weighting.tile(part, tile).to(ctx.dtype)
                    add_product(grad_weight[tile], rates.T, scaled[rows])
        return None, None, grad_weight.to(ctx.weight_dtype), None


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right in place, in total's precision."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
