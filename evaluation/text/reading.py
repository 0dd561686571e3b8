"""What a judge makes of texts, in sliding windows.

A text longer than the window is read in windows of ``context`` tokens that start every ``stride``
tokens; the first scores all its positions, a later one only those that no earlier window scored.
Position 0 has no prediction, and tokens that stand between texts (end of text, and the start token
of judges that have one of their own) do not count as targets.

Texts that go through the judge side by side are filled up behind their ends, where a causal model
does not look; how many go, and what is held of them, :mod:`evaluation.text.room` says.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

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
    model: Any, ids: Int[Tensor, "b l"], context: int, stride: int, most_tokens: int = sys.maxsize
) -> Float[Tensor, "b l"]:
    """Negative log-likelihood in nats of every token under ``model``; 0 at position 0.

    Args:
        model: A causal language model of transformers, in float32.
        ids: Token ids.
        context: Window length in tokens.
        stride: Distance between window starts in tokens.
        most_tokens: Tokens whose logits may be held at once.

    Raises:
        GdistillError: For a longer window, if the model cannot give some of its logits alone.
    """
    result = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
    for start, first in window_starts(ids.shape[1], context, stride):
        window = ids[:, start : start + context]
        first = max(first, 1)
        nll = _window_nll(model, window, max(1, most_tokens // len(ids)))
        result[:, first : start + window.shape[1]] = nll[:, first - start - 1 :]
    return result


def _window_nll(model: Any, window: Int[Tensor, "b t"], most: int) -> Float[Tensor, "b t-1"]:
    """Of all tokens but the first; where the logits are too many, ``most`` positions at a time,
    each time with the whole pass behind them."""
    if window.shape[1] <= most:
        return _nll(model(input_ids=window, use_cache=False).logits[:, :-1], window[:, 1:])
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise GdistillError(
            "a text is too long for a judge that gives all logits or none",
            where=type(model).__name__,
            got=f"{window.shape[1]} tokens",
            expected=f"at most {most}, whose logits can be held at once",
            remedy=f"cut texts with --max-tokens {most}",
        )
    places = torch.arange(window.shape[1] - 1, device=window.device)
    parts = [
        _nll(
            model(input_ids=window, use_cache=False, logits_to_keep=part).logits,
            window[:, 1:][:, part],
        )
        for part in places.split(most)
    ]
    return torch.cat(parts, dim=1)


def _nll(logits: Float[Tensor, "b n v"], targets: Int[Tensor, "b n"]) -> Float[Tensor, "b n"]:
    return cross_entropy(logits.float().transpose(1, 2), targets, reduction="none")


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
    encoded = [_judge_ids(judge, text, limits.max_tokens) for text in new]
    if not new:
        return [memory[text] for text in texts]
    with progress_bar("perplexity", sum(map(len, encoded))) as bar:

        def read(members: list[int]) -> None:
            rows = [encoded[index] for index in members]
            for index, reading in zip(members, _read(judge, rows, limits), strict=True):
                memory.add(new[index], reading)
                bar.advance(len(encoded[index]))

        judge.room.fill([len(ids) for ids in encoded], limits.context_tokens, read)
    return [memory[text] for text in texts]


def _judge_ids(judge: JudgeModel, text: str, limit: int) -> list[int]:
    # verbose=False: the tokenizer would warn of a text longer than the context; windows read it.
    encoded = judge.tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return [judge.document_start_id, *encoded][:limit]


def _read(judge: JudgeModel, rows: list[list[int]], limits: ReadingLimits) -> list[JudgedText]:
    """Texts side by side; a row that is shorter is filled up behind its end."""
    ids = side_by_side(rows, judge.document_start_id)
    counted = counted_positions(ids, judge.border_ids)
    nll = torch.zeros(ids.shape)
    if counted.any():
        nll = token_nll_nats(
            judge.model,
            ids.to(judge.model.device),
            limits.context_tokens,
            limits.stride_tokens,
            judge.room.with_logits,
        ).cpu()
        nll[~counted.any(dim=1)] = 0.0  # as of a text that is not read at all
    return [
        _judged(judge, row, nll[index, 1 : len(row)], counted[index, 1 : len(row)])
        for index, row in enumerate(rows)
    ]


def _judged(judge: JudgeModel, row: list[int], nll: Tensor, counted: Tensor) -> JudgedText:
    if not nll.isfinite().all():
        raise GdistillError(
            "the judge gives a likelihood that is no number",
            where=judge.name,
            got=f"{int((~nll.isfinite()).sum())} of {len(nll) + 1} tokens of a text",
            expected="finite weights and logits",
            remedy="check the judge's weights",
        )
    return JudgedText(tuple(row[1:]), tuple(nll.tolist()), tuple(counted.tolist()))


def side_by_side(rows: Sequence[Sequence[int]], filler: int) -> Int[Tensor, "b l"]:
    """Rows of token ids, filled up to the longest."""
    ids = torch.full((len(rows), max(map(len, rows))), filler)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = torch.tensor(row)
    return ids
