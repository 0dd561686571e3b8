"""A text cut into the judge's tokens, each with the judge's surprise: what a report colours."""

from __future__ import annotations

from evaluation.text.judge import JudgeModel
from evaluation.text.memory import JudgedText

Piece = tuple[str, float | None]
"""Characters, and nats of the token they end in; None where nothing was scored."""


def surprise_pieces(judge: JudgeModel, text: str, reading: JudgedText) -> list[Piece]:
    """The text in pieces that join to it again, the part behind the judge's limit last.

    Args:
        judge: Whose tokens they are; without a fast tokenizer the text stays whole.
        text: The text.
        reading: What the judge made of it.
    """
    spans = token_spans(judge, text, reading)
    rest = spans[-1][1] if spans else 0
    pieces = [(text[start:end], value) for start, end, value in spans]
    return [piece for piece in [*pieces, (text[rest:], None)] if piece[0]]


def token_spans(
    judge: JudgeModel, text: str, reading: JudgedText
) -> list[tuple[int, int, float | None]]:
    """(start, end, nats) of each token of the judge; nats are None where it does not count.

    Characters between two tokens (spaces that a tokenizer skips) belong to the later one, so spans
    follow each other; of the tokens that write one character together all but the first are empty.
    Nothing for a judge without a fast tokenizer, which cannot tell.
    """
    if not judge.tokenizer.is_fast:
        return []
    encoded = judge.tokenizer(
        text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )
    spans, start = [], 0
    told = zip(encoded["offset_mapping"], reading.nll_nats, reading.counted, strict=False)
    for (_, end), nats, counted in told:
        spans.append((start, max(start, end), nats if counted else None))
        start = max(start, end)
    return spans
