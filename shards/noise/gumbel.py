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
"""Smallest arrival time (xi = 87.3): 1/F stays finite in float32 for tokens of any probability."""
LARGEST_UNIFORM = 1.0 - 2.0**-24


@no_type_check  # part of a compiled kernel, which cannot trace checks of annotations
def exponential_from_bits(bits: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Exp(1) variates from 32 random bits each, float32, in [1.2e-10, 16.7].

    The inverse transform E = -log(1 - u), u = (bits + 1/2) / 2^32, is finest near E = 0, where
    the large Gumbel values lie.
    """
    uniform = bits.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=LARGEST_UNIFORM)
    return uniform.neg_().log1p_().neg_()


def exponentials(
    shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Exp(1) variates on the generator's device, never zero."""
    device = generator.device
    words = torch.randint(1 << 32, shape, generator=generator, device=device)
    if dtype == torch.float32:
        return exponential_from_bits(words)
    low = torch.randint(1 << 20, shape, generator=generator, device=device)
    uniform = (words.to(dtype) * 2.0**20 + low.to(dtype) + 0.5) * 2.0**-52
    return -torch.log1p(-uniform)


def prior_arrivals(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Arrival times of the prior, F_j ~ Exp(1), float32 of any shape [..., V]."""
    return exponentials(shape, generator)


def posterior_from_exponentials(
    log_probs: Float[Tensor, "*batch v"],
    tokens: Int[Tensor, "*batch"],
    others: Float[Tensor, "*batch v"],
    first: Float[Tensor, "*batch"],
) -> Float[Tensor, "*batch v"]:
    """Posterior arrival times from given exponentials (Algorithm 1), in the inputs' precision.

    Args:
        log_probs: Normalised log-probabilities of the teacher, nats.
        tokens: The tokens drawn.
        others: E_j, one Exp(1) variate per vocabulary entry (the token's own is not used).
        first: E_0, one Exp(1) variate per position.
    """
    waited = log_probs.exp() * first[..., None]
    arrivals = add_wait_(others.clone(), waited)
    own = (log_probs.gather(-1, tokens[..., None]) + first[..., None].log()).exp()
    arrivals.scatter_(-1, tokens[..., None], own)
    return arrivals.clamp_(min=MIN_ARRIVAL)


def add_wait_(
    remaining: Float[Tensor, "*shape"], waited: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """E_j + p_j E_0 in place, strictly above p_j E_0 whatever the rounding."""
    margin = 64 * torch.finfo(waited.dtype).eps
    return torch.maximum(remaining, waited * margin, out=remaining).add_(waited)


def posterior_gumbels_from_draws(
    log_probs: Float[Tensor, "*batch v"],
    tokens: Int[Tensor, "*batch"],
    zeta: Float[Tensor, "*batch v"],
    zeta_0: Float[Tensor, "*batch"],
) -> Float[Tensor, "*batch v"]:
    """The posterior in log space: xi_x = zeta_0 - log p_x, which no p_x is too small for.

    Arguments as in :func:`posterior_from_exponentials`, with zeta = -log E.
    """
    gumbels = -torch.logaddexp(-zeta, log_probs - zeta_0[..., None])
    own = zeta_0[..., None] - log_probs.gather(-1, tokens[..., None])
    return gumbels.scatter_(-1, tokens[..., None], own)


def posterior_arrivals(
    log_probs: Float[Tensor, "*batch v"], tokens: Int[Tensor, "*batch"], generator: torch.Generator
) -> Float[Tensor, "*batch v"]:
    """One posterior draw of the arrival times given the tokens and the teacher's log_probs."""
    others = exponentials(tuple(log_probs.shape), generator, log_probs.dtype)
    first = exponentials(tuple(tokens.shape), generator, log_probs.dtype)
    return posterior_from_exponentials(log_probs, tokens, others, first)


def gumbel_from_arrivals(arrivals: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """xi = -log F."""
    return -arrivals.log()


def arrivals_from_gumbel(gumbels: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """F = exp(-xi), kept within float32's normal range."""
    return (-gumbels).exp().clamp(min=MIN_ARRIVAL)


def gumbel_argmax(
    log_probs: Float[Tensor, "*batch v"], arrivals: Float[Tensor, "*batch v"]
) -> Int[Tensor, "*batch"]:
    """argmax_j (log p_j + xi_j), compared in float64; log_probs need not be normalised."""
    return (log_probs.double() - arrivals.double().log()).argmax(-1)
