"""How varied samples are: a low perplexity with a low entropy is repetition, not quality."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

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
    grams = [
        tuple(tokens[start : start + order])
        for tokens in sequences
        for start in range(len(tokens) - order + 1)
    ]
    return len(set(grams)) / len(grams) if grams else 0.0


def entropy_score(sequences: Sequence[Sequence[int]]) -> Score:
    """Mean over samples of :func:`unigram_entropy_nats` (the authors' ``entropy`` at batch 1)."""
    values = [unigram_entropy_nats(tokens) for tokens in sequences]
    return Score(
        name="entropy_nats",
        value=float(np.mean(values)),
        num_samples=len(values),
        interval=mean_interval(values),
        details={
            "distinct_2": distinct_ngram_share(sequences, 2),
            "distinct_3": distinct_ngram_share(sequences, 3),
        },
    )
