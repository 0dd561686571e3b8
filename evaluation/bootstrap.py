"""Numbers as functions of samples, and what they would be with other samples drawn.

Almost every score here is ``link(sum of numerators / sum of denominators)``: a mean has
denominators of 1, a corpus perplexity is exp(nats / tokens). Kept that way it can be resampled
(Efron 1979), alone or against another run's samples of the same indices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

NUM_BOOTSTRAP = 2000
LEVEL = 0.95


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
        ratio = np.array(self.numerators)[draws].sum(1) / np.array(self.denominators)[draws].sum(1)
        return np.exp(ratio) if self.is_exponential else ratio

    def interval(self) -> tuple[float, float] | None:
        """95% percentile bootstrap interval over samples; None for a single one."""
        if len(self.indices) < 2:
            return None
        return percentile_interval(self.resampled(bootstrap_draws(len(self.indices))))

    def select(self, indices: Sequence[int]) -> PerSample:
        """The entries of some sample indices, in that order."""
        place = {index: number for number, index in enumerate(self.indices)}
        chosen = [place[index] for index in indices]
        return PerSample(
            tuple(indices),
            tuple(self.numerators[number] for number in chosen),
            tuple(self.denominators[number] for number in chosen),
            self.is_exponential,
        )

    def to_json(self) -> dict[str, Any]:
        """JSON-ready; :meth:`from_json` reads it."""
        return {
            "indices": list(self.indices),
            "numerators": list(self.numerators),
            "denominators": list(self.denominators),
            "is_exponential": self.is_exponential,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> PerSample:
        """What :meth:`to_json` wrote.

        Raises:
            ValueError: For lists of unequal length, entries that are no finite numbers, negative
                denominators or an index that stands there twice.
        """
        columns = [list(value[name]) for name in ("indices", "numerators", "denominators")]
        if not columns[0] or len({len(column) for column in columns}) > 1:
            raise ValueError("no entries, or columns of unequal length")
        is_finite = np.isfinite(np.array(columns[1:], dtype=float)).all()
        if not is_finite or min(columns[2]) < 0 or sum(columns[2]) <= 0:
            raise ValueError("entries that are no finite numbers")
        indices = tuple(columns[0])
        if any(type(index) is not int for index in indices) or len(set(indices)) < len(indices):
            raise ValueError("sample indices that are no whole numbers, or stand there twice")
        numbers = (tuple(map(float, column)) for column in columns[1:])
        return cls(indices, *numbers, is_exponential=bool(value["is_exponential"]))


def bootstrap_draws(
    num_samples: int, num_draws: int = NUM_BOOTSTRAP, seed: int = 0
) -> Int[np.ndarray, "b n"]:
    """Places of ``num_draws`` sets of samples drawn with replacement; a function of its inputs."""
    return np.random.default_rng(seed).integers(num_samples, size=(num_draws, num_samples))


def percentile_interval(values: Float[np.ndarray, "b"]) -> tuple[float, float]:
    """The central 95% of bootstrap values."""
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
