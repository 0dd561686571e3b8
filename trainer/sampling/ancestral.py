"""Ancestral sampling of masked diffusion (Sahoo et al. 2024), with caching."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shards.noise import Noise
from trainer.diffusion import schedule_of
from trainer.sampling.draws import SampleKeys, position_uniforms
from trainer.sampling.nucleus import NucleusRule
from trainer.sampling.order import LAST_TIME, ancestral_steps, ancestral_times
from trainer.sampling.result import SampleResult
from trainer.sampling.reveal import inference, reveal
from trainer.sampling.token_rule import Decision, TokenRule, check_settings
from trainer.sampling.whole_row import (
    NoiseUse,
    WholeRow,
    check_noise_settings,
    check_rows,
    require_whole_row_student,
)
from trainer.schedules import Schedule
from trainer.students import MDLM, Student


@dataclass(frozen=True)
class AncestralConfig:
    """T steps at times linspace(1, 1e-5, T + 1).

    In the step from t to s a masked token stays masked with probability p(s) / p(t), else it is
    drawn from the prediction; a known token never changes. A row whose tokens all stay as they are
    needs no forward pass, so NFE is at most T, and below it when T is large for the row.

    Attributes:
        nfe: T, the most forward passes per sample (but see ``final_argmax``).
        nucleus_p: Nucleus truncation of the prediction; 1 is off.
        nucleus_rule: ``strict`` (the authors') or ``crossing`` (transformers').
        tau: Scale of the noise; None is 0.85 for a conditioned student and nothing for another.
        decision: Draw the revealed tokens, or take the most probable ones.
        redraw_noise: Independent noise at every step instead of one draw held fixed.
        final_argmax: Tokens that are still masked after T steps (each with probability 1e-5) are
            filled by one more forward pass with the most probable tokens, nucleus off: the
            authors' noise removal. False: the last step goes to t = 0 and leaves none.
    """

    nfe: int = 128
    nucleus_p: float = 1.0
    nucleus_rule: NucleusRule = "strict"
    tau: float | None = None
    decision: Decision = "categorical"
    redraw_noise: bool = False
    final_argmax: bool = True

    def __post_init__(self) -> None:
        check_settings(self.nucleus_p, self.tau, self.nfe)

    @property
    def rule(self) -> TokenRule:
        """How tokens are chosen."""
        return TokenRule(self.decision, self.nucleus_p, self.nucleus_rule)

    @property
    def times(self) -> Float[Tensor, "steps1"]:
        """t_0 .. t_T, float64."""
        return ancestral_times(self.nfe, LAST_TIME if self.final_argmax else 0.0)

    def check(self, student: Student, tokens: Int[Tensor, "b l"]) -> MDLM:
        """The student, if it can fill these rows by this sampler.

        Raises:
            UsageError: When it cannot.
        """
        check_noise_settings(student, self.tau, self.redraw_noise)
        check_rows(student, tokens)
        return require_whole_row_student(student, "ancestral")

    def sample(
        self,
        student: Student,
        tokens: Int[Tensor, "b l"],
        sample_ids: Int[Tensor, "b"],
        noise: Noise | None,
        seed: int,
        *,
        attempt: int = 0,
    ) -> SampleResult:
        """Fill the masked positions of B rows.

        Args:
            student: An MDLM.
            tokens: The mask id where to fill; other tokens are kept. Position 0 is given.
            sample_ids: Index of each sample: with the seed it names all randomness.
            noise: Noise of B * L positions row by row; None for a student without conditioning.
            seed: The user's seed.
            attempt: Which attempt at these samples this is.
        """
        student = self.check(student, tokens)
        use = NoiseUse(noise, self.tau, self.redraw_noise).checked(student, tokens.numel())
        keys = SampleKeys(seed, sample_ids, attempt)
        with inference(student):
            predict = WholeRow(student, tokens, use, self.times)
            steps = self.steps(schedule_of(student.settings), predict.masked, keys)
            tokens, nfe = reveal(predict, tokens, steps, self.rule, keys, last_step=self.nfe)
            left = torch.where(steps > self.nfe, steps, 0)
            greedy = TokenRule("argmax")
            tokens, further = reveal(predict, tokens, left, greedy, keys)
        return SampleResult(tokens, nfe + further, torch.full_like(nfe, tokens.shape[1]))

    def steps(
        self, schedule: Schedule, masked: Tensor, keys: SampleKeys, first_position: int = 0
    ) -> Int[Tensor, "b l"]:
        """The step that reveals each masked position; T + 1 where the final fill does."""
        uniform = position_uniforms(keys, "sampling order", masked.shape[1], first_position)
        survival = survival_probability(schedule, self.times).to(uniform.device)
        return ancestral_steps(uniform, masked.to(uniform.device), survival).to(masked.device)


def survival_probability(
    schedule: Schedule, times: Float[Tensor, "steps1"]
) -> Float[Tensor, "steps"]:
    """Probability that a token is still masked after step 1..T: p(t_k) / p(1), and 0 at t = 0."""
    p = schedule.masking_probability(times)
    return torch.where(times > 0, p / p[0], 0.0)[1:]
