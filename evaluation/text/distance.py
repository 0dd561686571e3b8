"""How far a set of samples is from text: distances between distributions, which no trick wins.

A perplexity falls when a sampler repeats itself, an entropy rises when it draws at random; both can
be bought. A distance between the distributions of samples and of text cannot: it is least where the
two are alike. Every score is given with its **floor**, what as many rows of the text itself score
against the same reference, and with an interval over samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from evaluation.score import NORMAL_QUANTILE
from shards.errors import UsageError

MIN_SAMPLES = 128
"""Below it a floor is as large as the differences between students."""
ORDERS, BUCKETS = (1, 2, 3), 2048
"""Of the n-grams that the energy distance counts, and the places that each order is hashed to."""
NUM_GROUPS = 20
"""Of the jackknife."""
MEMORISED_ORDER, BEGINNING_TOKENS = 16, 8

Vectors = Float[np.ndarray, "n d"]
Rows = Sequence[Sequence[int]]


def require_enough(num_samples: int, where: object) -> None:
    """Refuse sets too small for a distance to say anything.

    Raises:
        UsageError: Below :data:`MIN_SAMPLES`.
    """
    if num_samples < MIN_SAMPLES:
        raise UsageError(
            "too few samples for a distance between distributions",
            where=where,
            got=num_samples,
            expected=f"at least {MIN_SAMPLES}",
            remedy=f"gdistill-sample --num {4 * MIN_SAMPLES}",
        )


def frechet_distance(x: Vectors, y: Float[np.ndarray, "m d"]) -> float:
    """Squared Fréchet distance of the Gaussians fitted to x and y (Dowson and Landau 1982).

    |mean_x - mean_y|^2 + tr(C_x + C_y - 2 (C_x C_y)^(1/2)); of language models' states de Masson
    d'Autume et al. 2019, of pictures' FID. Few rows bias it upward: compare equal numbers.

    Raises:
        UsageError: With fewer than two rows, which have no covariance.
    """
    if min(len(x), len(y)) < 2:
        raise UsageError(
            "a covariance needs two", where="samples", got=f"{len(x)} and {len(y)} rows"
        )
    first, second = (np.atleast_2d(np.cov(rows, rowvar=False)) for rows in (x, y))
    values, vectors = np.linalg.eigh(first)
    root = vectors * np.sqrt(values.clip(min=0)) @ vectors.T
    # The trace of (C_x C_y)^(1/2) by the eigenvalues of a symmetric matrix that has the same.
    common = np.sqrt(np.linalg.eigvalsh(root @ second @ root).clip(min=0)).sum()
    apart = ((x.mean(axis=0) - y.mean(axis=0)) ** 2).sum()
    return float(apart + np.trace(first) + np.trace(second) - 2 * common)


def energy_distance(x: Vectors, y: Float[np.ndarray, "m d"]) -> float:
    """2 E|X - Y| - E|X - X'| - E|Y - Y'|, unbiased (Székely and Rizzo 2013); 0 for one law.

    With :func:`ngram_vectors` it needs no model. Its estimate may fall below 0 by chance.

    Raises:
        UsageError: With fewer than two rows on a side.
    """
    if min(len(x), len(y)) < 2:
        raise UsageError("a spread needs two", where="samples", got=f"{len(x)} and {len(y)} rows")

    def within(rows: Vectors) -> float:
        return float(_distances(rows, rows).sum()) / (len(rows) * (len(rows) - 1))

    return 2 * float(_distances(x, y).mean()) - within(x) - within(y)


def _distances(x: Vectors, y: Float[np.ndarray, "m d"]) -> Float[np.ndarray, "n m"]:
    squares = (x**2).sum(1)[:, None] + (y**2).sum(1) - 2 * (x @ y.T)
    found = np.sqrt(squares.clip(min=0))
    if x is y:
        np.fill_diagonal(found, 0.0)
    return found


def ngram_vectors(rows: Rows) -> Float[np.ndarray, "n d"]:
    """Square roots of the shares of hashed 1-, 2- and 3-grams of each row; unit length each order.

    Distances between them are Hellinger's between the rows' n-gram frequencies, up to collisions.
    """
    found = np.zeros((len(rows), len(ORDERS), BUCKETS))
    for place, row in enumerate(rows):
        tokens = np.asarray(row, dtype=np.uint64)
        for number, order in enumerate(ORDERS):
            count = len(tokens) - order + 1
            if count < 1:
                continue
            code = np.full(count, order, dtype=np.uint64)
            for offset in range(order):
                # Knuth's multiplicative step; uint64 wraps round, which is what a hash wants.
                code = (code ^ tokens[offset : offset + count]) * np.uint64(0x9E3779B97F4A7C15)
                code ^= code >> np.uint64(29)
            buckets = (code % np.uint64(BUCKETS)).astype(np.int64)
            found[place, number] = np.sqrt(np.bincount(buckets, minlength=BUCKETS) / count)
    return found.reshape(len(rows), -1)


def typicality_gap(
    x: Vectors, fitted: Float[np.ndarray, "m d"], typical: Float[np.ndarray, "k d"]
) -> float:
    """How unlike text the samples' mean Mahalanobis distance is: |E d(x) / E d(typical) - 1|.

    d is the distance from the Gaussian fitted to ``fitted``; ``typical`` are further rows of text,
    whose distance is what text has. Repetitive samples lie too near, random ones too far.
    """
    mean, covariance = fitted.mean(0), np.atleast_2d(np.cov(fitted, rowvar=False))
    covariance += np.eye(len(covariance)) * 1e-3 * np.trace(covariance) / len(covariance)
    inverse = np.linalg.inv(covariance)

    def mahalanobis(rows: Vectors) -> float:
        apart = rows - mean
        return float(np.sqrt(np.einsum("nd,de,ne->n", apart, inverse, apart)).mean())

    return abs(mahalanobis(x) / mahalanobis(typical) - 1)


def distinct_beginnings(rows: Rows) -> float:
    """Share of rows whose first eight tokens behind the given one no earlier row has."""
    return len({tuple(row[1 : 1 + BEGINNING_TOKENS]) for row in rows}) / len(rows)


def memorised_share(rows: Rows, training: Int[np.ndarray, "n l"]) -> float:
    """Share of the rows' 16-grams that stand in the training rows."""

    def grams(row: Any) -> list[bytes]:
        width = MEMORISED_ORDER
        tokens = np.asarray(row, dtype=np.int32)
        return [tokens[i : i + width].tobytes() for i in range(len(tokens) - width + 1)]

    wanted = [gram for row in rows for gram in grams(row)]
    known = set(wanted)
    seen = {gram for row in training for gram in grams(row) if gram in known}
    return sum(gram in seen for gram in wanted) / max(1, len(wanted))


@dataclass(frozen=True)
class Estimate:
    """A distance with its 95% interval over samples."""

    value: float
    low: float
    high: float


def jackknife(statistic: Callable[[Vectors], float], x: Vectors) -> Estimate:
    """A statistic of all rows, and its interval by deleting each of 20 groups of them.

    A bootstrap would draw rows twice, which these distances take for less variety.
    """
    value = statistic(x)
    groups = np.arange(len(x)) % NUM_GROUPS
    without = np.array([statistic(x[groups != group]) for group in range(NUM_GROUPS)])
    spread = np.sqrt((NUM_GROUPS - 1) / NUM_GROUPS * ((without - without.mean()) ** 2).sum())
    half = NORMAL_QUANTILE * float(spread)
    return Estimate(value, value - half, value + half)


def naive_samples(
    text: Int[np.ndarray, "n l"], num: int, seed: int = 0
) -> dict[str, Int[np.ndarray, "k l"]]:
    """Samplers without a parameter that win perplexity or entropy: what a score must put last.

    Returns:
        Name -> rows: a row's first eight tokens again and again; tokens drawn by frequency; the
        most frequent 4-grams one after the other; the tokens of whole rows in another order.
    """
    generator = np.random.default_rng(seed)
    length = text.shape[1]
    rows = text[generator.integers(len(text), size=num)]
    tokens, counts = np.unique(text, return_counts=True)
    grams, uses = np.unique(
        np.lib.stride_tricks.sliding_window_view(text, 4, axis=1).reshape(-1, 4),
        axis=0,
        return_counts=True,
    )
    frequent = grams[np.argsort(-uses, kind="stable")[:64]]
    picked = frequent[generator.integers(len(frequent), size=(num, -(-length // 4)))]
    return {
        "periodic text": np.tile(rows[:, :8], -(-length // 8))[:, :length],
        "unigram draws": generator.choice(tokens, size=(num, length), p=counts / counts.sum()),
        "frequent 4-grams": picked.reshape(num, -1)[:, :length],
        "shuffled rows": generator.permuted(rows, axis=1),
    }
