"""Token-level knowledge distillation: the teacher's probabilities as target, not its one token.

Where a store lists some tokens and the mass of the others, the others are one outcome, for the
teacher and for the student alike: both normalise over the same outcomes, and within the rest the
student keeps its own proportions. Where all V probabilities are known nothing is approximated.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shards.noise.gumbel import HeadAndTail, Probabilities

NOWHERE = -2e6
"""Log-probability of listed tokens among the rest: finite, so that gradients are, and exp is 0."""


@dataclass(frozen=True)
class Outcomes:
    """What the teacher tells apart at n positions, and how likely that is.

    Attributes:
        log_probs: [n, o] float32, nats, -inf where impossible. Over all V tokens, or over k listed
            ones and, last, all others together (o = k + 1).
        ids: [n, k] listed tokens, an id past V in unused slots; None where all V are told apart.
    """

    log_probs: Float[Tensor, "n o"]
    ids: Int[Tensor, "n k"] | None = None

    @classmethod
    def of(cls, teacher: Probabilities) -> Outcomes:
        """The outcomes of a stored distribution."""
        size = teacher.vocab_size
        if not isinstance(teacher, HeadAndTail):
            return cls(teacher.tile(0, size).log())
        head = teacher.head
        is_whole = head.used.sum(dim=1) == size  # then what is left over is rounding, and no token
        rest = teacher.tail_mass.masked_fill(is_whole, 0.0)
        probs = torch.cat((head.values.masked_fill(~head.used, 0.0), rest[:, None]), dim=1)
        return cls(probs.log(), head.ids.masked_fill(~head.used, size))

    def group(self, log_probs: Float[Tensor, "n v1"]) -> Float[Tensor, "n o"]:
        """A student's log-probabilities over V tokens and the mask, summed within outcomes."""
        if self.ids is None:
            return log_probs[:, : self.log_probs.shape[1]]
        rest = log_probs.scatter(1, self.ids, NOWHERE).logsumexp(dim=1, keepdim=True)
        return torch.cat((log_probs.gather(1, self.ids), rest), dim=1)


def tempered_kl(
    teacher: Float[Tensor, "n o"], student: Float[Tensor, "n o"], temperature: float = 1.0
) -> Float[Tensor, "n"]:
    """T^2 KL(p || q) in nats, p and q proportional to the T-th roots (Hinton et al. 2015, eq. 4).

    T^2 keeps the gradient's size; at T = 1 it is the forward KL itself.

    Args:
        teacher: Log-probabilities, up to a constant per row; -inf where impossible.
        student: The same of the student, with gradient.
        temperature: T.
    """
    target = (teacher / temperature).log_softmax(dim=1)
    found = (student / temperature).log_softmax(dim=1)
    possible = target > -torch.inf
    gaps = torch.where(possible, target, 0.0) - found
    return temperature**2 * (target.exp() * gaps).sum(dim=1)


@dataclass(frozen=True)
class Distillation:
    """The loss of n positions with a teacher: (1 - weight) NLL + weight KL.

    Attributes:
        teacher: Its stored distribution at the n positions.
        weight: Share of the KL.
        temperature: T of both distributions in the KL.
    """

    teacher: Probabilities
    weight: float = 1.0
    temperature: float = 1.0

    def losses(self, log_probs: Float[Tensor, "c v1"], targets: Int[Tensor, "c"], rows: slice) -> Float[Tensor, "c"]:
        """Of some of the positions, nats.

        Args:
            log_probs: The student's, over V tokens and the mask (about -1e6), with gradient.
            targets: The corpus tokens.
            rows: Which of the n positions these are.
        """
        outcomes = Outcomes.of(self.teacher.select(rows))
        kl = tempered_kl(outcomes.log_probs, outcomes.group(log_probs), self.temperature)
        nll = -log_probs.gather(1, targets[:, None])[:, 0]
        return (1 - self.weight) * nll + self.weight * kl
