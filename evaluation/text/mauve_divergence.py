"""MAUVE between samples and reference text, with its spread over k-means seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from evaluation.score import Score
from evaluation.text.judge import JudgeModel
from evaluation.text.mauve_features import TextFeatures
from shards.base import UsageError

MIN_TEXTS = 20
"""Below this k-means has a single pair of clusters and the number says nothing."""
FEW_TEXTS = 1000
PUBLISHED_TEXTS = 5000
LENGTH_RATIO = 1.25
"""Mean lengths that differ by more are named: the model's last state tells a text's length."""
SEEDS = (25, 26, 27, 28, 29)
"""Of the k-means; 25 is mauve-text's own."""


def check_counts(num_samples: int, num_references: int, where: object = "") -> None:
    """Refuse fewer than 20 texts on a side; ``where`` names the samples.

    Raises:
        UsageError: With both counts.
    """
    if min(num_samples, num_references) < MIN_TEXTS:
        raise UsageError(
            "too few texts for MAUVE",
            where=where,
            got=f"{num_samples} samples, {num_references} references",
            expected=f"at least {MIN_TEXTS} a side, {PUBLISHED_TEXTS} as in published numbers",
            remedy="sample more, or score without --reference",
        )


def mauve_score(
    judge: JudgeModel,
    samples: TextFeatures,
    references: TextFeatures,
    *,
    max_tokens: int,
    seeds: Sequence[int] = SEEDS,
) -> Score:
    """MAUVE (Pillutla et al. 2021) through mauve-text, averaged over k-means seeds.

    The published setting is 5,000 texts a side with gpt2-large features; fewer texts bias the
    score upward, so both counts are part of the result.

    Args:
        judge: The model the features are of.
        samples: Features of the samples.
        references: Features of texts of the real distribution, by the same judge and limit.
        max_tokens: The limit the texts were truncated to.
        seeds: Of the k-means.

    Raises:
        UsageError: With fewer than 20 texts on a side.
    """
    check_counts(len(samples.values), len(references.values))
    import mauve

    results: list[Any] = [
        mauve.compute_mauve(
            p_features=references.values,
            q_features=samples.values,
            seed=seed,
            mauve_scaling_factor=5,
            verbose=False,
        )
        for seed in seeds
    ]
    values = [float(result.mauve) for result in results]
    return Score(
        name="mauve",
        value=float(np.mean(values)),
        num_samples=len(samples.values),
        settings={
            **judge.identity,
            "num_references": len(references.values),
            "max_tokens": max_tokens,
            "scaling": 5,
            "seeds": list(seeds),
            "buckets": int(results[0].num_buckets),
        },
        details={
            "spread_over_seeds": float(np.std(values, ddof=1)) if len(values) > 1 else 0.0,
            "by_seed": values,
            "mean_tokens": float(samples.num_tokens.mean()),
            "mean_tokens_reference": float(references.num_tokens.mean()),
            "num_empty": samples.num_empty,
        },
        cautions=tuple(_cautions(samples, references)),
    )


def _cautions(samples: TextFeatures, references: TextFeatures) -> list[str]:
    sizes = len(samples.values), len(references.values)
    found = []
    if min(sizes) < FEW_TEXTS:
        found.append(
            f"{sizes[0]} samples and {sizes[1]} references: fewer than {FEW_TEXTS:,} a side bias "
            f"MAUVE upward and make it coarse ({PUBLISHED_TEXTS:,} are usual)"
        )
    ours, theirs = samples.num_tokens.mean(), references.num_tokens.mean()
    if max(ours, theirs) > LENGTH_RATIO * min(ours, theirs):
        found.append(
            f"samples have {ours:.0f} tokens on average and references {theirs:.0f}: MAUVE tells "
            "them apart by length alone"
        )
    return found
