"""One number with what is needed to believe it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, fmean, stdev
from typing import Any

from evaluation.bootstrap import LEVEL, PerSample

NORMAL_QUANTILE = NormalDist().inv_cdf((1 + LEVEL) / 2)


@dataclass(frozen=True)
class Score:
    """A measured value.

    Attributes:
        name: What was measured, with its unit (``entropy_nats``).
        value: The estimate.
        num_samples: How many samples it rests on.
        interval: 95% confidence interval, or None when it has no sampling error or none is known.
        settings: What the number depends on (judge, windows, aggregate, seeds).
        details: Further figures that belong to it.
        cautions: Why the number should not be trusted as it stands, one sentence each.
        per_sample: What it is made of, sample by sample; None where it is no function of that.
    """

    name: str
    value: float
    num_samples: int
    interval: tuple[float, float] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    cautions: tuple[str, ...] = ()
    per_sample: PerSample | None = None

    def to_json(self) -> dict[str, Any]:
        """The score as JSON-ready values; a non-finite value becomes null."""
        return {
            "name": self.name,
            "value": _finite(self.value),
            "num_samples": self.num_samples,
            "interval_95": [_finite(bound) for bound in self.interval] if self.interval else None,
            "settings": dict(self.settings),
            "details": {key: _finite(value) for key, value in self.details.items()},
            "cautions": list(self.cautions),
            "per_sample": self.per_sample.to_json() if self.per_sample else None,
        }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def range_text(sizes: Iterable[int]) -> str:
    """``8``, or ``3..8`` where sizes differ."""
    known = set(sizes)
    return str(min(known)) if len(known) == 1 else f"{min(known)}..{max(known)}"


def wilson_interval(num_successes: int, num_trials: int) -> tuple[float, float]:
    """95% Wilson score interval of a proportion; stays inside [0, 1] at 0 and at 1."""
    if num_trials <= 0 or not 0 <= num_successes <= num_trials:
        raise ValueError(f"need 0 <= successes <= trials > 0, got {num_successes}/{num_trials}")
    z = NORMAL_QUANTILE
    share, weight = num_successes / num_trials, z * z / num_trials
    centre = (share + weight / 2) / (1 + weight)
    half = z / (1 + weight) * math.sqrt(share * (1 - share) / num_trials + weight / num_trials / 4)
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95% normal interval of a mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    mean, half = fmean(values), NORMAL_QUANTILE * stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half
