"""A text cut into the judge's tokens, each with the judge's surprise: what a report colours."""

from __future__ import annotations

from itertools import pairwise

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
    if not judge.tokenizer.is_fast:
        return [(text, None)]
    encoded = judge.tokenizer(
        text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )
    # Characters between two tokens (spaces that a tokenizer skips) belong to the later one; the
    # tokens of one character of several bytes end at the same place.
    ends = [end for _, end in encoded["offset_mapping"][: len(reading.ids)]]
    values = [
        nll if flag else None for nll, flag in zip(reading.nll_nats, reading.counted, strict=True)
    ]
    cuts = [0]
    for end in ends:
        cuts.append(max(cuts[-1], end))
    pieces: list[Piece] = [
        (text[start:end], value) for (start, end), value in zip(pairwise(cuts), values, strict=True)
    ]
    pieces.append((text[cuts[-1] :], None))
    return [piece for piece in pieces if piece[0]]
