"""Generative perplexity: how likely a judge finds the samples, in sliding windows.

A text longer than the window is read in windows of ``context`` tokens that start every ``stride``
tokens; the first scores all its positions, a later one only those that no earlier window scored.
Position 0 has no prediction, and tokens that stand between texts (end of text, and the start token
of judges that have one of their own) do not count as targets.

Two aggregates circulate and differ: ``corpus`` is exp(sum nll / sum tokens) over all texts, the
authors' number; ``per_sample`` is the mean of each text's perplexity. Both are reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from evaluation.bootstrap import PerSample
from evaluation.score import Score
from evaluation.text.judge import JudgeModel
from evaluation.text.memory import JudgedText, JudgeMemory
from shards.base import GdistillError, UsageError, progress_bar


@dataclass(frozen=True)
class ReadingLimits:
    """How a judge reads texts.

    Attributes:
        context_tokens: Longest window.
        stride_tokens: Distance between window starts.
        max_tokens: Texts are truncated to this many tokens, the one in front included.
    """

    context_tokens: int
    stride_tokens: int
    max_tokens: int


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


def counted_positions(ids: Int[Tensor, "b l"], border_ids: Sequence[int]) -> Bool[Tensor, "b l"]:
    """True where a token counts: not the first of its row, none of those between texts."""
    counted = ~torch.isin(ids, torch.tensor([*border_ids], dtype=ids.dtype, device=ids.device))
    counted[:, 0] = False
    return counted


def reading_limits(judge: JudgeModel, stride: int | None, max_tokens: int | None) -> ReadingLimits:
    """Half the judge's context as stride and its context as longest text, unless told.

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
    return ReadingLimits(context, stride, context if max_tokens is None else max_tokens)


def read_texts(
    judge: JudgeModel,
    texts: Sequence[str],
    limits: ReadingLimits,
    memory: JudgeMemory | None = None,
) -> list[JudgedText]:
    """What the judge makes of each text, after retokenizing it with the judge's own tokenizer.

    Args:
        judge: The model and its tokenizer.
        texts: Decoded samples.
        limits: From :func:`reading_limits`.
        memory: Texts that this judge has read before with these limits, to be asked and added to.

    Raises:
        GdistillError: When the judge gives a likelihood that is no number.
    """
    memory = JudgeMemory() if memory is None else memory
    new = [text for text in dict.fromkeys(texts) if text not in memory]
    encoded = {text: _judge_ids(judge, text, limits.max_tokens) for text in new}
    if not encoded:
        return [memory[text] for text in texts]
    with progress_bar("perplexity", sum(ids.shape[1] for ids in encoded.values())) as bar:
        for text, ids in encoded.items():
            memory.add(text, _read(judge, ids, limits))
            bar.advance(ids.shape[1])
    return [memory[text] for text in texts]


def _judge_ids(judge: JudgeModel, text: str, limit: int) -> Int[Tensor, "1 l"]:
    # verbose=False: the tokenizer would warn of a text longer than the context; windows read it.
    encoded = judge.tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return torch.tensor([judge.document_start_id, *encoded])[None, :limit]


def _read(judge: JudgeModel, ids: Int[Tensor, "1 l"], limits: ReadingLimits) -> JudgedText:
    counted = counted_positions(ids, judge.border_ids)[0, 1:]
    if not counted.any():
        return JudgedText(
            tuple(ids[0, 1:].tolist()), (0.0,) * counted.numel(), (False,) * len(counted)
        )
    device = judge.model.device
    nll = token_nll_nats(judge.model, ids.to(device), limits.context_tokens, limits.stride_tokens)
    if not nll.isfinite().all():
        raise GdistillError(
            "the judge gives a likelihood that is no number",
            where=judge.name,
            got=f"{int((~nll.isfinite()).sum())} of {nll.shape[1]} tokens of a text",
            expected="finite weights and logits",
            remedy="check the judge's weights",
        )
    return JudgedText(
        tuple(ids[0, 1:].tolist()), tuple(nll[0, 1:].tolist()), tuple(counted.tolist())
    )


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
