"""Tokens of the corpus at hand: given, counted in finished rows, or estimated from a sample."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import stdev

from transformers import PreTrainedTokenizerBase

from pipeline.corpus import CorpusConfig, Span, Tally, plan_spans, read_span
from pipeline.settings import ExtractRequest
from pipeline.tokens import RECORD, TokenDataset, encode, load_tokenizer
from shards.base import GdistillError
from shards.language_model import PretrainedFiles

SAMPLE_BLOCKS, BLOCK_DOCUMENTS = 8, 32
DOCUMENT_CHARACTERS = 1 << 18
"""Of a longer document only so much is tokenized, from its beginning."""


@dataclass(frozen=True)
class Estimate:
    """Tokens of one span, from a sample of its documents.

    Attributes:
        num_documents: All of the span.
        lengths: Tokens that each sampled one puts into rows.
    """

    num_documents: int
    lengths: list[float]

    @property
    def num_tokens(self) -> float:
        return self.num_documents * sum(self.lengths) / max(1, len(self.lengths))

    @property
    def standard_error(self) -> float:
        """Of ``num_tokens``; 0 if every document was looked at."""
        sampled = len(self.lengths)
        if sampled < 2 or sampled >= self.num_documents:
            return 0.0
        unseen = 1 - sampled / self.num_documents
        return self.num_documents * stdev(self.lengths) * math.sqrt(unseen / sampled)


def corpus_tokens(
    request: ExtractRequest, files: PretrainedFiles | None, given: int | None
) -> tuple[int | None, str]:
    """Tokens that a run would store and where the figure comes from; None if it cannot be told.

    Args:
        request: With its row length settled.
        files: The teacher's, for its tokenizer; None for a maze.
        given: The user's own figure for the corpus.
    """
    if given is not None:
        return given, "as given"
    tokens = request.out / "tokens"
    if (tokens / RECORD).is_file():
        dataset = TokenDataset.open(tokens)
        rows = (request.stored_rows(name, dataset.num_rows(name)) for name in dataset.splits)
        return sum(rows) * dataset.row_length, f"counted in {tokens}"
    try:
        return _estimated(request, files)
    except GdistillError as error:
        return None, f"the corpus cannot be read here ({error}); give --tokens for its own column"


def _estimated(request: ExtractRequest, files: PretrainedFiles | None) -> tuple[int, str]:
    spans = [span for span in plan_spans(request.corpus) if span.stop > span.start]
    source = request.settings.teacher.tokenizer or (files.folder if files else None)
    length = request.corpus.row_length or 0
    if source is None:
        rows = (request.stored_rows(span.split, span.stop - span.start) for span in spans)
        return sum(rows) * length, "one row a document"
    tokenizer = load_tokenizer(source)
    estimates = {span.split: estimate(span, request.corpus, tokenizer) for span in spans}
    tokens = 0.0
    for split, found in estimates.items():
        limited = split in request.row_limits
        rows = request.stored_rows(split, math.ceil(found.num_tokens / length))
        tokens += rows * length if limited else found.num_tokens
    error = math.hypot(*(found.standard_error for found in estimates.values()))
    sampled = sum(len(found.lengths) for found in estimates.values())
    documents = sum(found.num_documents for found in estimates.values())
    share = f" +- {2 * error / tokens:.1%}" if error and tokens else ""
    return round(tokens), f"estimated{share} from {sampled:,} of {documents:,} documents"


def estimate(span: Span, config: CorpusConfig, tokenizer: PreTrainedTokenizerBase) -> Estimate:
    """Tokens of a span's rows, from blocks of documents spread evenly over it."""
    texts, row_length = list(_sample(span, config)), config.row_length or 0
    if config.packing == "pad":
        return Estimate(span.stop - span.start, [float(row_length)] * len(texts))
    separate = config.separate_train if span.split == "train" else config.separate_validation
    frame = row_length / (row_length - 2) if config.packing == "wrap" else 1.0
    heads = encode(tokenizer, [text[:DOCUMENT_CHARACTERS] for text in texts], config.special_tokens)
    lengths = [
        frame * (separate + len(ids) * max(1.0, len(text) / DOCUMENT_CHARACTERS))
        for ids, text in zip(heads, texts, strict=True)
    ]
    return Estimate(span.stop - span.start, lengths)


def _sample(span: Span, config: CorpusConfig) -> Iterator[str]:
    """Texts of the sample; a document that is left out counts as empty."""
    count = span.stop - span.start
    starts, length = [span.start], count
    if count > SAMPLE_BLOCKS * BLOCK_DOCUMENTS:
        step = (count - BLOCK_DOCUMENTS) / (SAMPLE_BLOCKS - 1)
        starts = [span.start + round(block * step) for block in range(SAMPLE_BLOCKS)]
        length = BLOCK_DOCUMENTS
    for start in starts:
        stop = start + length
        block = span if stop == span.stop else replace(span, stop=stop, end=1.0)
        found = dict(read_span(block, config, Tally(), start))
        yield from (found.get(number, "") for number in range(start, stop))
