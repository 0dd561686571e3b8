"""The tokenizer of a teacher: loading, identity, special ids, and text -> ids in parallel."""

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
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pipeline.corpus import CorpusConfig, SpecialTokens, Tally
from pipeline.tokens.packing import Ids, SpecialIds
from pipeline.tokens.pieces import HUGE_CHARACTERS, cut_between_words, encode_with_overlap
from shards.base import GdistillError, UsageError, first_line
from shards.language_model import looks_local

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
