"""Perplexity at one entropy, interpolated over a sweep.

A sampler trades entropy for perplexity: a smaller nucleus or a lower temperature makes any model
look better. So models are compared where their entropies are equal: log perplexity is taken as a
piecewise linear function of entropy through the points of a sweep and read off at H.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from evaluation.bootstrap import NUM_BOOTSTRAP, bootstrap_draws, percentile_interval


@dataclass(frozen=True)
class CurvePoint:
    """n samples drawn with one setting of a sweep.

    Attributes:
        nll_nats: Nats of each sample under the judge, summed over its counted tokens.
        num_tokens: Counted tokens of each sample.
        entropies_nats: Unigram entropy of each sample in the student's own tokens.
    """

    nll_nats: Float[np.ndarray, "n"]
    num_tokens: Float[np.ndarray, "n"]
    entropies_nats: Float[np.ndarray, "n"]

    @property
    def log_perplexity(self) -> float:
        """Of all samples together: sum of nats / sum of tokens."""
        return float(self.nll_nats.sum() / self.num_tokens.sum())

    @property
    def entropy_nats(self) -> float:
        """Mean over samples."""
        return float(self.entropies_nats.mean())


@dataclass(frozen=True)
class MatchedValue:
    """What a curve says at an entropy.

    Attributes:
        perplexity: At ``entropy_nats``.
        interval: 95% bootstrap interval over samples; None for single samples.
        entropy_nats: H where the sweep reaches it, else that of the point nearest to H.
        is_reached: Whether H lies between the points of the sweep.
        share_reached: Share of bootstrap draws in which it does; the others were extrapolated.
    """

    perplexity: float
    interval: tuple[float, float] | None
    entropy_nats: float
    is_reached: bool
    share_reached: float


def matched_perplexity(
    points: Sequence[CurvePoint],
    entropy_nats: float,
    *,
    is_paired: bool,
    num_draws: int = NUM_BOOTSTRAP,
    seed: int = 0,
) -> MatchedValue:
    """Perplexity of a sweep at entropy H.

    Args:
        points: One per setting of the sweep, in any order.
        entropy_nats: H.
        is_paired: Whether sample i of every point comes from the same seed and index: then one
            draw of samples is used for all points, as the points are correlated.
        num_draws: Bootstrap draws.
        seed: Of the bootstrap.

    Raises:
        ValueError: Without a point, or for paired points of different sizes.
    """
    sizes = {len(point.nll_nats) for point in points}
    if not points or (is_paired and len(sizes) > 1):
        raise ValueError(f"need points, paired ones of one size; got sizes {sorted(sizes)}")
    entropies = np.array([[point.entropy_nats for point in points]])
    values = np.array([[point.log_perplexity for point in points]])
    is_reached = bool(entropies.min() <= entropy_nats <= entropies.max())
    nearest = int(np.abs(entropies[0] - entropy_nats).argmin())
    own = entropy_nats if is_reached else float(entropies[0, nearest])
    drawn_entropies, drawn_values = _resampled(points, is_paired, num_draws, seed)
    if is_reached:
        value = interpolate(entropies, values, own)[0]
        drawn = interpolate(drawn_entropies, drawn_values, own)
    else:
        value, drawn = values[0, nearest], drawn_values[:, nearest]
    inside = (drawn_entropies.min(1) <= entropy_nats) & (entropy_nats <= drawn_entropies.max(1))
    low, high = percentile_interval(np.exp(drawn))
    return MatchedValue(
        perplexity=float(np.exp(value)),
        interval=(low, high) if min(sizes) > 1 else None,
        entropy_nats=own,
        is_reached=is_reached,
        share_reached=float(inside.mean()),
    )


def interpolate(
    entropies: Float[np.ndarray, "b k"], values: Float[np.ndarray, "b k"], entropy_nats: float
) -> Float[np.ndarray, "b"]:
    """Piecewise linear ``values`` at H for each of B curves; beyond an end, its segment goes on."""
    order = entropies.argsort(1, kind="stable")
    x, y = np.take_along_axis(entropies, order, 1), np.take_along_axis(values, order, 1)
    if x.shape[1] == 1:
        return y[:, 0]
    right = np.clip((x < entropy_nats).sum(1), 1, x.shape[1] - 1)
    rows = np.arange(len(x))
    x0, x1, y0, y1 = x[rows, right - 1], x[rows, right], y[rows, right - 1], y[rows, right]
    width = x1 - x0
    share = np.divide(entropy_nats - x0, width, out=np.full(len(x), 0.5), where=width > 0)
    return y0 + share * (y1 - y0)


def _resampled(
    points: Sequence[CurvePoint], is_paired: bool, num_draws: int, seed: int
) -> tuple[Float[np.ndarray, "b k"], Float[np.ndarray, "b k"]]:
    """Entropy and log perplexity of every point in every bootstrap draw."""
    entropies, values = [], []
    for number, point in enumerate(points):
        own_seed = seed if is_paired else seed + number
        draws = bootstrap_draws(len(point.nll_nats), num_draws, own_seed)
        entropies.append(point.entropies_nats[draws].mean(1))
        values.append(point.nll_nats[draws].sum(1) / point.num_tokens[draws].sum(1))
    return np.stack(entropies, 1), np.stack(values, 1)
