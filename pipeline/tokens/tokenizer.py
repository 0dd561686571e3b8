"""Text -> rows: a teacher's tokenizer, its special ids, ids in parallel, and how documents become rows.

::

    concat   d d d | d d S e e | e e e e      documents run on, S between them; no edges
    wrap     B d d S e e E | B e e e e S E    the same stream in pieces of L - 2, framed
    pad      B d d d E E E E                  one document per row
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from pipeline.corpus.config import MARKED, CorpusConfig, Packing, SpecialTokens
from pipeline.corpus.documents import Tally
from shards.errors import GdistillError, UsageError
from shards.language_model.loading import find_tokenizer, looks_local

BATCH_CHARACTERS = 1 << 19
"""Text tokenized at once. Bounds memory (an encoding costs some 150 bytes per token)."""
BATCH_DOCUMENTS = 1 << 12
PIECE_CHARACTERS = 1 << 14
"""A longer document is cut in pieces, which keep every core busy."""
WINDOW_CHARACTERS = 64
"""Text on either side of a cut that must pre-tokenize alike with and without it."""
MAX_CANDIDATES = 32
NUM_ENCODERS = 2
"""Batches tokenized side by side, so that the end of one idles no core."""
Ids = np.ndarray
"""Token ids, int32."""


def load_tokenizer(location: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory or hub id; no code of the repository is run."""
    place, expected = os.path.expanduser(location), "a folder with tokenizer.json"
    if looks_local(str(location)) and not Path(place).is_dir():
        raise UsageError("no such tokenizer folder", where=location, expected=expected)
    tokenizer = find_tokenizer(place, where=location, local_files_only=False)
    backend(tokenizer)
    return tokenizer


def backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """The ``tokenizers`` object behind a tokenizer, with truncation and padding off."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(fast, Tokenizer):
        where = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        expected = "one that the tokenizers library can load (tokenizer.json)"
        raise UsageError("the tokenizer has no fast form", where=where, expected=expected)
    fast.no_truncation()
    fast.no_padding()
    return fast


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of everything that decides the ids, wherever the files lie."""
    return hashlib.sha256(backend(tokenizer).to_str().encode()).hexdigest()


@dataclass(frozen=True)
class SpecialIds:
    """Token ids that packing inserts: bos and eos frame a row, eos is the padding too, and the separator
    stands after every document of a stream."""

    bos: int
    eos: int
    separator: int | None


def special_ids(tokenizer: PreTrainedTokenizerBase, config: CorpusConfig, split: str = "train") -> SpecialIds:
    """The ids that packing inserts: the configuration's, else what the tokenizer gives.

    A tokenizer that puts bos before every text and nothing after it marks the border of documents
    with bos (its model has seen ``<s> text <s> text``): there bos also ends a document. Otherwise
    eos does. A missing bos or eos is replaced by the other.
    """
    bos, eos = (
        value if isinstance(value, int) else None  # transformers types them as nearly anything
        for value in (tokenizer.bos_token_id, tokenizer.eos_token_id)
    )
    framed = tokenizer("")["input_ids"]
    if bos is not None and framed == [bos]:
        eos = bos
    eos = eos if config.eos_id is None else config.eos_id
    bos = bos if config.bos_id is None else config.bos_id
    bos, eos = (eos if bos is None else bos), (bos if eos is None else eos)
    if bos is None or eos is None:
        what = "the tokenizer has neither a bos nor an eos token"
        remedy = "name one: --set corpus.eos_id=N (and corpus.bos_id=N if it is another)"
        raise UsageError(what, where=tokenizer.name_or_path, remedy=remedy)
    wanted = config.separate_train if split == "train" else config.separate_validation
    separator = (eos if config.separator_id is None else config.separator_id) if wanted else None
    for name, value in (("bos_id", bos), ("eos_id", eos), ("separator_id", separator)):
        if value is not None and not 0 <= value < len(tokenizer):
            what, expected = "id outside the vocabulary", f"0 to {len(tokenizer) - 1}"
            raise UsageError(what, where=f"corpus.{name}", got=value, expected=expected)
    return SpecialIds(bos, eos, separator)


@dataclass(frozen=True)
class TextBatch:
    """Neighbouring documents of a span, the number of the first one not yet read, the counts up to here."""

    texts: list[str]
    next_document: int
    tally: Tally


def batches(
    documents: Iterator[tuple[int, str]], tally: Tally, most_tokens: int | float = math.inf
) -> Iterator[TextBatch]:
    """Group numbered documents by the amount of text; where the groups end is reproducible.

    Where few tokens are wanted in all the groups are small: a token has four characters, as a rule.
    ``tally`` is the one that the documents' reader counts in.
    """
    most = min(BATCH_CHARACTERS, 4 * most_tokens)
    texts: list[str] = []
    num_characters, number = 0, -1
    for number, text in documents:
        texts.append(text)
        num_characters += len(text)
        if num_characters >= most or len(texts) >= BATCH_DOCUMENTS:
            yield TextBatch(texts, number + 1, replace(tally))
            texts, num_characters = [], 0
    if texts:
        yield TextBatch(texts, number + 1, replace(tally))


def special_token_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Finds the special tokens that a text spells out, the longest first; None without any."""
    added = backend(tokenizer).get_added_tokens_decoder().values()
    words = sorted((token.content for token in added if token.special), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, words))) if words else None


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str], special_tokens: SpecialTokens = "token") -> list[Ids]:
    """Ids of each text, no special tokens added, on all cores.

    Equal to calling the tokenizer on each text. A special token that a text spells out becomes that
    token, as there, or with ``special_tokens="text"`` the ids of its letters.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    fast, found = backend(tokenizer), list[Ids]()
    fast.encode_special_tokens = special_tokens == "text"
    try:
        pieces = [cut_between_words(fast, text) for text in texts]
        flat = [piece for of_text in pieces for piece in of_text]
        ends = accumulate(map(len, flat))
        for _, group in groupby(zip(flat, ends, strict=True), lambda pair: pair[1] // BATCH_CHARACTERS):
            batch = fast.encode_batch_fast([piece for piece, _ in group], add_special_tokens=False)
            found += [np.array(encoding.ids, np.int32) for encoding in batch]
    except Exception as error:  # the library raises bare Exception, for an unknown word say
        what, remedy = "the tokenizer cannot encode the text", "is it the tokenizer of this corpus?"
        where = tokenizer.name_or_path
        raise GdistillError(what, where=where, got=error, remedy=remedy) from error
    ids = iter(found)
    return [np.concatenate(list(islice(ids, len(of_text)))) for of_text in pieces]


def cut_between_words(tokenizer: Tokenizer, text: str, piece_characters: int = PIECE_CHARACTERS) -> list[str]:
    """Pieces of ``text`` whose ids, one after the other, are those of the text.

    A tokenizer that first splits text into words (a pre-tokenizer) never merges across them: the text is
    cut where normalizer and pre-tokenizer do the same to the parts as to the whole. It stays one piece
    if it is short or the tokenizer gives no such guarantee.
    """
    pieces, begin = [], 0
    while len(text) - begin > piece_characters and tokenizer.pre_tokenizer is not None:
        cut = _word_border(tokenizer, text, begin + piece_characters)
        if cut is None:
            break
        pieces.append(text[begin:cut])
        begin = cut
    return [*pieces, text[begin:]]


def _word_border(tokenizer: Tokenizer, text: str, at: int) -> int | None:
    """The first white space from ``at`` on where the text may be cut; None if none is near."""
    for space in islice(re.compile(r"\s").finditer(text, at), MAX_CANDIDATES):
        cut = space.start()
        left, right = text[max(0, cut - WINDOW_CHARACTERS) : cut], text[cut : cut + WINDOW_CHARACTERS]
        if _words(tokenizer, left + right) == _words(tokenizer, left) + _words(tokenizer, right):
            return cut
    return None


def _words(tokenizer: Tokenizer, text: str) -> list[str]:
    assert tokenizer.pre_tokenizer is not None
    normal = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
    return [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normal)]


def encoded(
    texts: Iterator[TextBatch], encode: Callable[[list[str]], list[Ids]]
) -> Iterator[tuple[TextBatch, list[Ids]]]:
    """Batches with their ids, in order; reading and tokenizing run ahead in threads."""
    pending: deque[tuple[TextBatch, Future[list[Ids]]]] = deque()
    with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(NUM_ENCODERS) as pool:
        read = reader.submit(next, texts, None)
        while (batch := read.result()) is not None:
            read = reader.submit(next, texts, None)
            pending.append((batch, pool.submit(encode, batch.texts)))
            if len(pending) > NUM_ENCODERS:
                done, ids = pending.popleft()
                yield done, ids.result()
        for done, ids in pending:
            yield done, ids.result()


@dataclass
class Packer:
    """Documents as rows of L tokens, batch by batch; where a batch ends leaves no trace.

    Tokens that never fill a row are dropped at the end of a split and counted, as is what a padded
    row has no room for. Documents of conversations are whole rows already. If ``group_documents`` is
    positive, every so many documents of a stream are packed by themselves and their remainder is
    dropped: 1000 repeats rows made with the batched ``map`` of ``datasets``.
    """

    packing: Packing
    row_length: int
    ids: SpecialIds
    group_documents: int = 0
    num_dropped_tokens: int = 0
    _rest: Ids = field(default_factory=lambda: np.empty(0, np.int32))
    _num_in_group: int = 0

    def __post_init__(self) -> None:
        shortest = 2 if self.packing == "concat" else 3
        if self.row_length < shortest:
            what, expected = "rows are too short for this packing", f"{shortest} or more, {self.packing!r}"
            raise UsageError(what, where="row_length", got=self.row_length, expected=expected)

    def pack(self, documents: list[Ids]) -> np.ndarray:
        """Rows [n, L] int32 completed by these documents."""
        if self.packing == "pad":
            rows = np.full((len(documents), self.row_length), self.ids.eos, np.int32)
            rows[:, 0] = self.ids.bos
            for row, document in zip(rows, documents, strict=True):
                kept = document[: self.row_length - 2]
                row[1 : len(kept) + 1] = kept
                self.num_dropped_tokens += len(document) - len(kept)
            return rows
        if not self.group_documents:
            return self._append(documents)
        found = [self._append([])]
        while documents:
            room = self.group_documents - self._num_in_group
            taken, documents = documents[:room], documents[room:]
            found.append(self._append(taken))
            self._num_in_group += len(taken)
            if self._num_in_group == self.group_documents:
                self.finish()
        return np.concatenate(found)

    def _append(self, documents: list[Ids]) -> np.ndarray:
        has_separator = self.ids.separator is not None and self.packing not in MARKED
        separator = np.array([self.ids.separator] if has_separator else [], np.int32)
        stream = np.concatenate([self._rest, *(x for d in documents for x in (d, separator))])
        is_framed = self.packing == "wrap"
        body = self.row_length - 2 * is_framed
        end = len(stream) // body * body
        self._rest, pieces = stream[end:].copy(), stream[:end].reshape(-1, body)
        if not is_framed:
            return pieces
        bos, eos = (np.full((len(pieces), 1), token, np.int32) for token in (self.ids.bos, self.ids.eos))
        return np.concatenate([bos, pieces, eos], axis=1)

    def finish(self) -> None:
        """End of the split: what is left over is dropped and counted."""
        self.num_dropped_tokens += len(self._rest)
        self._rest, self._num_in_group = np.empty(0, np.int32), 0

    def state(self) -> dict[str, Any]:
        """JSON-ready state between two batches; ``restore`` goes on from it."""
        counts = {"in_group": self._num_in_group, "dropped": self.num_dropped_tokens}
        return {"rest": self._rest.tolist(), **counts}

    def restore(self, state: dict[str, Any]) -> None:
        self._rest = np.array(state["rest"], np.int32)
        self._num_in_group, self.num_dropped_tokens = state["in_group"], state["dropped"]
