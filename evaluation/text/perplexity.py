"""Generative perplexity: how likely a judge finds the samples.

Two aggregates circulate and differ: ``corpus`` is exp(sum nll / sum tokens) over all texts, the
authors' number; ``per_sample`` is the mean of each text's perplexity. Both are reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from evaluation.bootstrap import PerSample
from evaluation.score import Score
from evaluation.text.reading import JudgeMemory, JudgeModel, read_texts, reading_limits
from shards.errors import GdistillError


def generative_perplexity(
    judge: JudgeModel,
    texts: Sequence[str],
    *,
    stride: int | None = None,
    max_tokens: int | None = None,
    indices: Sequence[int] | None = None,
    memory: JudgeMemory | None = None,
    where: object = "",
) -> Score:
    """Score texts under a judge.

    Args:
        judge: The model and its tokenizer.
        texts: Decoded samples; one without a token that counts is left out, and counted in the
            details.
        stride: Distance between windows in tokens; half the context unless told.
        max_tokens: Texts are truncated to this many tokens, the one in front included; the
            context unless told.
        indices: Sample indices; 0, 1, ... unless told.
        memory: See :func:`read_texts`.
        where: Where the texts come from, for messages.

    Raises:
        UsageError: For a stride or limit of no use.
        GdistillError: When no text has a token that counts, or the judge gives no finite number.
    """
    limits = reading_limits(judge, stride, max_tokens)
    readings = read_texts(judge, texts, limits, memory)
    named = zip(indices or range(len(texts)), readings, strict=True)
    scored = [(index, reading) for index, reading in named if any(reading.counted)]
    if not scored:
        raise GdistillError(
            "no sample has a token to score",
            where=where,
            got=f"{len(texts)} texts without a token besides end-of-text",
            remedy="look at the samples' text fields",
        )
    per_sample = PerSample(
        indices=tuple(index for index, _ in scored),
        numerators=tuple(reading.nll_sum_nats for _, reading in scored),
        denominators=tuple(float(sum(reading.counted)) for _, reading in scored),
        is_exponential=True,
    )
    settings = {
        **judge.identity,
        "context_tokens": limits.context_tokens,
        "stride_tokens": limits.stride_tokens,
        "max_tokens": limits.max_tokens,
        "precision": "fp32",
        "borders": "not counted",
        "aggregate": "corpus",
    }
    score = summarise(per_sample, len(texts) - len(scored), settings)
    return replace(score, details={**score.details, "products": judge.products})


def summarise(per_sample: PerSample, num_empty: int, settings: dict[str, Any]) -> Score:
    """Both aggregates of texts' likelihoods, and the interval of the corpus aggregate.

    Args:
        per_sample: Nats and tokens of each text.
        num_empty: Texts that were left out.
        settings: What the number depends on.
    """
    sums, counts = np.array(per_sample.numerators), np.array(per_sample.denominators)
    each = np.exp(sums / counts)
    return Score(
        name="generative_perplexity",
        value=per_sample.value(),
        num_samples=len(sums),
        interval=per_sample.interval(),
        settings=settings,
        details={
            "per_sample_mean": float(each.mean()),
            "per_sample_median": float(np.median(each)),
            "nll_nats_per_token": float(sums.sum() / counts.sum()),
            "num_tokens": int(counts.sum()),
            "num_empty": num_empty,
        },
        cautions=(f"{num_empty} texts without a token to score are left out",) if num_empty else (),
        per_sample=per_sample,
    )
