"""The Gumbel noise of samples, found again from (seed, sample index) by whoever needs it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shards.codec.protocol import Codec
from shards.errors import UsageError
from shards.noise.kinds import KeyedPrior, Noise, PriorNoise
from shards.noise.philox import PositionKeys
from shards.provenance import derive_seed
from trainer.objective.schedules import law_of, masking_sigma
from trainer.students.registry import Student


def sampling_noise(
    seed: int,
    sample_ids: Int[Tensor, "b"],
    row_length: int,
    vocab_size: int,
    *,
    codec: Codec | None = None,
    draw: int = 0,
) -> PriorNoise:
    """Noise of B * row_length positions, sample by sample; position 0 is there but never read.

    A pure function of its arguments: evaluation regenerates a sample's noise from the run's seed
    and the sample's index.

    Args:
        seed: The user's sampling seed.
        sample_ids: [B] int64, index of each sample in the run.
        row_length: Positions per sample.
        vocab_size: V.
        codec: The codec of the store that the student was trained on: it truncates this noise as
            it truncates what it stores. None for a student that takes it whole.
        draw: Which draw: 0, or the attempt's number where a sample is drawn anew.
    """
    positions = torch.arange(row_length, device=sample_ids.device).repeat(len(sample_ids))
    rows = sample_ids.repeat_interleave(row_length)
    keys = PositionKeys(derive_seed(seed, "sampling noise"), rows, positions, draw)
    return KeyedPrior(keys, vocab_size) if codec is None else codec.prior(keys, vocab_size)


def noise_of_rows(
    student: Student, seed: int, sample_ids: Int[Tensor, "b"], row_length: int
) -> PriorNoise | None:
    """``sampling_noise`` as the student reads it; None for one without conditioning."""
    if not student.is_conditioned:
        return None
    size = student.config.vocab_size
    return sampling_noise(seed, sample_ids, row_length, size, codec=student.codec)


# How the samples' noise, and the noise level of each step, reach the student.


DEFAULT_TAU = 0.85
STEPS_PER_ATTEMPT = 1 << 20
"""Draw numbers of one attempt: its own, then one per step where noise is redrawn."""


@dataclass(frozen=True)
class NoiseUse:
    """How noise enters the student.

    Attributes:
        noise: Noise of B * L positions, row by row; None for a student without conditioning.
        tau: Scale of xi; None is 0.85 for a conditioned student.
        redraw: Whether every step sees an independent draw.
        length: L.
    """

    noise: Noise | None
    tau: float | None = None
    redraw: bool = False
    length: int = 0

    def checked(self, student: Student, tokens: Int[Tensor, "b l"]) -> NoiseUse:
        """The same, settled for these rows; noise for a student that takes none is left out.

        Raises:
            UsageError: When student and noise do not belong together.
        """
        if not student.is_conditioned:
            return NoiseUse(None)
        if self.noise is None:
            raise UsageError("a conditioned student needs noise", where="noise", got="none")
        if self.noise.num_positions != tokens.numel():
            raise UsageError(
                "the noise does not fit the rows",
                got=f"{self.noise.num_positions} positions",
                expected=tokens.numel(),
            )
        if self.redraw:
            _redrawable(self.noise)
        tau = DEFAULT_TAU if self.tau is None else self.tau
        return NoiseUse(self.noise, tau, self.redraw, tokens.shape[1])

    def of(self, rows: Int[Tensor, "m"], attempt: int = 0) -> NoiseUse:
        """The noise of some rows of a batch, for an attempt at them; attempt 0 is the first."""
        if self.noise is None:
            return self
        index = rows[:, None] * self.length + torch.arange(self.length, device=rows.device)
        noise = self.noise.select(index.flatten().to(self.noise.device))
        if attempt:
            noise = _redrawable(noise).redrawn(attempt * STEPS_PER_ATTEMPT)
        return replace(self, noise=noise)

    def embed(
        self,
        student: Student,
        masked: Bool[Tensor, "m w"],
        rows: Int[Tensor, "m"],
        first: int = 0,
        steps: Int[Tensor, "m"] | None = None,
    ) -> Float[Tensor, "m w d"] | None:
        """Noise embeddings at masked positions, zero elsewhere; None without noise.

        Args:
            student: Embeds.
            masked: Positions that need noise; column 0 is row position ``first``.
            rows: Which rows of the noise these are.
            first: See ``masked``.
            steps: Where noise is redrawn, the step each row is in: the number of its draw.
        """
        if self.noise is None:
            return None
        row, column = masked.nonzero(as_tuple=True)
        index = rows[row] * self.length + first + column
        if steps is None or not self.redraw:
            embedded = self._embed(student, self.noise, index)
        else:
            noise, step_of = _redrawable(self.noise), steps[row]
            parts = [
                (step_of == step, self._embed(student, noise.redrawn(step), index[step_of == step]))
                for step in steps.unique().tolist()
            ]
            embedded = parts[0][1].new_zeros(len(index), parts[0][1].shape[-1])
            for chosen, part in parts:
                embedded[chosen] = part
        condition = embedded.new_zeros(*masked.shape, embedded.shape[-1])
        condition[row, column] = embedded
        return condition

    def _embed(
        self, student: Student, noise: Noise, index: Int[Tensor, "n"]
    ) -> Float[Tensor, "n d"]:
        chosen = noise.select(index.to(noise.device)).to(index.device)
        return student.embed_noise(chosen, 1.0 if self.tau is None else self.tau)


def _redrawable(noise: Noise) -> PriorNoise:
    if not isinstance(noise, PriorNoise):
        raise UsageError(
            "this noise cannot be redrawn", where="noise", remedy="give sampling_noise"
        )
    return noise


@dataclass(frozen=True)
class StepLevels:
    """What a time-conditioned student is told in each step; None for other students."""

    sigma: Float[Tensor, "steps"] | None

    @classmethod
    def of(cls, student: Student, times: Float[Tensor, "steps1"] | None) -> StepLevels:
        """Levels at the start of each step, and at the last time for the final fill."""
        if not student.settings.diffusion.time_conditioning or times is None:
            return cls(None)
        p = law_of(student.settings.diffusion).masking_probability(times.float())
        return cls(masking_sigma(p).to(student.device))

    def at(self, steps: Int[Tensor, "m"]) -> Float[Tensor, "m"] | None:
        """Levels of rows in these steps."""
        return None if self.sigma is None else self.sigma[steps - 1]


def require_times(student: Student, has_times: bool, remedy: str) -> None:
    """Refuse a time-conditioned student where its steps have no time that it could be told.

    Raises:
        UsageError: With the remedy.
    """
    if student.settings.diffusion.time_conditioning and not has_times:
        raise UsageError(
            "a time-conditioned student must be told the time of each step",
            where="sampler",
            remedy=remedy,
        )


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
