"""Ancestral sampling of masked diffusion (Sahoo et al. 2024), with caching."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Bool, Float, Int
from torch import Tensor

from trainer.objective.schedules import law_of
from trainer.sampling.revealing import LAST_TIME, ancestral_order, ancestral_times, uniform_order
from trainer.sampling.sampler import PlannedSampler
from trainer.sampling.token_rule import SampleKeys
from trainer.students.registry import Student


@dataclass(frozen=True, kw_only=True)
class AncestralConfig(PlannedSampler):
    """T steps at times linspace(1, 1e-5, T + 1).

    In the step from t to s a masked token stays masked with probability p(s) / p(t), else it is
    drawn from the prediction; a known token never changes. A row whose tokens all stay as they are
    needs no forward pass, so NFE is at most T, and below it when T is large for the row.

    Attributes:
        nfe: T, the most forward passes per sample (but see ``final_argmax``).
        final_argmax: Tokens that are still masked after T steps, each with probability
            p(1e-5) / p(1) (1e-5 of the loglinear schedule, 3.2e-3 of ``square_root``), are filled
            by one more forward pass with the most probable tokens, nucleus off: the authors' noise
            removal. False: the last step goes to t = 0 and leaves none.

    Further settings as in :class:`WholeRowSampler`.
    """

    nfe: int = 128
    final_argmax: bool = True

    label: ClassVar[str] = "ancestral"

    @property
    def times(self) -> Float[Tensor, "steps1"]:
        """t_0 .. t_T, float64."""
        return ancestral_times(self.nfe, LAST_TIME if self.final_argmax else 0.0)

    def steps(
        self, student: Student, masked: Bool[Tensor, "b l"], keys: SampleKeys, first: int = 0
    ) -> tuple[Int[Tensor, "b l"], Int[Tensor, "b l"]]:
        """Steps 1..T, and T + 1 for the final fill."""
        return ancestral_order(law_of(student.settings.diffusion), masked, keys, first, self.times)


# First-hitting sampling (Zheng et al., arXiv 2409.02908), and k tokens per forward pass.


@dataclass(frozen=True, kw_only=True)
class FirstHittingConfig(PlannedSampler):
    """One uniformly chosen masked token per forward pass: exact for masked diffusion.

    NFE is the number of masked tokens. Every row of a batch has its own order; rows with fewer
    masked tokens finish earlier and leave the batch. Settings as in :class:`WholeRowSampler`.
    """

    label: ClassVar[str] = "first-hitting"

    def num_per_step(self, masked: Bool[Tensor, "b l"]) -> Int[Tensor, "b 1"] | None:
        """Tokens revealed per forward pass of each row; None is one."""
        return None

    def steps(
        self, student: Student, masked: Bool[Tensor, "b l"], keys: SampleKeys, first: int = 0
    ) -> tuple[Int[Tensor, "b l"], Int[Tensor, "b l"]]:
        """Steps 1, 2, ...; nothing is left for a final fill."""
        return uniform_order(masked, keys, first, self.num_per_step(masked))


@dataclass(frozen=True, kw_only=True)
class FixedCountConfig(FirstHittingConfig):
    """The same number of uniformly chosen masked tokens in every forward pass.

    Attributes:
        nfe: Forward passes per sample: each reveals ceil(masked / nfe) tokens.

    Further settings as in :class:`WholeRowSampler`.
    """

    nfe: int = 128

    label: ClassVar[str] = "fixed-count"

    def num_per_step(self, masked: Bool[Tensor, "b l"]) -> Int[Tensor, "b 1"]:
        """ceil(masked / nfe), at least 1."""
        total = masked.sum(dim=1, keepdim=True)
        return (-(-total // self.nfe)).clamp_min(1)
