"""Tokenizing a long document in pieces, with the ids it would have as a whole.

Pieces keep every core busy and memory flat when documents are books. There are two ways:

- A tokenizer that first splits text into words (a pre-tokenizer) never merges across them: the
  text is cut where normalizer and pre-tokenizer do the same to the parts as to the whole.
- Any other one looks at little context, so pieces that overlap agree in the middle of the overlap.
  Neighbours are joined inside a run of equal tokens. Only huge documents are worth that.

Where neither holds the document is tokenized whole, at the cost of memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

import numpy as np
from tokenizers import Tokenizer

Ids = np.ndarray
"""Token ids, int32."""
BATCH_CHARACTERS = 1 << 19
"""Text tokenized at once. Bounds memory (an encoding costs some 150 bytes per token)."""
PIECE_CHARACTERS = 1 << 14
WINDOW_CHARACTERS = 64
"""Text on either side of a cut that must pre-tokenize alike with and without it."""
MAX_CANDIDATES = 32

HUGE_CHARACTERS = 1 << 21
OVERLAPPED_CHARACTERS = 1 << 18
OVERLAP_CHARACTERS = 1 << 11
AGREEING_TOKENS = 64
"""Equal tokens around a joint that count as proof."""
PIECES_AT_ONCE = 8

_WHITE_SPACE = re.compile(r"\s")


def cut_between_words(tokenizer: Tokenizer, text: str, piece_characters: int = PIECE_CHARACTERS) -> list[str]:
    """Pieces of ``text`` whose ids, one after the other, are those of the text.

    One piece if the text is short or the tokenizer gives no such guarantee.
    """
    if len(text) <= piece_characters or tokenizer.pre_tokenizer is None:
        return [text]
    pieces, begin = [], 0
    while len(text) - begin > piece_characters:
        cut = _word_border(tokenizer, text, begin + piece_characters)
        if cut is None:
            break
        pieces.append(text[begin:cut])
        begin = cut
    return [*pieces, text[begin:]]


def _word_border(tokenizer: Tokenizer, text: str, at: int) -> int | None:
    """The first white space from ``at`` on where the text may be cut; None if none is near."""
    for tries, space in enumerate(_WHITE_SPACE.finditer(text, at)):
        if tries == MAX_CANDIDATES:
            break
        cut = space.start()
        left = text[max(0, cut - WINDOW_CHARACTERS) : cut]
        right = text[cut : cut + WINDOW_CHARACTERS]
        if _words(tokenizer, left + right) == _words(tokenizer, left) + _words(tokenizer, right):
            return cut
    return None


def _words(tokenizer: Tokenizer, text: str) -> list[str]:
    assert tokenizer.pre_tokenizer is not None
    normal = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
    return [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normal)]


def encode_with_overlap(tokenizer: Tokenizer, text: str, piece_characters: int = OVERLAPPED_CHARACTERS) -> Ids:
    """Ids of ``text``, no special tokens added; memory for a few pieces besides the ids."""
    starts = list(range(0, len(text), piece_characters))
    joined: list[Ids] = []
    previous: tuple[Ids, np.ndarray] | None = None
    for first in range(0, len(starts), PIECES_AT_ONCE):
        group = starts[first : first + PIECES_AT_ONCE]
        texts = [text[start : start + piece_characters + OVERLAP_CHARACTERS] for start in group]
        encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
        for start, piece in zip(group, encoded, strict=True):
            ids = np.array(piece.ids, np.int32)
            borders = np.array([begin for begin, _ in piece.offsets], np.int64) + start
            if previous is not None:
                cut = join(*previous, ids, borders)
                if cut is None:
                    return np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
                joined.append(previous[0][: cut[0]])
                ids, borders = ids[cut[1] :], borders[cut[1] :]
            previous = ids, borders
    return np.concatenate([*joined, previous[0]]) if previous else np.empty(0, np.int32)


def join(left: Ids, left_borders: np.ndarray, right: Ids, right_borders: np.ndarray) -> tuple[int, int] | None:
    """How many tokens of ``left`` to keep and how many of ``right`` to leave out.

    The longest run of tokens that are equal in id and place is cut in its middle, where a
    character begins; None if it is too short to be trusted.
    """
    if not len(left) or not len(right):
        return None
    lag = int(np.searchsorted(left_borders, right_borders[0]))
    known = set(zip(left_borders[lag:].tolist(), left[lag:].tolist(), strict=True))
    best, run = (0, 0), 0
    for index in range(int(np.searchsorted(right_borders, left_borders[-1], "right"))):
        run = run + 1 if (int(right_borders[index]), int(right[index])) in known else 0
        best = max(best, (run, index))
    length, end = best
    middle = end - length // 2
    # Tokens that share one character share a border; cut where a character begins.
    while middle <= end and right_borders[middle] == right_borders[middle - 1]:
        middle += 1
    if length < AGREEING_TOKENS or middle > end:
        return None
    return int(np.searchsorted(left_borders, right_borders[middle])), middle


def encode_all(fast: Tokenizer, texts: list[str]) -> list[Ids]:
    """Ids of each text, no special tokens added, on all cores."""
    pieces = [cut_between_words(fast, text) for text in texts]
    ids = _encode_pieces(fast, [piece for of_text in pieces for piece in of_text])
    return [np.concatenate(list(islice(ids, len(of_text)))) for of_text in pieces]


def _encode_pieces(fast: Tokenizer, pieces: list[str]) -> Iterator[Ids]:
    """Ids of each piece; as many pieces at once as fill a batch, for the cores to share."""
    group: list[str] = []
    num_characters = 0
    for piece in pieces:
        is_huge = len(piece) > HUGE_CHARACTERS
        if group and (is_huge or num_characters + len(piece) > 2 * BATCH_CHARACTERS):
            yield from _encode_at_once(fast, group)
            group, num_characters = [], 0
        if is_huge:
            yield encode_with_overlap(fast, piece)
        else:
            group.append(piece)
            num_characters += len(piece)
    yield from _encode_at_once(fast, group)


def _encode_at_once(fast: Tokenizer, texts: list[str]) -> Iterator[Ids]:
    for encoding in fast.encode_batch_fast(texts, add_special_tokens=False):
        yield np.array(encoding.ids, np.int32)
