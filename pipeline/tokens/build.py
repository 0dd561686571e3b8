"""Stage 1: corpus -> token rows on disk. A finished one is left alone, an interrupted one goes on.

Work happens in ``.tokens.partial`` beside the result; after each closed part a journal notes how
far the corpus was read, so a killed run loses at most one part's work. The finished folder is
renamed to ``tokens``. Documents are packed into rows of equal length::

    concat   d d d | d d S e e | e e e e      documents run on, S between them; no edges
    wrap     B d d S e e E | B e e e e S E    the same stream in pieces of L - 2, framed
    pad      B d d d E E E E                  one document per row

A row's worth of tokens that never fills up is dropped at the end of a split and counted.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from pipeline.corpus.config import MARKED, SPLITS, CorpusConfig, Packing
from pipeline.corpus.documents import Span, Tally, open_source, plan_spans, read_span
from pipeline.corpus.sources import looks_unchanged
from pipeline.tokens.chat import encode_chats
from pipeline.tokens.dataset import RECORD, Part, PartWriter, TokenDataset, write_record
from pipeline.tokens.tokenizer import (
    Ids,
    SpecialIds,
    batches,
    encode,
    encoded,
    special_ids,
    special_token_pattern,
    tokenizer_sha256,
)
from shards.atomic import discard_leftovers, publish_folder, write_json_atomic
from shards.console import Bar, progress_bar, stderr
from shards.errors import GdistillError, UsageError
from shards.settings import to_mapping
from shards.store.location import file_claim

NAMES_ONLY = ("source", "validation_source", "seed")
"""Settings that say where content is; the content itself is compared."""
JOURNAL = "journal.json"
Limits = Mapping[str, int]
"""The most rows of a split, by its name."""


@dataclass
class StreamPacker:
    """Documents joined to one stream of tokens, cut into rows: ``concat`` and ``wrap``.

    Attributes:
        row_length: Tokens of a row, L.
        separator: Id after every document, or None.
        frame: (bos, eos) around every piece of L - 2 tokens, or None for pieces of L.
        group_documents: If positive, every so many documents are packed by themselves and their
            remainder is dropped. 1000 repeats rows made with the batched ``map`` of ``datasets``,
            whose batches drop theirs.
    """

    row_length: int
    separator: int | None
    frame: tuple[int, int] | None = None
    group_documents: int = 0
    num_dropped_tokens: int = 0
    _rest: Ids = field(default_factory=lambda: np.empty(0, np.int32))
    _num_in_group: int = 0

    def pack(self, documents: list[Ids]) -> np.ndarray:
        """Rows [n, L] int32 completed by these documents; the batches' borders leave no trace."""
        if not self.group_documents:
            return self._append(documents)
        rows = [self._append([])]
        while documents:
            room = self.group_documents - self._num_in_group
            taken, documents = documents[:room], documents[room:]
            rows.append(self._append(taken))
            self._num_in_group += len(taken)
            if self._num_in_group == self.group_documents:
                self.finish()
        return np.concatenate(rows)

    def _append(self, documents: list[Ids]) -> np.ndarray:
        separator = np.array([] if self.separator is None else [self.separator], np.int32)
        stream = np.concatenate([self._rest, *(x for d in documents for x in (d, separator))])
        body = self.row_length - (2 if self.frame else 0)
        end = len(stream) // body * body
        self._rest, pieces = stream[end:].copy(), stream[:end].reshape(-1, body)
        if not self.frame:
            return pieces
        bos, eos = (np.full((len(pieces), 1), token, np.int32) for token in self.frame)
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


@dataclass
class PadPacker:
    """One document per row: bos, the document, at least one eos; longer documents are cut."""

    row_length: int
    bos: int
    eos: int
    num_dropped_tokens: int = 0

    def pack(self, documents: list[Ids]) -> np.ndarray:
        rows = np.full((len(documents), self.row_length), self.eos, np.int32)
        rows[:, 0] = self.bos
        for row, document in zip(rows, documents, strict=True):
            kept = document[: self.row_length - 2]
            row[1 : len(kept) + 1] = kept
            self.num_dropped_tokens += len(document) - len(kept)
        return rows

    def finish(self) -> None:
        """Nothing is left over."""

    def state(self) -> dict[str, Any]:
        return {"dropped": self.num_dropped_tokens}

    def restore(self, state: dict[str, Any]) -> None:
        self.num_dropped_tokens = state["dropped"]


def make_packer(
    packing: Packing, row_length: int, ids: SpecialIds, group_documents: int = 0
) -> StreamPacker | PadPacker:
    """The packer of one split; a UsageError if its rows are too short to hold a token of text."""
    shortest = 2 if packing == "concat" else 3
    if row_length < shortest:
        what, expected = "rows are too short for this packing", f"{shortest} or more, {packing!r}"
        raise UsageError(what, where="row_length", got=row_length, expected=expected)
    if packing in MARKED:  # the documents are whole rows
        return StreamPacker(row_length, None)
    if packing == "pad":
        return PadPacker(row_length, ids.bos, ids.eos)
    frame = (ids.bos, ids.eos) if packing == "wrap" else None
    return StreamPacker(row_length, ids.separator, frame, group_documents)


# What decides the rows.


def corpus_identity(
    config: CorpusConfig, tokenizer: PreTrainedTokenizerBase, known: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything that decides the rows: settings, special ids, tokenizer and source content.

    Args:
        config: The corpus.
        tokenizer: Its tokenizer.
        known: Sources of finished rows. Files whose path, size and modification time are as noted
            there are not hashed again, and a source that has gone since is taken to be that one.
    """
    settings = {key: value for key, value in to_mapping(config).items() if key not in NAMES_ONLY}
    files = {file["path"]: file for of in known.values() for file in of if "path" in file}
    sources: dict[str, Any] = {}
    for split in SPLITS:
        if (source := open_source(config, split)) is None:
            continue
        try:
            sources[split] = source.identity(files)
        except GdistillError as error:
            if split not in known:
                raise
            sources[split] = known[split]
            stderr.print(f"the corpus is gone ({error}); its token rows are used", markup=False)
    ids = {split: vars(special_ids(tokenizer, config, split)) for split in SPLITS}
    own = {"sha256": tokenizer_sha256(tokenizer), "vocab_size": len(tokenizer)}
    return {"corpus": settings, "special_ids": ids, "tokenizer": own, "sources": sources}


def check_identity(found: dict[str, Any], wanted: dict[str, Any], where: Path) -> None:
    """Refuse rows of another identity, naming the first difference.

    Raises:
        UsageError: For other settings or another tokenizer.
        GdistillError: For other source content.
    """
    remedy = f"choose another output folder, or remove {where}"
    for part in ("corpus", "special_ids", "tokenizer"):
        for key in sorted(set(found.get(part, {})) | set(wanted[part])):
            old, new = found.get(part, {}).get(key), wanted[part].get(key)
            if old != new:
                what = "the token rows here were made with other settings"
                place = f"{where}: {part}.{key}"
                raise UsageError(what, where=place, got=old, expected=new, remedy=remedy)
    for split in sorted(set(found["sources"]) | set(wanted["sources"])):
        old, new = found["sources"].get(split, []), wanted["sources"].get(split, [])
        if _contents(old) != _contents(new):
            pairs = zip(old, new, strict=False)
            other = next((b for a, b in pairs if _contents([a]) != _contents([b])), {})
            name = other.get("path") or other.get("name") or f"{len(new)} files, not {len(old)}"
            hashes = [[str(f.get("sha256") or f.get("fingerprint"))[:12] for f in files] for files in (new, old)]
            got, expected = (f"content {', '.join(each) or 'none'}" for each in hashes)
            what = "the corpus is not the one that was tokenized"
            place = f"{where}: {split}: {name}"
            raise GdistillError(what, where=place, got=got, expected=expected, remedy=remedy)


def _contents(files: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Files by their content; other sources by all that is noted of them."""
    return [{"sha256": file["sha256"]} if "path" in file else file for file in files]


# The stage.


@dataclass
class _Split:
    """What is done of one split."""

    parts: list[Part] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    num_dropped_tokens: int = 0
    num_special_tokens: int = 0
    was_cut: bool = False


@dataclass
class _Progress:
    """What the journal holds: how far the corpus was read."""

    span: int = 0
    next_document: int | None = None
    packer: dict[str, Any] | None = None
    splits: dict[str, _Split] = field(default_factory=lambda: {name: _Split() for name in SPLITS})


def prepare_tokens(
    config: CorpusConfig,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    *,
    limits: Limits | None = None,
    main_process: bool = True,
) -> TokenDataset:
    """Tokenize and pack a corpus into ``out/tokens``, or open what is already there.

    Processes that call this for one ``out`` at the same time wait for the first of them.

    Args:
        config: The corpus, with its row length settled.
        tokenizer: A fast tokenizer.
        out: The run's folder.
        limits: The most rows of a split; of the corpus no more is tokenized than fills them.
        main_process: Whether to show progress.

    Raises:
        UsageError: For settings that do not fit, or differ from those of the rows already there.
        GdistillError: If the corpus is unreadable, has no documents, changed since it was
            tokenized or while it was read, or fills not one row.
    """
    limits = dict(limits or {})
    try:
        out.mkdir(parents=True, exist_ok=True)
        with file_claim(out / ".tokens.lock", wait=True):
            if (out / "tokens").exists():
                return _finished(config, tokenizer, out / "tokens", limits)
            return _build(config, tokenizer, out, limits, main_process)
    except OSError as error:
        raise GdistillError("cannot write the token rows", where=out, got=error) from error


def _finished(config: CorpusConfig, tokenizer: PreTrainedTokenizerBase, done: Path, limits: Limits) -> TokenDataset:
    """The rows that are there, if they are the ones asked for."""
    dataset = TokenDataset.open(done)
    found = dataset.record["identity"]
    check_identity(found, corpus_identity(config, tokenizer, found["sources"]), done)
    for split in dataset.splits:
        limit, rows = limits.get(split), dataset.num_rows(split)
        if dataset.record["splits"][split].get("was_cut") and (limit is None or limit > rows):
            what, where = "the token rows here are only the first ones", f"{done}: {split}"
            got, expected = f"{rows} rows", "all of them" if limit is None else limit
            remedy = f"ask for as many, choose another output folder, or remove {done}"
            raise UsageError(what, where=where, got=got, expected=expected, remedy=remedy)
    return dataset


def _build(
    config: CorpusConfig, tokenizer: PreTrainedTokenizerBase, out: Path, limits: Limits, main_process: bool
) -> TokenDataset:
    work, spans = out / ".tokens.partial", plan_spans(config)
    identity = corpus_identity(config, tokenizer, {})
    progress = _resume(work, identity, limits)

    def save() -> None:
        known = {"identity": identity, "limits": limits}
        write_json_atomic(work / JOURNAL, {**asdict(progress), **known})

    with progress_bar("tokenize", None, main_process=main_process) as bar:
        for span in spans[progress.span :]:
            limit = limits.get(span.split, math.inf)
            _tokenize(span, config, tokenizer, work / span.split, limit, progress, bar, save)
            progress.span, progress.next_document, progress.packer = progress.span + 1, None, None
            save()
    files = [file for files in identity["sources"].values() for file in files]
    if not all(looks_unchanged(file) for file in files if "path" in file):
        what, remedy = "the corpus changed while it was read", f"remove {work} and run again"
        raise GdistillError(what, where=config.source, remedy=remedy)
    splits = progress.splits
    if not any(split.parts for split in splits.values()):
        tokens = sum(split.num_dropped_tokens for split in splits.values())
        what, remedy = "the corpus does not fill one row", "choose a shorter row_length"
        got, expected = f"{tokens} tokens", f"at least {config.row_length}"
        raise GdistillError(what, where=config.source, got=got, expected=expected, remedy=remedy)
    parts = {name: split.parts for name, split in splits.items()}
    counts = {name: {**vars(split), **asdict(split.tally)} for name, split in splits.items()}
    for count in counts.values():
        del count["tally"]
    ids = special_ids(tokenizer, config)
    border_ids = {"bos_id": ids.bos, "eos_id": ids.eos}
    write_record(work, parts, counts, identity, to_mapping(config), tokenizer, border_ids)
    (work / JOURNAL).unlink(missing_ok=True)
    for name in (JOURNAL, RECORD):  # of a process that was killed while it wrote
        discard_leftovers(work / name)
    publish_folder(work, out / "tokens")
    return TokenDataset.open(out / "tokens")


def _resume(work: Path, identity: dict[str, Any], limits: Limits) -> _Progress:
    """Where an interrupted run of the same identity stopped, or the beginning."""
    try:
        journal = json.loads((work / JOURNAL).read_text(encoding="utf-8"))
        known, found = journal.pop("identity"), journal.pop("limits")
        for name, split in journal["splits"].items():
            parts, tally = [Part(**part) for part in split["parts"]], Tally(**split["tally"])
            journal["splits"][name] = _Split(**{**split, "parts": parts, "tally": tally})
        progress = _Progress(**journal)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # none, or no journal of ours
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        return _Progress()
    check_identity(known, identity, work)
    if found != limits:
        what = "another number of rows is being tokenized here"
        remedy = f"finish that run with its --rows, or remove {work}"
        raise UsageError(what, where=work, got=found, expected=limits, remedy=remedy)
    return progress


def _tokenize(
    span: Span,
    config: CorpusConfig,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    limit: int | float,
    progress: _Progress,
    bar: Bar,
    save: Callable[[], None],
) -> None:
    """Write the parts of one split, noting every closed part in the journal."""
    length, done = config.row_length, progress.splits[span.split]
    assert length is not None
    ids = special_ids(tokenizer, config, span.split)
    packer = make_packer(config.packing, length, ids, config.group_documents)
    if progress.packer is not None:
        packer.restore(progress.packer)
    writer = PartWriter(folder, length, len(done.parts))
    num_left = limit - sum(part.num_rows for part in done.parts)
    tally, specials = done.tally, special_token_pattern(tokenizer)
    documents = read_span(span, config, tally, progress.next_document) if num_left else iter(())
    texts = batches(documents, tally, num_left * length)
    encode_texts = partial(encode, tokenizer, special_tokens=config.special_tokens)
    if config.packing in MARKED:
        encode_texts = partial(encode_chats, tokenizer, ids.eos, length)
    for batch, ids_of_texts in encoded(texts, encode_texts):
        rows = packer.pack(ids_of_texts)
        writer.write(rows[: int(min(num_left, len(rows)))])
        num_left -= min(num_left, len(rows))
        if specials:
            done.num_special_tokens += sum(len(specials.findall(text)) for text in batch.texts)
        bar.advance(sum(map(len, ids_of_texts)))
        bar.note(f"{span.split} {batch.next_document - span.start}/{span.stop - span.start} docs")
        done.tally = batch.tally
        if not num_left:
            break
        if writer.is_full and (part := writer.close()):
            done.parts.append(part)
            progress.next_document, progress.packer = batch.next_document, packer.state()
            save()
    done.was_cut = not num_left
    if not done.was_cut:
        packer.finish()
        done.tally = tally
    if part := writer.close():
        done.parts.append(part)
    done.num_dropped_tokens = packer.num_dropped_tokens
