"""What an OpenAI-compatible server answers about a prompt, as a :class:`ScoredRow`.

Two shapes are in use; ``choices[0]`` holds either of them::

    prompt_logprobs   [null, {"464": {"logprob": -1.2, "rank": 3}, ...}, ...]     vLLM, SGLang
    logprobs          {"tokens": ["token_id:5", ...], "token_logprobs": [null, -1.2, ...],
                       "top_logprobs": [null, {"token_id:464": -1.2, ...}, ...]}  echo = true

Tokens must be named by id (``return_tokens_as_token_ids``): a text can stand for several ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.engine.scored_rows import ScoredRow, Top, id_list, scored_row
from shards.base import GdistillError

NAMED_BY_ID = "token_id:"


def row_of_response(
    response: Mapping[str, Any],
    token_ids: Any,
    *,
    vocab_size: int,
    num_top: int,
    where: str,
) -> ScoredRow:
    """The scores of the prompt that was sent.

    Args:
        response: The parsed answer of ``/v1/completions``.
        token_ids: The prompt as ids.
        vocab_size: V.
        num_top: m.
        where: Names the request in errors.

    Raises:
        GdistillError: If the answer has neither shape, or is about another tokenization.
    """
    choice = _choice(response, where)
    sent = id_list(token_ids, where)
    if "prompt_logprobs" in choice or "prompt_logprobs" in response:
        tops = choice.get("prompt_logprobs") or response.get("prompt_logprobs")
        log_probs, likeliest = _by_position(tops, sent, where)
    elif isinstance(choice.get("logprobs"), Mapping):
        log_probs, likeliest = _echoed(choice["logprobs"], sent, where)
    else:
        raise GdistillError(
            "the engine gave no log-probabilities of the prompt",
            where=where,
            got=f"choices[0] with {sorted(choice)}",
            expected="prompt_logprobs, or logprobs of an echoed prompt",
            remedy="try --set engine.dialect=echo, or start the server with log-probabilities on",
        )
    return scored_row(
        sent, log_probs, likeliest, vocab_size=vocab_size, num_top=num_top, where=where
    )


def _choice(response: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    choices = response.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        raise GdistillError(
            "not an answer of /v1/completions", where=where, got=str(response)[:120]
        )
    return choices[0]


def _by_position(tops: Any, sent: list[int], where: str) -> tuple[list[Any], list[Top]]:
    """``prompt_logprobs``: the prompt's own token is among the entries of every position."""
    if not isinstance(tops, list) or len(tops) != len(sent):
        count = len(tops) if isinstance(tops, list) else repr(tops)[:40]
        raise _other_tokenization(where, f"scores of {count} positions", f"{len(sent)}")
    log_probs: list[Any] = [None]
    likeliest: list[Top] = [None]
    for position, entries in enumerate(tops[1:], start=1):
        named = _numbers(entries, f"{where}, position {position}")
        if named and sent[position] not in named:
            got = f"ids {sorted(named)[:5]}"
            raise _other_tokenization(f"{where}, position {position}", got, str(sent[position]))
        log_probs.append(named.get(sent[position]))
        likeliest.append(named)
    return log_probs, likeliest


def _echoed(scores: Mapping[str, Any], sent: list[int], where: str) -> tuple[list[Any], list[Top]]:
    """``logprobs`` of an echoed prompt; what was generated after it is left out."""
    missing = [key for key in ("tokens", "token_logprobs", "top_logprobs") if key not in scores]
    if missing:
        raise GdistillError("the engine's logprobs lack a field", where=where, expected=missing[0])
    names = [_id_of(name, where) for name in scores["tokens"][: len(sent)]]
    if names != sent:
        first = next(i for i, token in enumerate(sent) if names[i : i + 1] != [token])
        got = str(names[first]) if first < len(names) else "no further token"
        raise _other_tokenization(f"{where}, position {first}", got, str(sent[first]))
    tops: list[Top] = [None]
    for position, entries in enumerate(scores["top_logprobs"][1 : len(sent)], start=1):
        tops.append(_numbers(entries, f"{where}, position {position}"))
    return list(scores["token_logprobs"][: len(sent)]), tops


def _numbers(entries: Any, where: str) -> dict[int, Any]:
    """id -> log-probability, from either way of writing an entry."""
    if not entries:
        return {}
    if not isinstance(entries, Mapping):
        raise GdistillError("not a table of likeliest tokens", where=where, got=repr(entries)[:60])
    return {
        _id_of(name, where): value.get("logprob") if isinstance(value, Mapping) else value
        for name, value in entries.items()
    }


def _id_of(name: object, where: str) -> int:
    text = str(name).removeprefix(NAMED_BY_ID)
    if not text.lstrip("-").isdigit():
        raise GdistillError(
            "the engine names tokens by text",
            where=where,
            got=repr(name),
            expected=f"ids, as in {NAMED_BY_ID}464",
            remedy="start the server with tokens returned as ids (return_tokens_as_token_ids)",
        )
    return int(text)


def _other_tokenization(where: str, got: str, expected: str) -> GdistillError:
    return GdistillError(
        "the engine scored another tokenization of the text",
        where=where,
        got=got,
        expected=expected,
        remedy="serve the model with this tokenizer, and without added special tokens",
    )
