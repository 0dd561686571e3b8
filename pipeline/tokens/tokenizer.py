"""Tokenizing a long document in pieces, with the ids it would have as a whole.

Pieces keep every core busy and memory flat when documents are books. There are two ways:

- A tokenizer that first splits text into words (a pre-tokenizer) never merges across them: the
  text is cut where normalizer and pre-tokenizer do the same to the parts as to the whole.
- Any other one looks at little context, so pieces that overlap agree in the middle of the overlap.
  Neighbours are joined inside a run of equal tokens. Only huge documents are worth that.

Where neither holds the document is tokenized whole, at the cost of memory.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np
from tokenizers import Encoding, Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pipeline.corpus.config import CorpusConfig, SpecialTokens, Tally
from pipeline.tokens.packing import Ids, SpecialIds
from shards.errors import GdistillError, UsageError, first_line
from shards.language_model.loading import looks_local

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


def cut_between_words(
    tokenizer: Tokenizer, text: str, piece_characters: int = PIECE_CHARACTERS
) -> list[str]:
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


def encode_with_overlap(
    tokenizer: Tokenizer, text: str, piece_characters: int = OVERLAPPED_CHARACTERS
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
                    return np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
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


# The tokenizer of a teacher: loading, identity, special ids, and text -> ids in parallel.


BATCH_CHARACTERS = 1 << 19
"""Text tokenized at once. Bounds memory (an encoding costs some 150 bytes per token)."""
BATCH_DOCUMENTS = 1 << 12
NUM_ENCODERS = 2
"""Batches tokenized side by side, so that the end of one idles no core."""

Item = TypeVar("Item")


def load_tokenizer(location: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory or hub id; no code of the repository is run.

    Raises:
        UsageError: If there is none, or it has no fast (``tokenizers``) form.
    """
    if looks_local(str(location)) and not Path(os.path.expanduser(location)).is_dir():
        raise UsageError(
            "no such tokenizer folder", where=location, expected="a folder with tokenizer.json"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            os.path.expanduser(location), trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            "cannot load a tokenizer",
            where=location,
            got=first_line(error),
            expected="a folder with tokenizer.json, or the hub id of a model",
        ) from error
    backend(tokenizer)
    return tokenizer


def backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """The ``tokenizers`` object behind a tokenizer, with truncation and padding off."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(fast, Tokenizer):
        raise UsageError(
            "the tokenizer has no fast form",
            where=tokenizer.name_or_path or type(tokenizer).__name__,
            expected="one that the tokenizers library can load (tokenizer.json)",
        )
    fast.no_truncation()
    fast.no_padding()
    return fast


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of everything that decides the ids, wherever the files lie."""
    return hashlib.sha256(backend(tokenizer).to_str().encode()).hexdigest()


def special_ids(
    tokenizer: PreTrainedTokenizerBase, config: CorpusConfig, split: str = "train"
) -> SpecialIds:
    """The ids that packing inserts: the configuration's, else what the tokenizer tells.

    A tokenizer that puts bos before every text and nothing after it marks the border of documents
    with bos (its model has seen ``<s> text <s> text``): there bos also ends a document. Otherwise
    eos does. A missing bos or eos is replaced by the other.
    """
    bos, eos = _id(tokenizer.bos_token_id), _id(tokenizer.eos_token_id)
    framed = tokenizer("")["input_ids"]
    if bos is not None and framed == [bos]:
        eos = bos
    bos = config.bos_id if config.bos_id is not None else (bos if bos is not None else eos)
    eos = config.eos_id if config.eos_id is not None else (eos if eos is not None else bos)
    if bos is None or eos is None:
        raise UsageError(
            "the tokenizer has neither a bos nor an eos token",
            where=tokenizer.name_or_path,
            remedy="name one: --set corpus.eos_id=N (and corpus.bos_id=N if it is another)",
        )
    wanted = config.separate_train if split == "train" else config.separate_validation
    separator = (eos if config.separator_id is None else config.separator_id) if wanted else None
    for name, value in (("bos_id", bos), ("eos_id", eos), ("separator_id", separator)):
        if value is not None and not 0 <= value < len(tokenizer):
            raise UsageError(
                "id outside the vocabulary",
                where=f"corpus.{name}",
                got=value,
                expected=f"0 to {len(tokenizer) - 1}",
            )
    return SpecialIds(bos, eos, separator)


def _id(value: object) -> int | None:
    """A special token's id, for transformers types it as nearly anything."""
    return value if isinstance(value, int) else None


@dataclass(frozen=True)
class TextBatch:
    """Neighbouring documents of a span.

    Attributes:
        texts: The documents.
        next_document: Number in the source of the first document that is not yet read.
        tally: The counts up to here.
    """

    texts: list[str]
    next_document: int
    tally: Tally


def batches(
    documents: Iterator[tuple[int, str]], tally: Tally, most_tokens: int | float = math.inf
) -> Iterator[TextBatch]:
    """Group numbered documents by the amount of text; where the groups end is reproducible.

    Args:
        documents: Numbers and texts.
        tally: The one that the documents' reader counts in.
        most_tokens: Tokens that are wanted in all. Where few are, the groups are small, so that
            little is read in vain: a token has four characters, as a rule.
    """
    texts: list[str] = []
    num_characters = 0
    most_characters = min(BATCH_CHARACTERS, 4 * most_tokens)
    for number, text in documents:
        texts.append(text)
        num_characters += len(text)
        if num_characters >= most_characters or len(texts) >= BATCH_DOCUMENTS:
            yield TextBatch(texts, number + 1, replace(tally))
            texts, num_characters = [], 0
    if texts:
        yield TextBatch(texts, number + 1, replace(tally))


def special_token_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Finds the special tokens that a text spells out, the longest first; None without any."""
    added = backend(tokenizer).get_added_tokens_decoder().values()
    words = sorted((token.content for token in added if token.special), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, words))) if words else None


def encode(
    tokenizer: PreTrainedTokenizerBase,
    texts: list[str],
    special_tokens: SpecialTokens = "token",
) -> list[Ids]:
    """Ids of each text, no special tokens added, on all cores.

    Equal to calling the tokenizer on each text. A special token that a text spells out becomes that
    token, as there, or with ``special_tokens="text"`` the ids of its letters.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    fast = backend(tokenizer)
    fast.encode_special_tokens = special_tokens == "text"
    try:
        return _encode(fast, texts)
    except Exception as error:  # the library raises bare Exception, for an unknown word say
        raise GdistillError(
            "the tokenizer cannot encode the text",
            where=tokenizer.name_or_path,
            got=error,
            remedy="is this the tokenizer of this corpus?",
        ) from error


def _encode(fast: Tokenizer, texts: list[str]) -> list[Ids]:
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


def encoded(
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterator[TextBatch],
    special_tokens: SpecialTokens = "text",
) -> Iterator[tuple[TextBatch, list[Ids]]]:
    """Batches with their ids, in order; reading and tokenizing run ahead in threads."""
    with ThreadPoolExecutor(NUM_ENCODERS) as pool:
        pending: deque[tuple[TextBatch, Future[list[Ids]]]] = deque()
        for batch in ahead(texts):
            pending.append((batch, pool.submit(encode, tokenizer, batch.texts, special_tokens)))
            if len(pending) > NUM_ENCODERS:
                done, ids = pending.popleft()
                yield done, ids.result()
        while pending:
            done, ids = pending.popleft()
            yield done, ids.result()


def ahead(items: Iterator[Item], depth: int = 1) -> Iterator[Item]:
    """The same items, drawn in a thread that stays up to ``depth`` items ahead."""
    end = object()
    with ThreadPoolExecutor(1) as pool:
        pending: list[Future[Item | object]] = []
        while True:
            while len(pending) <= depth:
                pending.append(pool.submit(next, items, end))
            item = pending.pop(0).result()
            if item is end:
                return
            yield item  # type: ignore[misc]
