"""What samplers are: frozen settings that fill the masked positions of rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shards.errors import UsageError
from shards.noise.kinds import Noise
from trainer.objective.batch import Places
from trainer.sampling.noise import (
    DEFAULT_TAU,
    NoiseUse,
    StepLevels,
    check_noise_settings,
    require_times,
)
from trainer.sampling.revealing import inference, reveal
from trainer.sampling.stopping import SampleResult, StopRule
from trainer.sampling.token_rule import (
    Decision,
    NucleusRule,
    SampleKeys,
    TokenRule,
    check_nfe,
    check_positive,
)
from trainer.students.registry import BD3LM, MDLM, Student


class Sampler(ABC):
    """What every sampler offers."""

    label: ClassVar[str]

    def __post_init__(self) -> None:
        return  # subclasses refuse what they cannot follow

    def settled(self, student: Student) -> Sampler:
        """The same sampler with everything written out that it left to the student."""
        return self

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Refuse a tokenizer (None where the student has none) that is not the verifier's.

        Raises:
            UsageError: Naming the first word whose id differs.
        """
        return  # there is no second model

    def verifier_sha256(self, student: Student) -> str | None:
        """Hash of the verifier's weights; None for a sampler without one."""
        return None

    @abstractmethod
    def check(self, student: Student, tokens: Int[Tensor, "b l"]) -> Student:
        """The student, if it can fill these rows by this sampler.

        Raises:
            UsageError: When it cannot.
        """

    @abstractmethod
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
            student: Of a kind that ``check`` lets pass.
            tokens: The mask id where to fill; other tokens are kept. Position 0 is given.
            sample_ids: Index of each sample: with the seed it names all randomness.
            noise: Noise of B * L positions row by row; None for a student without conditioning.
            seed: The user's seed.

        Raises:
            UsageError: When student, rows, noise and settings do not fit each other.
        """


@dataclass(frozen=True, kw_only=True)
class TokenSampler(Sampler):
    """Base of the samplers that choose tokens by the student's prediction alone, or mixed.

    Attributes:
        nucleus_p: Nucleus truncation of the prediction; 1 is off.
        nucleus_rule: ``strict`` (the authors') or ``crossing`` (transformers').
        temperature: Divides the log-probabilities of the prediction; 1 leaves them.
        decision: Draw the revealed tokens, or take the most probable ones.
    """

    nucleus_p: float = 1.0
    nucleus_rule: NucleusRule = "strict"
    temperature: float = 1.0
    decision: Decision = "categorical"

    def __post_init__(self) -> None:
        _ = self.rule  # which refuses what it cannot follow
        check_nfe(getattr(self, "nfe", None))

    @property
    def rule(self) -> TokenRule:
        """How tokens are chosen."""
        return TokenRule(self.decision, self.nucleus_p, self.nucleus_rule, self.temperature)


@dataclass(frozen=True, kw_only=True)
class NoisySampler(TokenSampler):
    """Base of the samplers whose student may take noise.

    Attributes:
        tau: Scale of the noise; None is 0.85 for a conditioned student and nothing for another.
    """

    tau: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(tau=self.tau)

    def settled(self, student: Student) -> Sampler:
        """The same sampler with tau written out, where the student is conditioned."""
        if student.is_conditioned and self.tau is None:
            return replace(self, tau=DEFAULT_TAU)
        return self


@dataclass(frozen=True, kw_only=True)
class RedrawingSampler(TokenSampler):
    """Base of the samplers that may draw a row anew.

    Attributes:
        stop: Early ends and redraws.
    """

    stop: StopRule = StopRule()

    def noise_use(self, noise: Noise | None) -> NoiseUse:
        """How the noise enters the student."""
        return NoiseUse(noise)

    def sample(
        self,
        student: Student,
        tokens: Int[Tensor, "b l"],
        sample_ids: Int[Tensor, "b"],
        noise: Noise | None,
        seed: int,
    ) -> SampleResult:
        """See :class:`Sampler`."""
        able = self.check(student, tokens)
        use = self.noise_use(noise).checked(student, tokens)

        def draw(rows: Int[Tensor, "m"], attempt: int) -> SampleResult:
            keys = SampleKeys(seed, sample_ids[rows], attempt)
            return self.fill(able, tokens[rows], use.of(rows, attempt), keys)

        with inference(student):
            return self.stop.draw(draw, len(tokens), tokens.device)

    @abstractmethod
    def fill(
        self, student: Any, tokens: Int[Tensor, "b l"], use: NoiseUse, keys: SampleKeys
    ) -> SampleResult:
        """One attempt at some rows by the student that ``check`` gave back."""


@dataclass(frozen=True, kw_only=True)
class DiffusionSampler(NoisySampler, RedrawingSampler):
    """Base of the samplers that reveal tokens step by step.

    Attributes:
        redraw_noise: Independent noise at every step instead of one draw held fixed.
    """

    redraw_noise: bool = False

    def check(self, student: Student, tokens: Int[Tensor, "b l"]) -> Student:
        """Settings against the student; subclasses look at the rows too."""
        check_noise_settings(student, self.tau, self.redraw_noise)
        self.stop.check(student, tokens)
        return student

    def noise_use(self, noise: Noise | None) -> NoiseUse:
        """See :class:`RedrawingSampler`."""
        return NoiseUse(noise, self.tau, self.redraw_noise)


def check_rows(student: Student, tokens: Int[Tensor, "b l"]) -> None:
    """Refuse rows that no student can fill.

    Raises:
        UsageError: When a row is longer than the student's, and as ``check_tokens``.
    """
    check_tokens(student, tokens)
    if tokens.shape[1] > student.config.row_length:
        raise UsageError(
            "rows longer than the student's",
            where="length",
            got=f"{tokens.shape[1]} tokens",
            expected=f"at most {student.config.row_length}",
            remedy="only the block sampler goes beyond the trained length",
        )


def check_tokens(student: Student, tokens: Int[Tensor, "b l"]) -> None:
    """Refuse tokens that no student can start from.

    Raises:
        UsageError: When position 0 is masked or a token is out of the vocabulary.
    """
    if bool((tokens[:, 0] == student.mask_id).any()):
        raise UsageError(
            "position 0 is always given",
            where="tokens[:, 0]",
            got="the mask id",
            remedy="begin rows with the bos token or a prompt",
        )
    outside = (tokens < 0) | (tokens > student.mask_id)
    if bool(outside.any()):
        row, position = outside.nonzero()[0].tolist()
        raise UsageError(
            "a token is not in the vocabulary",
            where=f"row {row}, position {position}",
            got=int(tokens[row, position]),
            expected=f"0..{student.mask_id - 1}, or the mask id {student.mask_id}",
        )


def require_whole_row_student(student: Student, sampler: str) -> MDLM:
    """The student, if it predicts whole rows at once.

    Raises:
        UsageError: For block-diffusion and autoregressive students.
    """
    blocks = isinstance(student, BD3LM) and student.num_blocks > 1
    if not isinstance(student, MDLM) or blocks:
        raise UsageError(
            f"the {sampler} sampler fills whole rows",
            where="sampler",
            got=type(student).__name__,
            expected="an MDLM student",
            remedy="use --sampler block for block diffusion",
        )
    return student


# What the samplers of whole rows share: the student's prediction and the order of events.


class WholeRow:
    """The :class:`~trainer.sampling.revealing.Predict` of a student that sees the whole row.

    Args:
        student: An MDLM.
        tokens: [B, L] rows as given.
        use: Their noise, checked.
        times: [T + 1] times of the steps, for a time-conditioned student.
    """

    def __init__(
        self,
        student: MDLM,
        tokens: Int[Tensor, "b l"],
        use: NoiseUse,
        times: Float[Tensor, "steps1"] | None = None,
    ) -> None:
        self.student, self.use = student, use
        self.masked = tokens == student.mask_id
        everyone = torch.arange(len(tokens), device=tokens.device)
        self.condition = None if use.redraw else use.embed(student, self.masked, everyone)
        self.levels = StepLevels.of(student, times)

    def __call__(
        self,
        rows: Int[Tensor, "m"],
        tokens: Int[Tensor, "m l"],
        where: Places,
        steps: Int[Tensor, "m"],
    ) -> Float[Tensor, "n v1"]:
        if self.use.redraw:
            masked = tokens == self.student.mask_id
            condition = self.use.embed(self.student, masked, rows, steps=steps)
        else:
            condition = None if self.condition is None else self.condition[rows]
        return self.student.predict_at(tokens, where, condition, self.levels.at(steps))


@dataclass(frozen=True, kw_only=True)
class WholeRowSampler(DiffusionSampler):
    """Base of the samplers that fill whole rows."""

    @property
    def times(self) -> Float[Tensor, "steps1"] | None:
        """Time at the start of each step, and the last time; None when steps have no time."""
        return None

    @abstractmethod
    def reveal(
        self, predict: WholeRow, tokens: Int[Tensor, "b l"], keys: SampleKeys
    ) -> tuple[Int[Tensor, "b l"], Int[Tensor, "b"]]:
        """Filled rows, and the forward passes each row took part in.

        Args:
            predict: The student.
            tokens: Rows as given.
            keys: Names of the draws.
        """

    def check(self, student: Student, tokens: Int[Tensor, "b l"]) -> MDLM:
        """See :class:`Sampler`."""
        super().check(student, tokens)
        require_times(student, self.times is not None, "use --sampler ancestral")
        check_rows(student, tokens)
        return require_whole_row_student(student, self.label)

    def fill(
        self, student: MDLM, tokens: Int[Tensor, "b l"], use: NoiseUse, keys: SampleKeys
    ) -> SampleResult:
        """See :class:`DiffusionSampler`."""
        predict = WholeRow(student, tokens, use, self.times)
        tokens, nfe = self.reveal(predict, tokens, keys)
        lengths = self.stop.ends(tokens, predict.masked, student.config.eos_token_id)
        return SampleResult(tokens, nfe, lengths, self.stop.details(tokens, lengths))


@dataclass(frozen=True, kw_only=True)
class PlannedSampler(WholeRowSampler):
    """Base of those whose order does not depend on the student; subclasses say which it is."""

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

    def reveal(
        self, predict: WholeRow, tokens: Int[Tensor, "b l"], keys: SampleKeys
    ) -> tuple[Int[Tensor, "b l"], Int[Tensor, "b"]]:
        """See :class:`WholeRowSampler`."""
        drawn, left = self.steps(predict.student, predict.masked, keys)
        tokens, nfe = reveal(predict, tokens, drawn, self.rule, keys)
        tokens, further = reveal(predict, tokens, left, TokenRule("argmax"), keys)
        return tokens, nfe + further
