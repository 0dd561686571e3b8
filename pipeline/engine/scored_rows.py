"""A row as an inference engine scores it: the tokens' log-probabilities and the likeliest others.

Engines (vLLM, SGLang, TensorRT-LLM, hosted APIs) give log-probabilities of a text's own tokens and
of the m likeliest ones at every position, never the whole distribution. That is what the
``posterior`` codec keeps, so nothing is lost but the tail beyond m.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64

from shards.base import GdistillError

MAX_MASS = 1 + 1e-3
"""Engines round: probabilities may add up to a little more than 1."""
MAX_LOG_PROB = 1e-3
MAX_DISAGREEMENT_NATS = 1e-2
"""Between a token's log-probability as the text's own and as one of the likeliest."""

Top = Mapping[int, Any] | None
"""id -> log-probability as a file or a server gives it, not yet checked."""


@dataclass(frozen=True)
class ScoredRow:
    """One row under the engine's model.

    Attributes:
        token_ids: [L].
        token_log_probs: [L], nats; position 0 has no distribution and is 0.
        top_ids: [L, m], likeliest first; -1 where fewer than m are known, and at position 0.
        top_log_probs: [L, m], nats; -inf where the id is -1.
    """

    token_ids: Int64[np.ndarray, "l"]
    token_log_probs: Float32[np.ndarray, "l"]
    top_ids: Int64[np.ndarray, "l m"]
    top_log_probs: Float32[np.ndarray, "l m"]


def scored_row(
    token_ids: Sequence[Any],
    token_log_probs: Sequence[Any],
    tops: Sequence[Top],
    *,
    vocab_size: int,
    num_top: int,
    where: str,
) -> ScoredRow:
    """Check one row and lay it out; position 0 of the two lists of scores is not looked at.

    Args:
        token_ids: L ids.
        token_log_probs: L log-probabilities, nats.
        tops: For each position, id -> log-probability of the likeliest tokens.
        vocab_size: V; ids are 0..V-1.
        num_top: m; of more, the likeliest m are kept.
        where: File and line, or request: names the row in errors.

    Raises:
        GdistillError: For lists of different lengths, an id outside the vocabulary, a positive or
            missing log-probability, probabilities that add up to more than 1, or a token whose
            two log-probabilities differ.
    """
    length = len(token_ids)
    if len(token_log_probs) != length or len(tops) != length or length < 2:
        got = f"{length} tokens, {len(token_log_probs)} log p, {len(tops)} lists of likeliest"
        raise GdistillError("a scored row does not fit itself", where=where, got=got)
    ids = np.asarray(id_list(token_ids, where), dtype=np.int64)
    _require_known(ids, vocab_size, where)
    row = ScoredRow(
        ids,
        np.zeros(length, np.float32),
        np.full((length, num_top), -1, np.int64),
        np.full((length, num_top), -np.inf, np.float32),
    )
    for position in range(1, length):
        place = f"{where}, position {position}"
        _require_top(tops[position], place)
        own = _log_prob(token_log_probs[position], place)
        row.token_log_probs[position] = own
        top = _checked_top(tops[position], own, int(ids[position]), place)
        _require_known(np.fromiter(top, np.int64), vocab_size, place)
        _fill_top(row, position, top)
    return row


def id_list(values: Any, where: str) -> list[int]:
    """Token ids as they came from a file or a server.

    Raises:
        GdistillError: If they are no list of integers.
    """
    if not isinstance(values, list | tuple):
        raise _no_ids(values, where)
    wrong = [value for value in values if isinstance(value, bool) or not isinstance(value, int)]
    if wrong:
        raise _no_ids(wrong[0], where)
    if any(abs(value) >= 1 << 62 for value in values):
        raise _no_ids(max(values, key=abs), where)
    return [*values]


def _no_ids(got: object, where: str) -> GdistillError:
    return GdistillError(
        "not token ids", where=where, got=repr(got)[:60], expected="a list of integers"
    )


def _fill_top(row: ScoredRow, position: int, top: dict[int, float]) -> None:
    best = sorted(top.items(), key=lambda item: (-item[1], item[0]))[: row.top_ids.shape[1]]
    row.top_ids[position, : len(best)] = [token for token, _ in best]
    row.top_log_probs[position, : len(best)] = [log_prob for _, log_prob in best]


def _require_top(top: Top, where: str) -> None:
    if not top:
        raise GdistillError(
            "a position without its likeliest tokens",
            where=where,
            expected="a list of ids with log-probabilities at every position but the first",
            remedy="ask the engine for prompt log-probabilities of at least one token",
        )


def _checked_top(top: Top, own: float, token: int, where: str) -> dict[int, float]:
    found = {name: _log_prob(value, where) for name, value in (top or {}).items()}
    if token in found and abs(found[token] - own) > MAX_DISAGREEMENT_NATS:
        raise GdistillError(
            "a token has two log-probabilities",
            where=where,
            got=f"token {token}: {own:.4f} by itself, {found[token]:.4f} among the likeliest",
        )
    mass = float(np.exp(np.fromiter(({**found, token: own}).values(), float)).sum())
    if mass > MAX_MASS:
        raise GdistillError(
            "probabilities add up to more than 1",
            where=where,
            got=f"{mass:.5f}",
            remedy="log-probabilities must be of the model itself: temperature 1, no penalties",
        )
    return found


def _log_prob(value: object, where: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    number = float(value) if is_number else float("nan")  # type: ignore[arg-type]
    if not np.isfinite(number) or number > MAX_LOG_PROB:
        raise GdistillError(
            "not a log-probability",
            where=where,
            got=repr(value)[:60],
            expected="a finite number, at most 0",
        )
    return min(number, 0.0)


def _require_known(ids: np.ndarray, vocab_size: int, where: str) -> None:
    unknown = ids[(ids < 0) | (ids >= vocab_size)]
    if len(unknown):
        raise GdistillError(
            "token id outside the vocabulary",
            where=where,
            got=int(unknown[0]),
            expected=f"0 to {vocab_size - 1}",
            remedy="name the tokenizer that the engine's model uses",
        )
