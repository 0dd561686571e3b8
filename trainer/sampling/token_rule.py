"""From a prediction to a token: nucleus truncation and a draw, or the most probable token."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shards.base import UsageError
from shards.noise import PositionKeys
from trainer.sampling.draws import draw_tokens, position_chunks
from trainer.sampling.nucleus import NucleusRule, truncate_to_nucleus

Decision = Literal["categorical", "argmax"]
MOST_STEPS = 1 << 20
"""More steps than any row has tokens; the times of so many still fit in memory."""


@dataclass(frozen=True)
class TokenRule:
    """How revealed tokens are chosen from the student's log-probabilities.

    Attributes:
        decision: ``categorical`` draws; ``argmax`` takes the most probable token (greedy decoding
            of x_0: with noise as input the student's map is meant to be deterministic).
        nucleus_p: p of nucleus truncation, in (0, 1]; 1 is off.
        nucleus_rule: ``strict`` (the authors') or ``crossing`` (transformers').
    """

    decision: Decision = "categorical"
    nucleus_p: float = 1.0
    nucleus_rule: NucleusRule = "strict"

    @property
    def greedy(self) -> TokenRule:
        """The same rule, but taking the most probable token."""
        return replace(self, decision="argmax")

    def probabilities(self, log_probs: Float[Tensor, "n v1"]) -> Float[Tensor, "n v"]:
        """Truncated float64 probabilities of the V real tokens (the last entry is the mask's)."""
        # Normalised again: a float32 log-softmax over 50,000 tokens is off by 1e-5 or so.
        probs = log_probs[:, :-1].double().softmax(dim=-1)
        return truncate_to_nucleus(probs, self.nucleus_p, self.nucleus_rule)

    def choose(self, log_probs: Float[Tensor, "n v1"], keys: PositionKeys) -> Int[Tensor, "n"]:
        """One token for each of n positions; ``keys`` name the draws.

        A few positions at a time: the float64 copies of all would outgrow the student.
        """
        if self.decision == "argmax":
            return log_probs[:, :-1].argmax(dim=-1)
        parts = [
            draw_tokens(self.probabilities(log_probs[chunk]), keys.select(chunk))
            for chunk in position_chunks(*log_probs.shape)
        ]
        return torch.cat(parts)


def check_settings(nucleus_p: float, tau: float | None, nfe: int = 1) -> None:
    """Validate the settings that samplers share.

    Raises:
        UsageError: Naming the setting.
    """
    if nfe < 1:
        raise UsageError("too few forward passes", where="nfe", got=nfe, expected="at least 1")
    if nfe > MOST_STEPS:
        expected = f"at most {MOST_STEPS}"
        raise UsageError("too many forward passes", where="nfe", got=nfe, expected=expected)
    if tau is not None and not (tau > 0 and math.isfinite(tau)):
        raise UsageError("bad noise scale", where="tau", got=tau, expected="above 0, finite")
    if not 0 < nucleus_p <= 1:
        raise UsageError("bad nucleus p", where="nucleus_p", got=nucleus_p, expected="in (0, 1]")
