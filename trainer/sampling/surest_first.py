"""The positions of which the student is surest come first (Chang et al. 2022; Kim et al. 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Int
from torch import Tensor

from trainer.sampling.rules import Confidence, ConfidenceOrder, SampleKeys, SurestFirst
from trainer.sampling.whole_row import WholeRow, WholeRowSampler


@dataclass(frozen=True, kw_only=True)
class ConfidenceConfig(WholeRowSampler):
    """The same number of tokens in every forward pass, those that the student is surest of.

    Meant for conditioned students and ``decision=argmax``: their text is a function of the noise,
    so that an order of their choice costs no variety. Without noise it does; ``order_temperature``
    gives some back.

    Attributes:
        nfe: Forward passes per sample: each reveals ceil(masked / nfe) tokens.
        confidence: ``margin``, between the two most probable tokens, or ``probability``, of the
            chosen token.
        order_temperature: Gumbel noise on the confidence, nats, falling to 0 with the last pass.

    Further settings as in :class:`WholeRowSampler`.
    """

    nfe: int = 128
    confidence: Confidence = "margin"
    order_temperature: float = 0.0

    label: ClassVar[str] = "confidence"

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.order  # which refuses what it cannot follow

    @property
    def order(self) -> ConfidenceOrder:
        """Which positions come first."""
        return ConfidenceOrder(self.confidence, self.order_temperature)

    def reveal(
        self, predict: WholeRow, tokens: Int[Tensor, "b l"], keys: SampleKeys
    ) -> tuple[Int[Tensor, "b l"], Int[Tensor, "b"]]:
        """See :class:`WholeRowSampler`."""
        surest = SurestFirst(self.order, self.rule, keys, predict.student.mask_id)
        return surest.reveal(predict, tokens, self.nfe)
