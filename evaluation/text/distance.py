"""How far a set of samples is from text, and how varied it is.

A perplexity falls when a sampler repeats itself, an entropy rises when it draws at random; both can
be bought. A distance between the distributions of samples and of text cannot: it is least where the
two are alike. Rows are sequences of token ids (or of words, each as a number); nothing here reads a
model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from evaluation.score import NORMAL_QUANTILE, PerSample, Score, mean_interval, range_text
from shards.errors import UsageError

MIN_SAMPLES = 128
"""Below it a floor is as large as the differences between students: the scores say nothing."""
RANKING = ("frechet_distance", "energy_distance", "gradient_moment", "typicality_gap", "mauve")
"""Scores that no sampler without a parameter wins (``gdistill-eval check-scores``)."""
ORDERS, BUCKETS = (1, 2, 3), 2048
"""Of the n-grams that the energy distance counts, and the places that each order is hashed to."""
NUM_GROUPS = 20
"""Of the jackknife."""
ROWS_AT_ONCE = 512
"""Whose distances from all others are held."""
MEMORISED_ORDER, BEGINNING_TOKENS = 16, 8

Vectors = Float[np.ndarray, "n d"]
Rows = Sequence[Sequence[int]] | Int[np.ndarray, "_ _"]


MORE_SAMPLES = f"gdistill-sample --num {4 * MIN_SAMPLES}, or score without --reference"


def require_enough(num: int, where: object, least: int = MIN_SAMPLES, remedy: str = MORE_SAMPLES) -> None:
    """Refuse sets too small for a distance to say anything.

    Raises:
        UsageError: Below ``least``.
    """
    if num < least:
        what = "too few samples for MAUVE and for distances between distributions"
        raise UsageError(what, where=where, got=num, expected=f"at least {least}", remedy=remedy)


@dataclass(frozen=True)
class Estimate:
    """A score with its 95% interval over samples."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


def jackknife(statistic: Callable[[Int[np.ndarray, "k"]], float], num: int) -> Estimate:
    """A statistic of rows 0..num - 1, and its interval by deleting each of 20 groups of them.

    A bootstrap would draw rows twice, which these distances take for less variety.

    Args:
        statistic: Given the places of the rows that it is to look at.
        num: Rows.
    """
    places = np.arange(num)
    without = np.array([statistic(places[places % NUM_GROUPS != g]) for g in range(NUM_GROUPS)])
    spread = np.sqrt((NUM_GROUPS - 1) / NUM_GROUPS * ((without - without.mean()) ** 2).sum())
    value, half = float(statistic(places)), NORMAL_QUANTILE * float(spread)
    return Estimate(value, value - half, value + half)


def _require_pairs(x: Vectors, y: Float[np.ndarray, "m d"]) -> None:
    if min(len(x), len(y)) < 2:
        raise UsageError("a spread needs two rows", where="samples", got=f"{len(x)}, {len(y)} rows")


def frechet_distance(x: Vectors, y: Float[np.ndarray, "m d"]) -> float:
    """Squared Fréchet distance of the Gaussians fitted to x and y (Dowson and Landau 1982).

    |mean_x - mean_y|^2 + tr(C_x + C_y - 2 (C_x C_y)^(1/2)); of language models' states de Masson
    d'Autume et al. 2019, of pictures' FID. Few rows bias it upward: compare equal numbers.

    Raises:
        UsageError: With fewer than two rows, which have no covariance.
    """
    _require_pairs(x, y)
    first, second = (np.atleast_2d(np.cov(rows, rowvar=False)) for rows in (x, y))
    values, vectors = np.linalg.eigh(first)
    root = vectors * np.sqrt(values.clip(min=0)) @ vectors.T
    # The trace of (C_x C_y)^(1/2) by the eigenvalues of a symmetric matrix that has the same.
    common = np.sqrt(np.linalg.eigvalsh(root @ second @ root).clip(min=0)).sum()
    apart = ((x.mean(axis=0) - y.mean(axis=0)) ** 2).sum()
    return float(apart + np.trace(first) + np.trace(second) - 2 * common)


def energy_distance(x: Vectors, y: Float[np.ndarray, "m d"]) -> Estimate:
    """2 E|X - Y| - E|X - X'| - E|Y - Y'|, unbiased (Székely and Rizzo 2013); 0 for one law.

    With :func:`ngram_vectors` it needs no model. Its estimate may fall below 0 by chance. The
    interval is a jackknife over x, made from one table of distances.

    Raises:
        UsageError: With fewer than two rows on a side.
    """
    _require_pairs(x, y)
    across, within = distance_sums(x, y).sum(1) / len(y), distance_sums(x, x)
    theirs = distance_sums(y, y).sum() / (len(y) * (len(y) - 1))

    def of_some(kept: Int[np.ndarray, "k"]) -> float:
        pairs = within[np.ix_(kept, np.unique(kept % NUM_GROUPS))].sum() / max(1, len(kept) * (len(kept) - 1))
        return 2 * across[kept].mean() - pairs - theirs

    return jackknife(of_some, len(x))


def distance_sums(x: Vectors, y: Float[np.ndarray, "m d"]) -> Float[np.ndarray, "n g"]:
    """Of each row of x the distances from y, summed over the rows of each group: no [n, m] is held."""
    groups, found = np.eye(NUM_GROUPS)[np.arange(len(y)) % NUM_GROUPS], []
    lengths, others = (np.einsum("nd,nd->n", rows, rows) for rows in (x, y))
    for start in range(0, len(x), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        squares = lengths[part, None] + others - 2 * (x[part] @ y.T)
        if x is y:
            np.fill_diagonal(squares[:, part], 0.0)  # not by rounding alone
        found.append(np.sqrt(squares.clip(min=0)) @ groups)
    return np.concatenate(found)


def typicality_gap(x: Vectors, fitted: Float[np.ndarray, "m d"], typical: Float[np.ndarray, "k d"]) -> Estimate:
    """How unlike text the samples' mean Mahalanobis distance is: |E d(x) / E d(typical) - 1|.

    d is the distance from the Gaussian fitted to ``fitted``, with a ridge of 1e-3 of its mean
    variance; ``typical`` are further rows of text, whose distance is what text has. Repetitive
    samples lie too near, random ones too far.
    """
    mean, covariance = fitted.mean(0), np.atleast_2d(np.cov(fitted, rowvar=False))
    covariance += np.eye(len(covariance)) * 1e-3 * np.trace(covariance) / len(covariance)
    inverse = np.linalg.inv(covariance)
    ours, theirs = (
        np.sqrt(np.einsum("nd,de,ne->n", rows - mean, inverse, rows - mean, optimize=True)) for rows in (x, typical)
    )
    return jackknife(lambda kept: abs(ours[kept].mean() / theirs.mean() - 1), len(x))


def gradient_moment(x: Vectors, y: Float[np.ndarray, "m d"]) -> Estimate:
    """|E x - E y|^2 in units of the variance of y, unbiased; 0 for one law.

    Of gradients of a judge's surprise: where samples are as surprising as text, and for the same
    reasons, the judge would learn nothing more from them. Repetition, which only lowers surprise,
    pulls at the judge as hard as noise does.

    Raises:
        UsageError: With fewer than two rows on a side.
    """
    _require_pairs(x, y)
    scale = y.var(0, ddof=1).sum()

    def of_some(kept: Int[np.ndarray, "k"]) -> float:
        own = x[kept]
        apart = ((own.mean(0) - y.mean(0)) ** 2).sum() - scale / len(y)
        return float((apart - own.var(0, ddof=1).sum() / len(own)) / scale)

    return jackknife(of_some, len(x))


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


# Variety: shown beside every distance, but each is won by a sampler without a parameter.


def unigram_entropy_nats(tokens: Sequence[int]) -> float:
    """Entropy in nats of the empirical token distribution of one sequence."""
    if not len(tokens):
        return 0.0
    _, counts = np.unique(np.asarray(tokens), return_counts=True)
    shares = counts / counts.sum()
    return abs(float((shares * np.log(shares)).sum()))


def distinct_ngram_share(sequences: Rows, order: int) -> float:
    """Distinct n-grams over all n-grams of all sequences (distinct-n); 0 when there are none."""
    grams = [tuple(row[i : i + order]) for row in sequences for i in range(len(row) - order + 1)]
    return len(set(grams)) / len(grams) if grams else 0.0


def repetition_share(tokens: Sequence[int], order: int = 4) -> float:
    """1 - distinct n-grams / n-grams within one sequence (seq-rep-n, Welleck et al. 2020).

    0 for a sequence without an n-gram.
    """
    return 1 - distinct_ngram_share([tokens], order) if len(tokens) >= order else 0.0


def distinct_beginnings(rows: Rows) -> float:
    """Share of rows whose first eight tokens behind the given one no earlier row has."""
    return len({tuple(row[1 : 1 + BEGINNING_TOKENS]) for row in rows}) / len(rows)


def memorised_counts(rows: Rows, training: Rows) -> Int[np.ndarray, "n 2"]:
    """Of each row: how many of its 16-grams stand in the training rows, and how many it has."""

    def grams(row: Any) -> list[bytes]:
        data, size = np.asarray(row, dtype=np.int64).tobytes(), 8 * MEMORISED_ORDER
        return [data[i : i + size] for i in range(0, len(data) - size + 1, 8)]

    ours = [grams(row) for row in rows]
    wanted = {gram for row in ours for gram in row}
    seen = {gram for row in training for gram in grams(row) if gram in wanted}
    return np.array([[sum(gram in seen for gram in row), len(row)] for row in ours])


def entropy_score(sequences: Rows, indices: Sequence[int] | None = None) -> Score:
    """Mean over samples of :func:`unigram_entropy_nats` (the authors' ``entropy`` at batch 1).

    Beside it stand the entropy of all samples' tokens together (``pooled``, which long texts and
    many samples raise), distinct-n and the share of repeated 4-grams within a sample.

    Args:
        sequences: Token ids of each sample, in the student's own vocabulary.
        indices: Sample indices; 0, 1, ... unless given.
    """
    values = [unigram_entropy_nats(tokens) for tokens in sequences]
    return Score(
        name="entropy_nats",
        value=float(np.mean(values)),
        num_samples=len(values),
        interval=mean_interval(values),
        settings={"tokens_per_sample": range_text(map(len, sequences))},
        details={
            "pooled_nats": unigram_entropy_nats([t for tokens in sequences for t in tokens]),
            **{f"distinct_{order}": distinct_ngram_share(sequences, order) for order in ORDERS},
            "repeated_4": float(np.mean([repetition_share(tokens) for tokens in sequences])),
        },
        cautions=("one sample has no spread",) if len(values) == 1 else (),
        per_sample=PerSample.of_mean(indices or range(len(values)), values),
    )


def naive_samples(text: Int[np.ndarray, "n l"], num: int, seed: int = 0) -> dict[str, Int[np.ndarray, "k l"]]:
    """Samplers without a parameter that win perplexity or entropy: what a score must put last.

    Returns:
        Name -> rows: a row's first eight tokens again and again; tokens drawn by frequency; the
        most frequent 4-grams one after the other; the tokens of whole rows in another order.
    """
    generator, length = np.random.default_rng(seed), text.shape[1]
    rows = text[generator.integers(len(text), size=num)]
    tokens, counts = np.unique(text, return_counts=True)
    windows = np.lib.stride_tricks.sliding_window_view(text, 4, axis=1).reshape(-1, 4)
    grams, uses = np.unique(windows, axis=0, return_counts=True)
    frequent = grams[np.argsort(-uses, kind="stable")[:64]]
    picked = frequent[generator.integers(len(frequent), size=(num, -(-length // 4)))]
    return {
        "periodic text": np.tile(rows[:, :8], -(-length // 8))[:, :length],
        "unigram draws": generator.choice(tokens, size=(num, length), p=counts / counts.sum()),
        "frequent 4-grams": picked.reshape(num, -1)[:, :length],
        "shuffled rows": generator.permuted(rows, axis=1),
    }
