"""Gumbel noise as arrival times: F = exp(-xi), so that softmax(xi) = (1/F) / sum(1/F).

Prior: F_j ~ Exp(1). Given that token x was drawn from p by argmax(log p + xi), the posterior is
(Algorithm 1 of Zhang et al., ICLR 2026, with E_j = exp(-zeta_j), E_0 = exp(-zeta_0))

    F_x = p_x E_0        F_j = E_j + p_j E_0   (j != x)

Read as a race: token j arrives at rate p_j; E_0 is when the winner x arrived, and every other
token is still to come, so its remaining wait E_j adds to what it has waited already. Token x wins
because p_j / F_j < 1 / E_0 = p_x / F_x. Rounding keeps that order: E_j counts as at least
``64 * machine epsilon`` of p_j E_0, a change of the law of 8e-6 in total variation in float32.

Nothing here holds state: draws take a ``torch.Generator`` or the exponentials themselves.
"""

from __future__ import annotations

from typing import no_type_check

import torch
from jaxtyping import Float, Int
from torch import Tensor

MIN_ARRIVAL = 2.0**-126
"""Smallest arrival time (xi = 87.3): 1/F stays finite in float32 for tokens of any probability.
Where the order of log p + xi matters, xi itself is read: ``Noise.gumbels``."""
Tile = Float[Tensor, "n tile"]
"""Of n positions, vocabulary ids start..stop-1."""
PerPosition = Float[Tensor, "n"]
LARGEST_UNIFORM = 1.0 - 2.0**-24


@no_type_check  # part of a compiled kernel, which cannot trace checks of annotations
def exponential_from_bits(bits: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Exp(1) variates from 32 random bits each, float32, in [1.2e-10, 16.7].

    The inverse transform E = -log(1 - u), u = (bits + 1/2) / 2^32, is finest near E = 0, where
    the large Gumbel values lie.
    """
    uniform = bits.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=LARGEST_UNIFORM)
    return uniform.neg_().log1p_().neg_()


def add_wait_(remaining: Float[Tensor, "*shape"], waited: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """E_j + p_j E_0 in place, strictly above p_j E_0 whatever the rounding."""
    margin = 64 * torch.finfo(waited.dtype).eps
    return torch.maximum(remaining, waited * margin, out=remaining).add_(waited)


def token_gumbels(token_log_probs: Float[Tensor, "*batch"], first: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
    """xi_x = -log E_0 - log p_x of the tokens, finite for any p_x; never below the exact value."""
    exact = -(token_log_probs.double() + first.double().log())
    nearest = exact.to(token_log_probs.dtype)
    above = nearest.nextafter(torch.full_like(nearest, torch.inf))
    return torch.where(nearest.double() < exact, above, nearest)


def place_tokens(values: Tile, tokens: Int[Tensor, "n"], own: PerPosition, start: int, stop: int) -> Tile:
    """Write each token's own value where the token lies in the tile start..stop-1, in place."""
    inside = ((tokens >= start) & (tokens < stop))[:, None]
    columns = (tokens - start).clamp(0, max(0, stop - start - 1))[:, None]
    return values.scatter_(1, columns, torch.where(inside, own[:, None], values.gather(1, columns)))


def arrivals_from_gumbel(gumbels: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """F = exp(-xi), kept within float32's normal range."""
    return (-gumbels).exp().clamp(min=MIN_ARRIVAL)


def gumbel_argmax(log_probs: Float[Tensor, "*batch v"], arrivals: Float[Tensor, "*batch v"]) -> Int[Tensor, "*batch"]:
    """argmax_j (log p_j + xi_j), compared in float64; log_probs need not be normalised."""
    return (log_probs.double() - arrivals.double().log()).argmax(-1)
