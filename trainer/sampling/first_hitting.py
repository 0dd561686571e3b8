"""First-hitting sampling (Zheng et al., arXiv 2409.02908), and k tokens per forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Bool, Int
from torch import Tensor

from trainer.sampling.rules import SampleKeys, uniform_order
from trainer.sampling.whole_row import PlannedSampler
from trainer.students import Student


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
