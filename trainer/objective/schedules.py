"""Noise schedules: how likely a token is masked at time t, and what its loss then weighs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

RATE_EPS = 1e-3


@dataclass(frozen=True)
class Schedule:
    """Masking probability p(t) and the weight p'(t) / p(t) of a masked token's NLL."""

    masking_probability: Callable[[Tensor], Tensor]
    loss_weight: Callable[[Tensor], Tensor]


def _power(exponent: float) -> Schedule:
    def probability(t: Tensor) -> Tensor:
        return t.pow(exponent).clamp_min(1e-3)

    def weight(t: Tensor) -> Tensor:
        return exponent * t.pow(exponent - 1) / probability(t)

    return Schedule(probability, weight)


def _cosine_probability(t: Tensor) -> Tensor:
    return 1 - (1 - 1e-3) * torch.cos(t * math.pi / 2)


def _cosine_weight(t: Tensor) -> Tensor:
    slope = (1 - 1e-3) * torch.sin(t * math.pi / 2) * math.pi / 2
    return slope / (_cosine_probability(t) + 1e-3)


def _log_probability(t: Tensor) -> Tensor:
    return torch.log1p(t) / math.log(2.0)


SCHEDULES: dict[str, Schedule] = {
    "loglinear": Schedule(lambda t: t, lambda t: 1 / t),
    "square": _power(2.0),
    "square_root": _power(0.5),
    "log": Schedule(
        _log_probability, lambda t: 1 / (_log_probability(t) * math.log(2.0) * (1 + t))
    ),
    "cosine": Schedule(_cosine_probability, _cosine_weight),
}


def total_noise(t: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """sigma(t) = -log(1 - (1 - 1e-3) t), the older MDLM's loglinear noise."""
    return -torch.log1p(-(1 - RATE_EPS) * t)


def rate_noise(t: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """d sigma / dt."""
    return (1 - RATE_EPS) / (1 - (1 - RATE_EPS) * t)


RATE_SCHEDULE = Schedule(
    lambda t: -torch.expm1(-total_noise(t)), lambda t: rate_noise(t) / torch.expm1(total_noise(t))
)
SIGMA_MAX = float(total_noise(torch.tensor(1.0)))


def masking_sigma(p: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
    """sigma = min(-log(1 - p), sigma_max), what a time-conditioned backbone is told.

    Not log1p: it differs from the authors' value by up to 1e-3 of sigma at small p, and a trained
    student should see the number that it was trained on.
    """
    return (-torch.log(1 - p)).clamp_max(SIGMA_MAX)
