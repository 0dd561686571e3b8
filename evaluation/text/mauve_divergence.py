"""MAUVE between samples and reference text, with its spread over k-means seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from evaluation.score import Score
from evaluation.text.judge import JudgeModel
from shards.base import UsageError, progress_bar

MIN_TEXTS = 20


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
            expected=f"at least {MIN_TEXTS} a side",
            remedy="sample more, or score without --reference",
        )


@torch.no_grad()
def last_hidden_features(
    judge: JudgeModel, texts: Sequence[str], max_tokens: int
) -> Float[np.ndarray, "n d"]:
    """The model's last hidden state at each text's last token, the features MAUVE clusters.

    Args:
        judge: The model and its tokenizer.
        texts: The n texts; an empty one is read as end-of-text.
        max_tokens: Texts are truncated to this many tokens; 1 to the judge's context.

    Raises:
        UsageError: For another limit.
    """
    if not 1 <= max_tokens <= judge.context_length:
        raise UsageError(
            "no such limit",
            where="max_tokens",
            got=max_tokens,
            expected=f"1..{judge.context_length}, the context of {judge.name}",
        )
    features = []
    with progress_bar("mauve features", len(texts), unit="text") as bar:
        for text in texts:
            ids = judge.tokenizer.encode(text, add_special_tokens=False, verbose=False)
            batch = torch.tensor([(ids or [judge.eos_id])[:max_tokens]])
            output = judge.model(input_ids=batch.to(judge.model.device), output_hidden_states=True)
            features.append(output.hidden_states[-1][0, -1].float().cpu().numpy())
            bar.advance(1)
    return np.stack(features)


def mauve_score(
    judge: JudgeModel,
    samples: Sequence[str],
    reference_features: Float[np.ndarray, "m d"],
    *,
    max_tokens: int,
    seeds: Sequence[int] = (25, 26, 27, 28, 29),
) -> Score:
    """MAUVE (Pillutla et al. 2021) through mauve-text, averaged over k-means seeds.

    The published setting is 5,000 texts a side with gpt2-large features; fewer texts bias the
    score upward, so both counts are part of the result.

    Args:
        judge: The model for the features, and its tokenizer.
        samples: Decoded samples.
        reference_features: :func:`last_hidden_features` of m texts of the real distribution, by
            the same judge and limit; computed once for all sample files.
        max_tokens: Texts are truncated to this many tokens, at most the judge's context.
        seeds: Of the k-means.

    Raises:
        UsageError: With fewer than 20 texts on a side, or a limit outside 1..context.
    """
    check_counts(len(samples), len(reference_features))
    import mauve

    sample_features = last_hidden_features(judge, samples, max_tokens)
    results: list[Any] = [
        mauve.compute_mauve(
            p_features=reference_features,
            q_features=sample_features,
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
        num_samples=len(samples),
        settings={
            "features": judge.name,
            "num_references": len(reference_features),
            "max_tokens": max_tokens,
            "scaling": 5,
            "seeds": list(seeds),
            "buckets": "auto (n / 10)",
        },
        details={"spread_over_seeds": float(np.std(values, ddof=1)) if len(values) > 1 else 0.0},
    )
