"""Generative perplexity: how likely a judge finds the samples, in sliding windows.

A text longer than the window is read in windows of ``context`` tokens that start every ``stride``
tokens; the first scores all its positions, a later one only those that no earlier window scored.
Position 0 has no prediction, and targets equal to the end-of-text token do not count.

Two aggregates circulate and differ: ``corpus`` is exp(sum nll / sum tokens) over all texts, the
authors' number; ``per_sample`` is the mean of each text's perplexity. Both are reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from evaluation.score import Score
from evaluation.text.judge import JudgeModel
from shards.base import GdistillError, UsageError, progress_bar


def window_starts(length: int, context: int, stride: int) -> list[tuple[int, int]]:
    """(start, first scored position) of each window over ``length`` tokens.

    Raises:
        ValueError: Unless 0 < stride <= context.
    """
    if not 0 < stride <= context:
        raise ValueError(f"need 0 < stride <= context, got stride {stride}, context {context}")
    windows = [(0, 0)]
    while windows[-1][0] + context < length:
        start = windows[-1][0] + stride
        windows.append((start, start + context - stride))
    return windows


@torch.no_grad()
def token_nll_nats(
    model: Any, ids: Int[Tensor, "b l"], context: int, stride: int
) -> Float[Tensor, "b l"]:
    """Negative log-likelihood in nats of every token under ``model``; 0 at position 0.

    Args:
        model: A causal language model of transformers, in float32.
        ids: Token ids.
        context: Window length in tokens.
        stride: Distance between window starts in tokens.
    """
    result = torch.zeros(ids.shape, dtype=torch.float32)
    for start, first in window_starts(ids.shape[1], context, stride):
        window = ids[:, start : start + context]
        logits = model(input_ids=window).logits[:, :-1].float()
        nll = cross_entropy(logits.transpose(1, 2), window[:, 1:], reduction="none")
        first = max(first, 1)
        result[:, first : start + window.shape[1]] = nll[:, first - start - 1 :].cpu()
    return result


def counted_positions(
    ids: Int[Tensor, "b l"], eos_id: int, attention_mask: Int[Tensor, "b l"] | None = None
) -> Bool[Tensor, "b l"]:
    """True where a token counts: not the first of its row, not end-of-text, not padding."""
    counted = ids != eos_id
    counted[:, 0] = False
    return counted if attention_mask is None else counted & attention_mask.bool()


def reading_limits(
    judge: JudgeModel, stride: int | None, max_tokens: int | None
) -> tuple[int, int]:
    """(stride, longest text) in tokens: half the judge's context and its context unless told.

    Raises:
        UsageError: When no text could be read that way.
    """
    context = judge.context_length
    if stride is None:
        stride = max(1, context // 2)
    if not 1 <= stride <= context:
        raise UsageError(
            "the windows would leave tokens out" if stride > context else "no such stride",
            where="--stride",
            got=stride,
            expected=f"1..{context}, the context of {judge.name}",
            remedy="leave it out for half the context",
        )
    if max_tokens is not None and max_tokens < 2:
        raise UsageError(
            "nothing would be scored",
            where="--max-tokens",
            got=max_tokens,
            expected="at least 2: the token in front of a text counts",
            remedy="leave it out to read texts whole, up to the context",
        )
    return stride, context if max_tokens is None else max_tokens


def generative_perplexity(
    judge: JudgeModel,
    texts: Sequence[str],
    *,
    stride: int | None = None,
    max_tokens: int | None = None,
    where: object = "",
) -> Score:
    """Score texts under a judge, after retokenizing them with the judge's tokenizer.

    Args:
        judge: The model and its tokenizer.
        texts: Decoded samples; an empty one is left out and counted in the details.
        stride: Distance between windows in tokens; half the context unless told.
        max_tokens: Texts are truncated to this many tokens, the one in front included; the
            context unless told.
        where: Where the texts come from, for messages.

    Raises:
        UsageError: For a stride or limit of no use.
        GdistillError: When no text has a token that counts, or the judge gives no finite number.
    """
    stride, limit = reading_limits(judge, stride, max_tokens)
    rows = [_judge_ids(judge, text, limit) for text in texts]
    sums, counts = [], []
    with progress_bar("perplexity", sum(row.shape[1] for row in rows)) as bar:
        for ids in rows:
            bar.advance(ids.shape[1])
            counted = counted_positions(ids, judge.eos_id)
            if not counted.any():
                continue
            nll = token_nll_nats(
                judge.model, ids.to(judge.model.device), judge.context_length, stride
            )
            sums.append(float(nll[counted].double().sum()))
            counts.append(int(counted.sum()))
    _check_sums(judge, sums, len(texts), where)
    settings = {
        "judge": judge.name,
        "context_tokens": judge.context_length,
        "stride_tokens": stride,
        "max_tokens": limit,
        "eos": "not counted",
        "aggregate": "corpus",
    }
    return _summarise(np.array(sums), np.array(counts), len(texts), settings)


def _judge_ids(judge: JudgeModel, text: str, limit: int) -> Int[Tensor, "1 l"]:
    # verbose=False: the tokenizer would warn of a text longer than the context; windows read it.
    encoded = judge.tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return torch.tensor([judge.document_start_id, *encoded])[None, :limit]


def _check_sums(judge: JudgeModel, sums: Sequence[float], num_texts: int, where: object) -> None:
    if not sums:
        raise GdistillError(
            "no sample has a token to score",
            where=where,
            got=f"{num_texts} texts without a token besides end-of-text",
            remedy="look at the samples' text fields",
        )
    if not np.isfinite(sums).all():
        raise GdistillError(
            "the judge gives a likelihood that is no number",
            where=judge.name,
            got=f"{int((~np.isfinite(sums)).sum())} of {len(sums)} texts",
            expected="finite weights and logits",
            remedy="check the judge's weights",
        )


def _summarise(
    sums: np.ndarray, counts: np.ndarray, num_texts: int, settings: dict[str, Any]
) -> Score:
    per_sample = np.exp(sums / counts)
    draws = np.random.default_rng(0).integers(len(sums), size=(1000, len(sums)))
    bootstrap = np.exp(sums[draws].sum(1) / counts[draws].sum(1))
    low, high = np.quantile(bootstrap, [0.025, 0.975])
    return Score(
        name="generative_perplexity",
        value=float(np.exp(sums.sum() / counts.sum())),
        num_samples=len(sums),
        interval=(float(low), float(high)) if len(sums) > 1 else None,
        settings=settings,
        details={
            "per_sample_mean": float(per_sample.mean()),
            "per_sample_median": float(np.median(per_sample)),
            "nll_nats_per_token": float(sums.sum() / counts.sum()),
            "num_tokens": int(counts.sum()),
            "num_empty": num_texts - len(sums),
        },
    )
