"""MAUVE between samples and reference text, with its spread over k-means seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from evaluation.judge_model import JudgeModel
from evaluation.score import Score
from shards.console import progress_bar
from shards.errors import UsageError


@torch.no_grad()
def last_hidden_features(
    judge: JudgeModel, texts: Sequence[str], max_tokens: int
) -> Float[np.ndarray, "n d"]:
    """The model's last hidden state at each text's last token, the features MAUVE clusters."""
    features = []
    with progress_bar("mauve features", len(texts), unit="text") as bar:
        for text in texts:
            ids = judge.tokenizer.encode(text, add_special_tokens=False) or [judge.eos_id]
            batch = torch.tensor([ids[: min(max_tokens, judge.context_length)]])
            output = judge.model(input_ids=batch.to(judge.model.device), output_hidden_states=True)
            features.append(output.hidden_states[-1][0, -1].float().cpu().numpy())
            bar.advance(1)
    return np.stack(features)


def mauve_score(
    judge: JudgeModel,
    samples: Sequence[str],
    references: Sequence[str],
    *,
    max_tokens: int = 1024,
    seeds: Sequence[int] = (25, 26, 27, 28, 29),
) -> Score:
    """MAUVE (Pillutla et al. 2021) through mauve-text, averaged over k-means seeds.

    The published setting is 5,000 texts a side with gpt2-large features; fewer texts bias the
    score upward, so both counts are part of the result.

    Raises:
        UsageError: With fewer than 20 texts on a side.
    """
    if min(len(samples), len(references)) < 20:
        raise UsageError(
            "too few texts for MAUVE",
            got=f"{len(samples)} samples, {len(references)} references",
            expected="at least 20 a side",
        )
    import mauve

    sample_features = last_hidden_features(judge, samples, max_tokens)
    reference_features = last_hidden_features(judge, references, max_tokens)
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
            "num_references": len(references),
            "max_tokens": max_tokens,
            "scaling": 5,
            "seeds": list(seeds),
            "buckets": "auto (n / 10)",
        },
        details={"spread_over_seeds": float(np.std(values, ddof=1)) if len(values) > 1 else 0.0},
    )
