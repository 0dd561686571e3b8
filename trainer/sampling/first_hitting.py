"""First-hitting sampling (Zheng et al., arXiv 2409.02908), and k tokens per forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from shards.noise import Noise
from trainer.sampling.draws import SampleKeys, position_uniforms
from trainer.sampling.nucleus import NucleusRule
from trainer.sampling.order import fixed_count_steps
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
from trainer.students import MDLM, Student


@dataclass(frozen=True)
class FirstHittingConfig:
    """One uniformly chosen masked token per forward pass: exact for masked diffusion.

    NFE is the number of masked tokens. Every row of a batch has its own order; rows with fewer
    masked tokens finish earlier and leave the batch.

    Attributes:
        nucleus_p: Nucleus truncation of the prediction; 1 is off.
        nucleus_rule: ``strict`` (the authors') or ``crossing`` (transformers').
        tau: Scale of the noise; None is 0.85 for a conditioned student and nothing for another.
        decision: Draw the revealed tokens, or take the most probable ones.
        redraw_noise: Independent noise at every step instead of one draw held fixed.
    """

    nucleus_p: float = 1.0
    nucleus_rule: NucleusRule = "strict"
    tau: float | None = None
    decision: Decision = "categorical"
    redraw_noise: bool = False

    def __post_init__(self) -> None:
        check_settings(self.nucleus_p, self.tau)

    @property
    def rule(self) -> TokenRule:
        """How tokens are chosen."""
        return TokenRule(self.decision, self.nucleus_p, self.nucleus_rule)

    def num_per_step(self, masked: Bool[Tensor, "b l"]) -> Int[Tensor, "b 1"]:
        """Tokens revealed per forward pass of each row."""
        return torch.ones_like(masked[:, :1], dtype=torch.int64)

    def steps(
        self, masked: Bool[Tensor, "b l"], keys: SampleKeys, first_position: int = 0
    ) -> Int[Tensor, "b l"]:
        """The forward pass that reveals each masked position."""
        uniform = position_uniforms(keys, "sampling order", masked.shape[1], first_position)
        return fixed_count_steps(uniform.to(masked.device), masked, self.num_per_step(masked))

    def check(self, student: Student, tokens: Int[Tensor, "b l"]) -> MDLM:
        """The student, if it can fill these rows by this sampler.

        Raises:
            UsageError: When it cannot.
        """
        check_noise_settings(student, self.tau, self.redraw_noise)
        check_rows(student, tokens)
        return require_whole_row_student(student, "first-hitting")

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
        """Fill the masked positions of B rows; arguments as in ``AncestralConfig.sample``."""
        student = self.check(student, tokens)
        use = NoiseUse(noise, self.tau, self.redraw_noise).checked(student, tokens.numel())
        keys = SampleKeys(seed, sample_ids, attempt)
        with inference(student):
            predict = WholeRow(student, tokens, use)
            steps = self.steps(predict.masked, keys)
            tokens, nfe = reveal(predict, tokens, steps, self.rule, keys)
        return SampleResult(tokens, nfe, torch.full_like(nfe, tokens.shape[1]))


@dataclass(frozen=True)
class FixedCountConfig(FirstHittingConfig):
    """The same number of uniformly chosen masked tokens in every forward pass (MaskGIT's pace).

    Attributes:
        nfe: Forward passes per sample: each reveals ceil(masked / nfe) tokens.
    """

    nfe: int = 128

    def __post_init__(self) -> None:
        check_settings(self.nucleus_p, self.tau, self.nfe)

    def num_per_step(self, masked: Bool[Tensor, "b l"]) -> Int[Tensor, "b 1"]:
        """ceil(masked / nfe), at least 1."""
        total = masked.sum(dim=1, keepdim=True)
        return (-(-total // self.nfe)).clamp_min(1)
