"""How often two contexts pick the same token when they share their noise, in closed form.

A coupling says how noise and a distribution make a token. Decoding with noise, a student's context
may be wrong, so its distribution is q where the teacher's is p: the chance that both pick the same
token is what the noise still says. No coupling exceeds 1 - TV(p, q); the Gumbel one never falls
below (1 - TV) / (1 + TV), the inverse distribution function may fall to 0.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def total_variation(p: Float[Tensor, "n v"], q: Float[Tensor, "n v"]) -> Float[Tensor, "n"]:
    """Half the L1 distance of n pairs, in [0, 1]."""
    return (p - q).abs().sum(dim=1) / 2


def gumbel_same_token(p: Float[Tensor, "n v"], q: Float[Tensor, "n v"]) -> Float[Tensor, "n"]:
    """P(argmax(log p + xi) = argmax(log q + xi)) = sum_k 1 / sum_j max(p_j / p_k, q_j / q_k).

    The max is p_j / p_k where p_j / q_j >= p_k / q_k, so one sort by that ratio and two running
    sums replace the V^2 terms.
    """
    both = (p > 0) & (q > 0)
    ratio = torch.where(q > 0, p / q, torch.where(p > 0, torch.inf, 0.0))
    order = ratio.argsort(dim=1, descending=True)
    p, q, both = p.gather(1, order), q.gather(1, order), both.gather(1, order)
    larger = p.cumsum(1)
    smaller = q.flip(1).cumsum(1).flip(1) - q
    total = larger / p.where(both, 1.0) + smaller / q.where(both, 1.0)
    return torch.where(both, 1 / total, 0.0).sum(1)


def intervals(
    p: Float[Tensor, "n v"], order: Int[Tensor, "n v"] | Int[Tensor, "v"]
) -> tuple[Float[Tensor, "n v"], Float[Tensor, "n v"]]:
    """[F(x-) , F(x)) of every token x, by id, with the tokens laid side by side in some order.

    Args:
        p: Distributions.
        order: Ids in their order; one for all, or one for each.
    """
    order = order.expand(p.shape)
    high = p.gather(1, order).cumsum(1)
    high = torch.zeros_like(p).scatter(1, order, high)
    return high - p, high


def inverse_cdf(
    p: Float[Tensor, "n v"], order: Int[Tensor, "n v"] | Int[Tensor, "v"], u: Float[Tensor, "n"]
) -> Int[Tensor, "n"]:
    """x = F^-1(u): the token in whose interval u lies (Parallel Token Prediction's coupling)."""
    order = order.expand(p.shape)
    cumulative = p.gather(1, order).cumsum(1)
    last = p.shape[1] - 1
    place = torch.searchsorted(cumulative, u[:, None], right=True).clamp(max=last)
    return order.gather(1, place)[:, 0]


def uniform_same_token(
    p: Float[Tensor, "n v"],
    q: Float[Tensor, "n v"],
    order_p: Int[Tensor, "n v"] | Int[Tensor, "v"],
    order_q: Int[Tensor, "n v"] | Int[Tensor, "v"],
) -> Float[Tensor, "n"]:
    """P(F_p^-1(u) = F_q^-1(u)): what the two intervals of every token have in common, summed."""
    low_p, high_p = intervals(p, order_p)
    low_q, high_q = intervals(q, order_q)
    common = torch.minimum(high_p, high_q) - torch.maximum(low_p, low_q)
    return common.clamp(min=0).sum(1)
