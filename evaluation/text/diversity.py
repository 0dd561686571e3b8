"""How varied samples are: a low perplexity with a low entropy is repetition, not quality."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from evaluation.bootstrap import PerSample
from evaluation.score import Score, mean_interval


def unigram_entropy_nats(tokens: Sequence[int]) -> float:
    """Entropy in nats of the empirical token distribution of one sequence."""
    if not tokens:
        return 0.0
    _, counts = np.unique(np.asarray(tokens), return_counts=True)
    shares = counts / counts.sum()
    return abs(float((shares * np.log(shares)).sum()))


def distinct_ngram_share(sequences: Sequence[Sequence[int]], order: int) -> float:
    """Distinct n-grams over all n-grams of all sequences (distinct-n); 0 when there are none."""
    grams = [gram for tokens in sequences for gram in _ngrams(tokens, order)]
    return len(set(grams)) / len(grams) if grams else 0.0


def repetition_share(tokens: Sequence[int], order: int = 4) -> float:
    """1 - distinct n-grams / n-grams within one sequence (seq-rep-n, Welleck et al. 2020).

    0 for a sequence without an n-gram.
    """
    grams = _ngrams(tokens, order)
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def _ngrams(tokens: Sequence[int], order: int) -> list[tuple[int, ...]]:
    return [tuple(tokens[i : i + order]) for i in range(len(tokens) - order + 1)]


def entropy_score(
    sequences: Sequence[Sequence[int]], indices: Sequence[int] | None = None
) -> Score:
    """Mean over samples of :func:`unigram_entropy_nats` (the authors' ``entropy`` at batch 1).

    Beside it stand the entropy of all samples' tokens together (``pooled``, which long texts and
    many samples raise), distinct-n and the share of repeated 4-grams within a sample.

    Args:
        sequences: Token ids of each sample, in the student's own vocabulary.
        indices: Sample indices; 0, 1, ... unless told.
    """
    values = [unigram_entropy_nats(tokens) for tokens in sequences]
    pooled = [token for tokens in sequences for token in tokens]
    lengths = sorted({len(tokens) for tokens in sequences})
    return Score(
        name="entropy_nats",
        value=float(np.mean(values)),
        num_samples=len(values),
        interval=mean_interval(values),
        settings={
            "tokens_per_sample": lengths[0] if len(lengths) == 1 else f"{lengths[0]}..{lengths[-1]}"
        },
        details={
            "pooled_nats": unigram_entropy_nats(pooled),
            "distinct_1": distinct_ngram_share(sequences, 1),
            "distinct_2": distinct_ngram_share(sequences, 2),
            "distinct_3": distinct_ngram_share(sequences, 3),
            "repeated_4": float(np.mean([repetition_share(tokens) for tokens in sequences])),
        },
        cautions=("one sample has no spread",) if len(values) == 1 else (),
        per_sample=PerSample.of_mean(indices or range(len(values)), values),
    )
