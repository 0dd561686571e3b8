"""What a slot's prediction is measured against, one number per slot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from shards.noise import Probabilities
from trainer.students.fused_head import CHUNK_ROWS


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
