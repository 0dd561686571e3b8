"""What the samplers of whole rows share: the student's prediction and the order of events."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trainer.objective import Places
from trainer.sampling.rules import (
    DiffusionSampler,
    NoiseUse,
    SampleKeys,
    SampleResult,
    StepLevels,
    TokenRule,
    check_rows,
    require_times,
    require_whole_row_student,
    reveal,
)
from trainer.students import MDLM, Student


class WholeRow:
    """The :class:`~trainer.sampling.rules.revealing.Predict` of a student that sees the whole row.

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
