"""Self-distillation through time: a student learns in one pass what it says in several.

A masked row is handed to an earlier state of the student, which takes m steps of length dt from the
row's time; every masked token's target is what it predicts in the step that reveals the token, or
in the last step (SDTT: Deschenaux and Gulcehre, arXiv 2410.21035, algorithm 1). After a round the
student is the next one's earlier state, and dt grows m-fold. The loss is KL(q || p), q said by the
student and p the target, as in their experiments.

With Gumbel noise as input all steps see the same noise, and a token that is revealed is the most
probable one: the earlier state's path is then a function of the noise, and so is the target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trainer.objective.batch import Batch, Places
from trainer.objective.schedules import Schedule
from trainer.objective.substitution import Corruption, row_uniforms

LAST_TIME = 1e-5
"""Where steps end that would go below 0."""


Denoise = Callable[[Tensor, Places, Tensor], Tensor]
"""(noised rows [B, L], n places, times [B, blocks]) -> log-probabilities there, [n, V + 1]."""


@dataclass(frozen=True)
class EarlierSteps:
    """How the earlier state goes on from a masked row.

    Attributes:
        time_step: dt, of each of its steps.
        num_steps: m.
        is_drawn: Revealed tokens are drawn from the prediction; else they are the most probable.
    """

    time_step: float
    num_steps: int
    is_drawn: bool

    def log_probs(
        self, denoise: Denoise, batch: Batch, corruption: Corruption, schedule: Schedule, mask: int
    ) -> Float[Tensor, "n v1"]:
        """The targets at all places that the corruption masks, nats; draws are keyed by the batch.

        Args:
            denoise: The earlier state's prediction.
            batch: Clean rows.
            corruption: Times and masks that the student sees.
            schedule: p(t): in the step from t to s a token stays masked with chance p(s) / p(t).
            mask: Id of the mask.
        """
        places, t = corruption.places, corruption.t
        noised = batch.tokens.masked_fill(corruption.mask, mask)
        found = denoise(noised, places, t)
        choose = self._rule(places, batch)
        for number in range(1, self.num_steps):
            later = (t - self.time_step).clamp_min(LAST_TIME)
            stays = schedule.masking_probability(later) / schedule.masking_probability(t)
            revealed = places.read(_revealed(stays, batch, number))
            before = places.read(noised)
            after = torch.where(revealed & (before == mask), choose(found), before)
            noised, t = noised.index_put(places.index, after), later
            is_open = (after == mask)[:, None]
            found = torch.where(is_open, denoise(noised, places, t), found)
        return found

    def _rule(self, places: Places, batch: Batch) -> Callable[[Tensor], Tensor]:
        """What becomes of a prediction: the most probable token, or one drawn from it."""
        if not self.is_drawn:
            return lambda found: found.argmax(dim=-1)
        uniforms = places.read(_uniforms("tokens", batch, 0))  # a token is drawn once
        return lambda found: draw(found, uniforms)


def _revealed(stays: Float[Tensor, "b blocks"], batch: Batch, number: int) -> Bool[Tensor, "b l"]:
    uniforms = _uniforms("revealed", batch, number)
    return uniforms >= stays.repeat_interleave(uniforms.shape[1] // stays.shape[1], dim=1)


def _uniforms(purpose: str, batch: Batch, number: int) -> Float[Tensor, "b l"]:
    return row_uniforms(f"through time, {purpose}", batch, number, batch.tokens.shape[1])


def draw(log_probs: Float[Tensor, "n v1"], uniforms: Float[Tensor, "n"]) -> Int[Tensor, "n"]:
    """F^-1(u) by id, F summed in float64: one number a place where a race would take V of them."""
    distribution = log_probs.exp().cumsum(dim=-1, dtype=torch.float64)
    target = uniforms.double() * distribution[:, -1]
    return torch.searchsorted(distribution, target[:, None], right=True)[:, 0]


@dataclass(frozen=True)
class SelfDistillation:
    """The loss of n positions with an earlier state as teacher: KL(student || earlier state).

    Attributes:
        earlier: Of :meth:`EarlierSteps.log_probs`.
    """

    earlier: Float[Tensor, "n v1"]

    def losses(
        self, log_probs: Float[Tensor, "c v1"], targets: Int[Tensor, "c"], rows: slice
    ) -> Float[Tensor, "c"]:
        """As :meth:`Distillation.losses`; the corpus tokens are not looked at."""
        return (log_probs.exp() * (log_probs - self.earlier[rows])).sum(dim=-1)
