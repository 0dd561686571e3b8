"""Differences between runs, with intervals that know which samples belong together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evaluation.bootstrap import PerSample, bootstrap_draws, percentile_interval
from evaluation.compare.recorded import RecordedScore


@dataclass(frozen=True)
class Comparison:
    """One score of one run against the baseline's.

    Attributes:
        difference: Value minus the baseline's.
        interval: 95% bootstrap interval of the difference; None where values by sample lack.
        change_percent: 100 x difference / baseline; None for a baseline of 0.
        change_interval: Its 95% interval.
        num_pairs: Samples of equal index that were resampled together; 0 if the runs were
            resampled each on its own.
    """

    difference: float
    interval: tuple[float, float] | None
    change_percent: float | None
    change_interval: tuple[float, float] | None
    num_pairs: int

    @property
    def is_clear(self) -> bool:
        """Whether the interval of the difference leaves 0 out."""
        return self.interval is not None and not self.interval[0] <= 0 <= self.interval[1]


def compare_scores(score: RecordedScore, baseline: RecordedScore, *, is_paired: bool) -> Comparison:
    """A run's score against the baseline's.

    Args:
        score: The run's.
        baseline: The baseline's.
        is_paired: Whether sample i of both belongs together (same seed, prompts or rows). Only
            indices that both have are paired, and only when they are all; else each run is
            resampled on its own.
    """
    difference = score.value - baseline.value
    change = 100 * difference / baseline.value if baseline.value else None
    ours, theirs = score.per_sample, baseline.per_sample
    if ours is None or theirs is None or min(len(ours.indices), len(theirs.indices)) < 2:
        return Comparison(difference, None, change, None, 0)
    drawn, base, num_pairs = _drawn(ours, theirs, is_paired)
    ratios = 100 * (drawn - base) / np.where(base == 0, np.nan, base)
    return Comparison(
        difference,
        percentile_interval(drawn - base),
        change,
        percentile_interval(ratios) if change is not None and np.isfinite(ratios).all() else None,
        num_pairs,
    )


def _drawn(
    ours: PerSample, theirs: PerSample, is_paired: bool
) -> tuple[np.ndarray, np.ndarray, int]:
    """Both scores in every bootstrap draw, and the number of pairs."""
    if is_paired and set(ours.indices) == set(theirs.indices):
        common = sorted(ours.indices)
        draws = bootstrap_draws(len(common))
        one, other = (part.select(common).resampled(draws) for part in (ours, theirs))
        return one, other, len(common)
    return (
        ours.resampled(bootstrap_draws(len(ours.indices), seed=1)),
        theirs.resampled(bootstrap_draws(len(theirs.indices), seed=2)),
        0,
    )
