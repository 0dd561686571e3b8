"""What noise is worth at equal entropy: curves of (entropy, NLL), read where both have a point.

Every student trades entropy for likelihood by its nucleus. A conditioned student's decode by argmax
is one point; the unconditioned one's curve is read at that point's entropy. Intervals come from
resampling the rows, the same for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from benchmarks.quality.ahead import Fills

NUM_RESAMPLES = 200


@dataclass(frozen=True)
class Gain:
    """NLL of the conditioned student minus that of the unconditioned one, at equal entropy.

    Attributes:
        value: Nats per token; below 0 the noise pays.
        interval: 95%, over rows.
        entropy: Where both were read, nats.
    """

    value: float
    interval: tuple[float, float]
    entropy: float


def read_curve(points: list[tuple[float, float]], entropy: float) -> float:
    """NLL at an entropy, linear between points (entropy, NLL); nan outside their range."""
    ordered = sorted(points)
    entropies, nlls = [x for x, _ in ordered], [y for _, y in ordered]
    return float(np.interp(entropy, entropies, nlls, left=np.nan, right=np.nan))


def gain_of_first(
    plain: Mapping[float, Fills], noisy: Mapping[float, Fills], count: int, p: float = 0.0
) -> Gain:
    """The gain over the first ``count`` tokens behind a prefix; ``p`` says how noise is decoded."""

    def at(rows: np.ndarray | slice) -> tuple[float, float]:
        entropy = noisy[p].entropy_of_first(count, rows)
        curve = [
            (fill.entropy_of_first(count, rows), fill.nll_of_first(count, rows))
            for fill in plain.values()
        ]
        return noisy[p].nll_of_first(count, rows) - read_curve(curve, entropy), entropy

    value, entropy = at(slice(None))
    if np.isnan(value):
        return Gain(value, (np.nan, np.nan), entropy)
    num_rows = len(noisy[p].nll)
    random = np.random.default_rng(0)
    draws = [at(random.integers(num_rows, size=num_rows))[0] for _ in range(NUM_RESAMPLES)]
    low, high = np.nanquantile(draws, [0.025, 0.975])
    return Gain(value, (float(low), float(high)), entropy)
