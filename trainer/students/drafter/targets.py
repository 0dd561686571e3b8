"""What a slot's prediction is measured against, one number per slot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from shards.noise import Probabilities


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
