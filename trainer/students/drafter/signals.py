"""What a slot is told of the noise: nothing, the Gumbel noise of a token, or one uniform of it.

A signal is an embedding that is added to the slot's own.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from shards.base import UsageError
from shards.noise import KeyedPosterior, KeyedPrior, Noise, PositionKeys, stream_bits
from trainer.students.conditioning import GumbelConditioner

UNIFORM_STREAM = 4
"""Of the keyed generator; the streams before it draw prior noise."""
VOCABULARY_TILE = 4096


class GumbelSignal(GumbelConditioner):
    """softmax(tau xi + w log q) W."""

    def reset_parameters(self) -> None:
        """Zero, until the drafter puts in the token embeddings of its backbone."""
        nn.init.zeros_(self.weight)


class UniformSignal(nn.Module):
    """One uniform u per token (Parallel Token Prediction, Draxler et al., arXiv 2512.21323).

    Interpolates between the rows of W, which lie at u = 0, 1 / (V - 1), .., 1: as many weights as a
    Gumbel signal has.
    """

    prior_weight = 0.0

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(vocab_size, hidden_size))

    def reset_parameters(self) -> None:
        """Zero: what the noise adds is learnt from nothing."""
        nn.init.zeros_(self.weight)

    def forward(
        self, noise: Noise, tau: float = 1.0, table: Tensor | None = None
    ) -> Float[Tensor, "n d"]:
        """Embeddings of n positions' uniforms; a temperature changes F, not u, and W is its own."""
        place = token_uniforms(noise) * (len(self.weight) - 1)
        below = place.long().clamp(max=len(self.weight) - 2)
        share = (place - below).to(self.weight.dtype)[:, None]
        return torch.lerp(self.weight[below], self.weight[below + 1], share)


def token_uniforms(noise: Noise) -> Float[Tensor, "n"]:
    """u in [0, 1) with F^-1(u) the token, F its distribution function by id, float64.

    A posteriori u = F(x - 1) + p_x z, z uniform; a priori u = z, of the same keys. That is exact
    for the distribution that the store gives back: p_x is the teacher's own, but F(x - 1) sums what
    the codec kept of the others. ``posterior`` with ``num_entries`` >= V rounds log p to float16,
    ``hidden`` rounds the hidden state; with fewer entries the tail follows the corpus' unigram, and
    u is off by as much of its mass as lies at other ids.

    Raises:
        UsageError: For noise from a codec that keeps a draw and no distribution.
    """
    if isinstance(noise, KeyedPrior):
        return _uniforms(noise.keys)
    if not isinstance(noise, KeyedPosterior):
        raise no_distribution(noise)
    below = torch.zeros(len(noise.tokens), dtype=torch.float64, device=noise.device)
    total = below.clone()
    for start in range(0, noise.vocab_size, VOCABULARY_TILE):
        stop = min(start + VOCABULARY_TILE, noise.vocab_size)
        probs = noise.probabilities.tile(start, stop).double()
        is_below = torch.arange(start, stop, device=noise.device) < noise.tokens[:, None]
        below += (probs * is_below).sum(dim=1)
        total += probs.sum(dim=1)
    own = noise.token_log_probs.double().exp()
    return ((below + own * _uniforms(noise.keys)) / total).clamp(max=1 - 2.0**-53)


def _uniforms(keys: PositionKeys) -> Float[Tensor, "n"]:
    return (stream_bits(keys, UNIFORM_STREAM, 1)[:, 0].double() + 0.5) * 2.0**-32


def no_distribution(noise: Noise) -> UsageError:
    """For noise whose codec has kept a draw."""
    return UsageError(
        "the shards keep noise and no distribution",
        where="codec",
        got=type(noise).__name__,
        expected="the codec posterior or hidden",
        remedy="extract with --codec posterior, or set model.own_noise=seen with Gumbel noise",
    )
