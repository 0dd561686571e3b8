"""What the samplers of whole rows share: their settings, checks and order of events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Bool, Float, Int
from torch import Tensor

from shards.noise import Noise
from trainer.sampling.draws import SampleKeys
from trainer.sampling.nucleus import NucleusRule
from trainer.sampling.result import SampleResult
from trainer.sampling.reveal import inference, reveal
from trainer.sampling.stopping import StopRule
from trainer.sampling.token_rule import Decision, TokenRule, check_settings
from trainer.sampling.whole_row import (
    NoiseUse,
    WholeRow,
    check_noise_settings,
    check_rows,
    require_whole_row_student,
)
from trainer.students import MDLM, Student


@dataclass(frozen=True, kw_only=True)
class WholeRowSampler(ABC):
    """Base of the samplers that fill whole rows; subclasses say which step reveals what.

    Attributes:
        nucleus_p: Nucleus truncation of the prediction; 1 is off.
        nucleus_rule: ``strict`` (the authors') or ``crossing`` (transformers').
        tau: Scale of the noise; None is 0.85 for a conditioned student and nothing for another.
        decision: Draw the revealed tokens, or take the most probable ones.
        redraw_noise: Independent noise at every step instead of one draw held fixed.
        stop: Early ends and redraws.
    """

    nucleus_p: float = 1.0
    nucleus_rule: NucleusRule = "strict"
    tau: float | None = None
    decision: Decision = "categorical"
    redraw_noise: bool = False
    stop: StopRule = StopRule()

    label: ClassVar[str]

    def __post_init__(self) -> None:
        check_settings(self.nucleus_p, self.tau, getattr(self, "nfe", 1))

    @property
    def rule(self) -> TokenRule:
        """How tokens are chosen."""
        return TokenRule(self.decision, self.nucleus_p, self.nucleus_rule)

    @property
    def times(self) -> Float[Tensor, "steps1"] | None:
        """Time at the start of each step, and the last time; None when steps have no time."""
        return None

    @abstractmethod
    def steps(
        self, student: Student, masked: Bool[Tensor, "b l"], keys: SampleKeys, first: int = 0
    ) -> tuple[Int[Tensor, "b l"], Int[Tensor, "b l"]]:
        """The steps that reveal the masked positions: drawn by the rule, then the final fill.

        Each is 0 where the other one, or neither, reveals a position.

        Args:
            student: Its noise schedule matters to samplers with times.
            masked: Positions to fill.
            keys: Names of the draws.
            first: Row position of column 0.
        """

    def check(self, student: Student, tokens: Int[Tensor, "b l"]) -> MDLM:
        """The student, if it can fill these rows by this sampler.

        Raises:
            UsageError: When it cannot.
        """
        check_noise_settings(student, self.tau, self.redraw_noise)
        check_rows(student, tokens)
        self.stop.check(student, tokens)
        return require_whole_row_student(student, self.label)

    def sample(
        self,
        student: Student,
        tokens: Int[Tensor, "b l"],
        sample_ids: Int[Tensor, "b"],
        noise: Noise | None,
        seed: int,
    ) -> SampleResult:
        """Fill the masked positions of B rows.

        Args:
            student: An MDLM.
            tokens: The mask id where to fill; other tokens are kept. Position 0 is given.
            sample_ids: Index of each sample: with the seed it names all randomness.
            noise: Noise of B * L positions row by row; None for a student without conditioning.
            seed: The user's seed.

        Raises:
            UsageError: When student, rows, noise and settings do not fit each other.
        """
        whole = self.check(student, tokens)
        use = NoiseUse(noise, self.tau, self.redraw_noise).checked(student, tokens)

        def draw(rows: Int[Tensor, "m"], attempt: int) -> SampleResult:
            keys = SampleKeys(seed, sample_ids[rows], attempt)
            return self._fill(whole, tokens[rows], use.of(rows, attempt), keys)

        with inference(student):
            return self.stop.draw(draw, len(tokens), tokens.device)

    def _fill(
        self, student: MDLM, tokens: Int[Tensor, "b l"], use: NoiseUse, keys: SampleKeys
    ) -> SampleResult:
        predict = WholeRow(student, tokens, use, self.times)
        drawn, left = self.steps(student, predict.masked, keys)
        tokens, nfe = reveal(predict, tokens, drawn, self.rule, keys)
        tokens, further = reveal(predict, tokens, left, TokenRule("argmax"), keys)
        lengths = self.stop.ends(tokens, predict.masked, student.config.eos_token_id)
        details = {}
        if self.stop.min_entropy_nats is not None:
            details["low_entropy"] = self.stop.is_monotonous(tokens, lengths)
        return SampleResult(tokens, nfe + further, lengths, details)
