"""A student that sees whole rows, with its noise, as the samplers use it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shards.errors import UsageError
from shards.noise import Noise
from trainer.diffusion import noise_level, schedule_of
from trainer.students import BD3LM, MDLM, Student

DEFAULT_TAU = 0.85
STEPS_PER_ATTEMPT = 1 << 20
"""Draw numbers of one attempt: its own, then one per step where noise is redrawn."""


@runtime_checkable
class RedrawableNoise(Protocol):
    """Noise that has further independent draws."""

    def redrawn(self, draw: int) -> Noise:
        """The ``draw``-th draw after this one."""
        ...


@dataclass(frozen=True)
class NoiseUse:
    """How noise enters the student.

    Attributes:
        noise: Noise of B * L positions, row by row; None for a student without conditioning.
        tau: Scale of xi; None is 0.85 for a conditioned student.
        redraw: Whether every step sees an independent draw.
    """

    noise: Noise | None
    tau: float | None = None
    redraw: bool = False

    def checked(self, student: Student, num_positions: int) -> NoiseUse:
        """The same, with tau filled in; noise for a student that takes none is left out.

        Raises:
            UsageError: When student and noise do not belong together.
        """
        if not student.is_conditioned:
            return NoiseUse(None)
        if self.noise is None:
            raise UsageError("a conditioned student needs noise", where="noise", got="none")
        if self.noise.num_positions != num_positions:
            raise UsageError(
                "the noise does not fit the rows",
                got=f"{self.noise.num_positions} positions",
                expected=num_positions,
            )
        if self.redraw:
            _redrawable(self.noise)
        return NoiseUse(self.noise, DEFAULT_TAU if self.tau is None else self.tau, self.redraw)

    def of(self, rows: Int[Tensor, "m"], num_rows: int, attempt: int) -> NoiseUse:
        """The noise of some rows of a batch, for an attempt at them; attempt 0 is the first."""
        if self.noise is None:
            return self
        length = self.noise.num_positions // num_rows
        index = rows[:, None] * length + torch.arange(length, device=rows.device)
        noise = self.noise.select(index.flatten().to(self.noise.device))
        if attempt:
            noise = _redrawable(noise).redrawn(attempt * STEPS_PER_ATTEMPT)
        return replace(self, noise=noise)

    def embed(self, student: Student, masked: Bool[Tensor, "b l"]) -> Float[Tensor, "b l d"] | None:
        """Noise embeddings at the masked positions, zero elsewhere; None without noise."""
        return None if self.noise is None else self._embed(student, self.noise, masked, masked)

    def embed_redrawn(
        self,
        student: Student,
        masked: Bool[Tensor, "m l"],
        rows: Int[Tensor, "m"],
        steps: Int[Tensor, "m"],
    ) -> Float[Tensor, "m l d"] | None:
        """The same for some rows, each with the draw of its own step."""
        if self.noise is None:
            return None
        noise = _redrawable(self.noise)
        length = masked.shape[1]
        full = masked.new_zeros(self.noise.num_positions // length, length)
        parts = []
        for step in steps.unique().tolist():
            chosen = steps == step
            everywhere = full.clone()
            everywhere[rows[chosen]] = masked[chosen]
            part = self._embed(student, noise.redrawn(step), everywhere, masked[chosen])
            parts.append((chosen, part))
        condition = parts[0][1].new_zeros(*masked.shape, parts[0][1].shape[-1])
        for chosen, part in parts:
            condition[chosen] = part
        return condition

    def _embed(
        self, student: Student, noise: Noise, index: Bool[Tensor, "b l"], place: Bool[Tensor, "m l"]
    ) -> Float[Tensor, "m l d"]:
        positions = index.flatten().nonzero()[:, 0].to(noise.device)
        chosen = noise.select(positions).to(place.device)
        embedded = student.embed_noise(chosen, 1.0 if self.tau is None else self.tau)
        condition = embedded.new_zeros(*place.shape, embedded.shape[-1])
        condition[place] = embedded
        return condition


def _redrawable(noise: Noise) -> RedrawableNoise:
    if not isinstance(noise, RedrawableNoise):
        raise UsageError(
            "this noise cannot be redrawn", where="noise", remedy="give a SamplingNoise"
        )
    return noise


class WholeRow:
    """The :class:`~trainer.sampling.reveal.Predict` of a student that sees the whole row.

    Args:
        student: An MDLM.
        tokens: [B, L] rows as given.
        use: Its noise, checked.
        times: [T] time at the start of each step, for a time-conditioned student.
    """

    def __init__(
        self,
        student: MDLM,
        tokens: Int[Tensor, "b l"],
        use: NoiseUse,
        times: Float[Tensor, "steps"] | None = None,
    ) -> None:
        self.student, self.use = student, use
        self.masked = tokens == student.mask_id
        self.condition = None if use.redraw else use.embed(student, self.masked)
        self.sigma = self._levels(times) if student.settings.time_conditioning else None

    def _levels(self, times: Float[Tensor, "steps"] | None) -> Float[Tensor, "steps"]:
        if times is None:
            raise UsageError(
                "a time-conditioned student needs a sampler with times",
                remedy="use the ancestral sampler",
            )
        schedule = schedule_of(self.student.settings)
        return noise_level(schedule.masking_probability(times.float()))

    def __call__(
        self,
        rows: Int[Tensor, "m"],
        tokens: Int[Tensor, "m l"],
        where: Bool[Tensor, "m l"],
        steps: Int[Tensor, "m"],
    ) -> Float[Tensor, "n v1"]:
        sigma = None
        if self.sigma is not None:
            last = len(self.sigma)
            sigma = self.sigma.to(steps.device)[steps.clamp_max(last) - 1]
        condition = self._condition(rows, tokens, steps)
        return self.student.predict_at(tokens, where, condition, sigma)

    def _condition(
        self, rows: Int[Tensor, "m"], tokens: Int[Tensor, "m l"], steps: Int[Tensor, "m"]
    ) -> Float[Tensor, "m l d"] | None:
        if not self.use.redraw:
            return None if self.condition is None else self.condition[rows]
        return self.use.embed_redrawn(self.student, tokens == self.student.mask_id, rows, steps)


def check_noise_settings(student: Student, tau: float | None, redraw_noise: bool) -> None:
    """Refuse noise settings for a student without conditioning.

    Raises:
        UsageError: Naming the setting.
    """
    for name, value, is_given in (
        ("tau", tau, tau is not None),
        ("redraw_noise", redraw_noise, redraw_noise),
    ):
        if is_given and not student.is_conditioned:
            raise UsageError(
                "this student takes no noise",
                where=name,
                got=value,
                remedy=f"leave {name} out, or sample a student trained with conditioning",
            )


def with_default_tau(sampler: Any, student: Student) -> Any:
    """The sampler with tau written out, where the student is conditioned and tau was left open."""
    if student.is_conditioned and getattr(sampler, "tau", 0.0) is None:
        return replace(sampler, tau=DEFAULT_TAU)
    return sampler


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


def check_rows(student: Student, tokens: Int[Tensor, "b l"]) -> None:
    """Refuse rows that no student can fill.

    Raises:
        UsageError: When position 0 is masked, a row is longer than the student's, or a token is
            out of the vocabulary.
    """
    if bool((tokens[:, 0] == student.mask_id).any()):
        raise UsageError(
            "position 0 is always given",
            where="tokens[:, 0]",
            got="the mask id",
            remedy="begin rows with the bos token or a prompt",
        )
    if tokens.shape[1] > student.config.row_length:
        raise UsageError(
            "rows longer than the student's",
            got=f"{tokens.shape[1]} tokens",
            expected=f"at most {student.config.row_length}",
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
