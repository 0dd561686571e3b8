"""Tokenizing one huge document in overlapping pieces, with the ids it would have as a whole.

A merge-based tokenizer looks at little context, so two pieces that overlap agree on the tokens in
the middle of the overlap. Neighbours are joined at a token border both have, inside a run of equal
tokens; without such a run the document is tokenized as a whole, at the cost of memory.
"""

from __future__ import annotations

import numpy as np
from tokenizers import Encoding, Tokenizer

from pipeline.packing import Ids

PIECE_CHARACTERS = 1 << 18
OVERLAP_CHARACTERS = 1 << 11
AGREEING_TOKENS = 64
"""Equal tokens around a border that count as proof."""
PIECES_AT_ONCE = 8


def encode_in_pieces(
    tokenizer: Tokenizer, text: str, piece_characters: int = PIECE_CHARACTERS
) -> Ids:
    """Ids of ``text``, no special tokens added; memory for a few pieces besides the ids."""
    starts = list(range(0, len(text), piece_characters))
    joined: list[Ids] = []
    previous: tuple[Ids, np.ndarray] | None = None
    for first in range(0, len(starts), PIECES_AT_ONCE):
        group = starts[first : first + PIECES_AT_ONCE]
        texts = [text[start : start + piece_characters + OVERLAP_CHARACTERS] for start in group]
        encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
        for start, piece in zip(group, encoded, strict=True):
            ids, borders = _with_borders(piece, start)
            if previous is not None:
                cut = _join(*previous, ids, borders)
                if cut is None:
                    whole = tokenizer.encode(text, add_special_tokens=False)
                    return np.array(whole.ids, np.int32)
                joined.append(previous[0][: cut[0]])
                ids, borders = ids[cut[1] :], borders[cut[1] :]
            previous = ids, borders
    return np.concatenate([*joined, previous[0]]) if previous else np.empty(0, np.int32)


def _with_borders(piece: Encoding, start: int) -> tuple[Ids, np.ndarray]:
    """Ids and where each token begins in the whole text, in characters; [n] and [n]."""
    borders = np.array([begin for begin, _ in piece.offsets], np.int64) + start
    return np.array(piece.ids, np.int32), borders


def _join(
    left: Ids, left_borders: np.ndarray, right: Ids, right_borders: np.ndarray
) -> tuple[int, int] | None:
    """How many tokens of ``left`` to keep and how many of ``right`` to leave out.

    Both cover the text from the first token of ``right`` on. The longest run of tokens equal in
    id and place is cut in its middle; None if it is too short to be trusted.
    """
    lag = int(np.searchsorted(left_borders, right_borders[0])) if len(right) else len(left)
    best: tuple[int, int, int] = (0, 0, 0)
    overlap = min(len(left) - lag, len(right))
    keys_left = set(zip(left_borders[lag:].tolist(), left[lag:].tolist(), strict=True))
    run = 0
    for index in range(min(len(right), 2 * overlap + 16)):
        run = run + 1 if (int(right_borders[index]), int(right[index])) in keys_left else 0
        if run > best[0]:
            best = run, index - run + 1, index
    length, begin, end = best
    if length < AGREEING_TOKENS:
        return None
    middle = (begin + end) // 2
    # Tokens that share one character share a border; cut where a character begins.
    while middle <= end and right_borders[middle] == right_borders[middle - 1]:
        middle += 1
    if middle > end:
        return None
    kept = lag + int(np.searchsorted(left_borders[lag:], right_borders[middle]))
    return kept, middle
