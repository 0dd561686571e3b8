"""What a slot is told of the noise: nothing, the Gumbel noise of a token, or one uniform of it.

A signal is an embedding that is added to the slot's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from shards.errors import UsageError
from shards.noise.kinds import KeyedPosterior, KeyedPrior, Noise
from shards.noise.philox import PositionKeys, stream_bits
from shards.noise.probabilities import Probabilities
from trainer.students.conditioning import GumbelConditioner
from trainer.students.fused_head import CHUNK_ROWS

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
        remedy="extract with --codec posterior, or model.backbone.own_noise=seen with Gumbel noise",
    )


# What a slot's prediction is measured against, one number per slot.


@dataclass(frozen=True)
class Truth:
    """What the row and its store say about n places.

    Attributes:
        tokens: [n] the row's tokens.
        probabilities: The teacher's; None where they are not asked for.
    """

    tokens: Int[Tensor, "n"]
    probabilities: Probabilities | None


Target = Callable[[Tensor, Truth], Tensor]
"""(logits [n, V] float32, truth) -> losses [n], nats."""


def token_loss(logits: Float[Tensor, "n v"], truth: Truth) -> Float[Tensor, "n"]:
    """-log q(x): a slot that has seen its own noise knows the token."""
    return cross_entropy(logits, truth.tokens, reduction="none")


def distribution_loss(logits: Float[Tensor, "n v"], truth: Truth) -> Float[Tensor, "n"]:
    """KL(p || q) to the teacher's stored distribution.

    The noise before a place decides the tokens before it, and so p: a slot that knows all of it and
    not its own can reach 0.
    """
    assert truth.probabilities is not None
    probs = truth.probabilities.tile(0, logits.shape[1])
    return -(torch.special.entr(probs) + probs * logits.log_softmax(dim=-1)).sum(dim=-1)


def slot_losses(
    target: Target,
    logits: Callable[[Tensor], Tensor],
    hidden: Float[Tensor, "n d"],
    truth: Truth,
    index: Int[Tensor, "n"],
) -> Float[Tensor, "n"]:
    """Loss of each slot; logits are held for one chunk of slots at a time.

    Args:
        target: The loss.
        logits: Of hidden states.
        hidden: Last hidden states of the slots.
        truth: Their tokens, and the teacher's probabilities at the places that any of them
            proposes.
        index: Which of these places is each slot's.
    """

    def measure(states: Tensor, rows: slice) -> Tensor:
        known = truth.probabilities
        chosen = None if known is None else known.select(index[rows])
        with torch.autocast(states.device.type, enabled=False):
            return target(logits(states), Truth(truth.tokens[rows], chosen))

    width = CHUNK_ROWS.get(hidden.device.type, CHUNK_ROWS["cuda"])
    parts = [slice(first, first + width) for first in range(0, len(hidden), width)]
    if len(parts) <= 1:  # nothing to let go of: computing it again would spare no memory
        return measure(hidden, slice(None)) if parts else hidden.new_zeros(0)
    return torch.cat(
        [checkpoint(measure, hidden[part], part, use_reentrant=False) for part in parts]
    )
