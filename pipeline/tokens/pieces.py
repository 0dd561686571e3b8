"""Tokenizing a long document in pieces, with the ids it would have as a whole.

Pieces keep every core busy and memory flat when documents are books. A tokenizer that first splits
text into words (a pre-tokenizer) never merges across them: the text is cut where normalizer and
pre-tokenizer do the same to the parts as to the whole. With any other one it is tokenized whole, at
the cost of memory.
"""

from __future__ import annotations

import re
from itertools import accumulate, groupby, islice

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


def encode_all(fast: Tokenizer, texts: list[str]) -> list[Ids]:
    """Ids of each text, no special tokens added, on all cores; a batch of pieces at a time."""
    pieces = [cut_between_words(fast, text) for text in texts]
    flat, found = [piece for of_text in pieces for piece in of_text], list[Ids]()
    ends = accumulate(map(len, flat))
    for _, group in groupby(zip(flat, ends, strict=True), lambda pair: pair[1] // BATCH_CHARACTERS):
        batch = fast.encode_batch_fast([piece for piece, _ in group], add_special_tokens=False)
        found += [np.array(encoding.ids, np.int32) for encoding in batch]
    ids = iter(found)
    return [np.concatenate(list(islice(ids, len(of_text)))) for of_text in pieces]
