"""One number with what is needed to believe it, and what it would be with other samples drawn.

Almost every score here is ``link(sum of numerators / sum of denominators)``: a mean has
denominators of 1, a corpus perplexity is exp(nats / tokens). Kept that way it can be resampled
(Efron 1979), alone or against another run's samples of the same indices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import NormalDist, fmean, stdev
from typing import Any

import numpy as np
from jaxtyping import Float, Int

NUM_BOOTSTRAP = 2000
MOST_DRAWN = 1 << 24
"""Samples that are drawn at a time: of a split of a million rows all draws would take 48 GB."""
LEVEL = 0.95
NORMAL_QUANTILE = NormalDist().inv_cdf((1 + LEVEL) / 2)


@dataclass(frozen=True)
class PerSample:
    """A score, sample by sample.

    Attributes:
        indices: Sample index of each entry: what samples of two runs are paired by.
        numerators: One per sample.
        denominators: One per sample, not all 0.
        is_exponential: Whether the score is exp of the ratio (a perplexity) or the ratio itself.
    """

    indices: tuple[int, ...]
    numerators: tuple[float, ...]
    denominators: tuple[float, ...]
    is_exponential: bool = False

    @classmethod
    def of_mean(cls, indices: Iterable[int], values: Iterable[float]) -> PerSample:
        """The mean of one value per sample."""
        kept = tuple(float(value) for value in values)
        return cls(tuple(indices), kept, (1.0,) * len(kept))

    def value(self) -> float:
        """The score of all samples."""
        return float(self.resampled(np.arange(len(self.indices))[None])[0])

    def resampled(self, draws: Int[np.ndarray, "b n"]) -> Float[np.ndarray, "b"]:
        """The score of B other sets of samples, given by their places in ``indices``."""
        with np.errstate(invalid="ignore"):  # sets whose samples all have a denominator of 0 have no score
            ratio = np.array(self.numerators)[draws].sum(1) / np.array(self.denominators)[draws].sum(1)
        return np.exp(ratio) if self.is_exponential else ratio

    def interval(self) -> tuple[float, float] | None:
        """95% percentile bootstrap interval over samples; None for a single one."""
        if len(self.indices) < 2:
            return None
        # With replacement, NUM_BOOTSTRAP times: a function of the number of samples alone.
        generator, num = np.random.default_rng(0), len(self.indices)
        sizes = [len(part) for part in np.array_split(range(NUM_BOOTSTRAP), 1 + NUM_BOOTSTRAP * num // MOST_DRAWN)]
        found = [self.resampled(generator.integers(num, size=(size, num))) for size in sizes]
        low, high = np.nanquantile(np.concatenate(found), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return float(low), float(high)

    def select(self, indices: Sequence[int]) -> PerSample:
        """The entries of some sample indices, in that order."""
        entries = dict(zip(self.indices, zip(self.numerators, self.denominators, strict=True), strict=True))
        columns = zip(*(entries[index] for index in indices), strict=True)
        return PerSample(tuple(indices), *columns, is_exponential=self.is_exponential)


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

    @classmethod
    def of(cls, name: str, per_sample: PerSample, **further: Any) -> Score:
        """A score that is a function of its samples: value, number and interval are theirs."""
        value, interval = per_sample.value(), per_sample.interval()
        num = len(per_sample.indices)
        return cls(name, value, num, interval, per_sample=per_sample, **further)

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
            "per_sample": asdict(self.per_sample) if self.per_sample else None,
        }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def range_text(sizes: Iterable[int]) -> str:
    """``8``, or ``3..8`` where sizes differ."""
    known = set(sizes)
    return str(min(known)) if len(known) == 1 else f"{min(known)}..{max(known)}"


def wilson_interval(num_successes: int, num_trials: int) -> tuple[float, float]:
    """95% Wilson score interval of a proportion; stays inside [0, 1] at 0 and at 1."""
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
