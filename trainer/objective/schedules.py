"""Noise schedules: how likely a token is masked at time t, and what its loss then weighs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from shards.errors import GdistillError
from trainer.students.configuration import DiffusionSettings

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


def law_of(settings: DiffusionSettings) -> Schedule:
    """p(t) and the weight of a masked token, as the settings name them."""
    is_rate = settings.loss_weighting == "rate"
    return RATE_SCHEDULE if is_rate else SCHEDULES[settings.schedule]


# Search for the clips of t whose loss varies least (BD3-LM, section 5: var_min).


Clips = tuple[float, float]
FULL: Clips = (1e-3, 1.0)
MAX_BATCHES = 100


def candidates() -> tuple[Clips, ...]:
    """(1e-3, 1) and, for each width w = 0.5, ..., 0.9, (max(i, 1e-3), i + w), i = 0, 0.05, ..."""
    clips = [FULL]
    for width in (50, 60, 70, 80, 90):
        clips += [(max(i / 100, 1e-3), (i + width) / 100) for i in range(0, 101 - width, 5)]
    return tuple(clips)


def clip_variance(
    block_nlls: Sequence[Float[Tensor, "_ blocks"]],
) -> float:
    """Sum over validation batches (up to 100) of the variance of a batch's block-mean NLLs.

    Each entry is one *global* batch, gathered over ranks, so the result does not depend on how
    many there are. The variance is the unbiased one over all B * nb blocks; NaN
    when a batch has a single block.
    """
    if any(nlls.numel() < 2 for nlls in block_nlls):
        return math.nan
    return float(sum(nlls.double().var() for nlls in block_nlls[:MAX_BATCHES]))


def best_clips(block_nlls: Mapping[Clips, Sequence[Float[Tensor, "_ blocks"]]]) -> Clips:
    """The clips with the smallest :func:`clip_variance`; the earlier candidate wins a tie.

    Raises:
        GdistillError: When no candidate has a finite variance.
    """
    variances = {clips: clip_variance(values) for clips, values in block_nlls.items()}
    finite = {clips: value for clips, value in variances.items() if math.isfinite(value)}
    if not finite:
        raise GdistillError(
            "the clipped-schedule search saw no finite variance",
            where="search_schedule",
            got=f"{len(variances)} candidates",
            remedy="validate on more than one block and check the validation loss",
        )
    return min(finite, key=finite.__getitem__)
