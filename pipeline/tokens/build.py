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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from pipeline.corpus.config import SPLITS, CorpusConfig, Packing
from pipeline.corpus.documents import (
    Span,
    Tally,
    open_source,
    plan_spans,
    read_span,
)
from pipeline.corpus.sources import looks_unchanged
from pipeline.tokens.dataset import RECORD, Part, PartWriter, TokenDataset, write_record
from pipeline.tokens.tokenizer import (
    Ids,
    SpecialIds,
    batches,
    encoded,
    load_tokenizer,
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
LONGEST_DEFAULT_ROW = 1024
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
        rows = []
        while documents:
            room = self.group_documents - self._num_in_group
            taken, documents = documents[:room], documents[room:]
            rows.append(self._append(taken))
            self._num_in_group += len(taken)
            if self._num_in_group == self.group_documents:
                self.finish()
        return np.concatenate(rows) if rows else self._append([])

    def _append(self, documents: list[Ids]) -> np.ndarray:
        parts = [self._rest]
        separator = np.array([] if self.separator is None else [self.separator], np.int32)
        for document in documents:
            parts += (document, separator)
        stream = np.concatenate(parts)
        body = self.row_length - (2 if self.frame else 0)
        num_rows = len(stream) // body
        self._rest = stream[num_rows * body :].copy()
        return self._framed(stream[: num_rows * body].reshape(num_rows, body))

    def _framed(self, pieces: np.ndarray) -> np.ndarray:
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
        return {
            "rest": self._rest.tolist(),
            "num_in_group": self._num_in_group,
            "num_dropped_tokens": self.num_dropped_tokens,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._rest = np.array(state["rest"], np.int32)
        self._num_in_group = state["num_in_group"]
        self.num_dropped_tokens = state["num_dropped_tokens"]


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
        return {"num_dropped_tokens": self.num_dropped_tokens}

    def restore(self, state: dict[str, Any]) -> None:
        self.num_dropped_tokens = state["num_dropped_tokens"]


def make_packer(
    packing: Packing, row_length: int, ids: SpecialIds, group_documents: int = 0
) -> StreamPacker | PadPacker:
    """The packer of one split; a UsageError if its rows are too short to hold a token of text."""
    shortest = 2 if packing == "concat" else 3
    if row_length < shortest:
        expected = f"at least {shortest} for {packing!r}"
        raise UsageError(
            "rows are too short for this packing",
            where="row_length",
            got=row_length,
            expected=expected,
        )
    if packing == "pad":
        return PadPacker(row_length, ids.bos, ids.eos)
    frame = (ids.bos, ids.eos) if packing == "wrap" else None
    return StreamPacker(row_length, ids.separator, frame, group_documents)


# What decides the rows.


def corpus_identity(
    config: CorpusConfig, tokenizer: PreTrainedTokenizerBase, known: dict[str, Any] | None
) -> dict[str, Any]:
    """Everything that decides the rows: settings, special ids, tokenizer and source content.

    Args:
        config: The corpus.
        tokenizer: Its tokenizer.
        known: Of finished rows. Files whose path, size and modification time are as noted there
            are not hashed again, and a source that has gone since is taken to be the one noted.
    """
    settings = {key: value for key, value in to_mapping(config).items() if key not in NAMES_ONLY}
    noted = (known or {}).get("sources", {})
    files = {file["path"]: file for of in noted.values() for file in of if "path" in file}
    sources: dict[str, Any] = {}
    for split in SPLITS:
        if (source := open_source(config, split)) is None:
            continue
        try:
            sources[split] = source.identity(files)
        except GdistillError as error:
            if split not in noted:
                raise
            sources[split] = noted[split]
            stderr.print(f"the corpus is gone ({error}); its token rows are used", markup=False)
    ids = {split: vars(special_ids(tokenizer, config, split)) for split in SPLITS}
    return {
        "corpus": settings,
        "special_ids": ids,
        "tokenizer": {"sha256": tokenizer_sha256(tokenizer), "vocab_size": len(tokenizer)},
        "sources": sources,
    }


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
                raise UsageError(
                    "the token rows here were made with other settings",
                    where=f"{where}: {part}.{key}",
                    got=old,
                    expected=new,
                    remedy=remedy,
                )
    for split in sorted(set(found["sources"]) | set(wanted["sources"])):
        old, new = found["sources"].get(split, []), wanted["sources"].get(split, [])
        if _contents(old) != _contents(new):
            pairs = zip(old, new, strict=False)
            other = next((b for a, b in pairs if _contents([a]) != _contents([b])), {})
            name = other.get("path") or other.get("name") or f"{len(new)} files, not {len(old)}"
            got, expected = (
                ", ".join(str(f.get("sha256") or f.get("fingerprint"))[:12] for f in files)
                for files in (new, old)
            )
            raise GdistillError(
                "the corpus is not the one that was tokenized",
                where=f"{where}: {split}: {name}",
                got=f"content {got or 'none'}",
                expected=f"content {expected or 'none'}",
                remedy=remedy,
            )


def _contents(files: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Files by their content; other sources by all that is noted of them."""
    return [{"sha256": file["sha256"]} if "path" in file else file for file in files]


# The stage.


@dataclass
class _Progress:
    """What the journal holds: how far each split has come."""

    span: int = 0
    next_document: int | None = None
    packer: dict[str, Any] | None = None
    parts: dict[str, list[Part]] = field(default_factory=dict)
    tallies: dict[str, Tally] = field(default_factory=dict)
    num_dropped_tokens: dict[str, int] = field(default_factory=dict)
    num_special_tokens: dict[str, int] = field(default_factory=dict)
    was_cut: dict[str, bool] = field(default_factory=dict)


def prepare_tokens(
    config: CorpusConfig,
    tokenizer: PreTrainedTokenizerBase | str | Path,
    out: Path,
    *,
    limits: Limits | None = None,
    main_process: bool = True,
) -> TokenDataset:
    """Tokenize and pack a corpus into ``out/tokens``, or open what is already there.

    Processes that call this for one ``out`` at the same time wait for the first of them.

    Args:
        config: The corpus; without a row length, the tokenizer's own limit or 1024.
        tokenizer: A fast tokenizer, or where to load it from (a teacher).
        out: The run's folder.
        limits: The most rows of a split; of the corpus no more is tokenized than fills them.
        main_process: Whether to show progress.

    Raises:
        UsageError: For settings that do not fit, or differ from those of the rows already there.
        GdistillError: If the corpus is unreadable, has no documents, changed since it was
            tokenized or while it was read, or fills not one row.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        tokenizer = load_tokenizer(tokenizer)
    if config.row_length is None:
        length = int(min(tokenizer.model_max_length, LONGEST_DEFAULT_ROW))
        config = replace(config, row_length=length)
    limits = limits or {}
    try:
        out.mkdir(parents=True, exist_ok=True)
        with file_claim(out / ".tokens.lock", wait=True):
            if (out / "tokens").exists():
                return _finished(config, tokenizer, out / "tokens", limits)
            return _build(config, tokenizer, out, dict(limits), main_process)
    except OSError as error:
        raise GdistillError("cannot write the token rows", where=out, got=error) from error


def _finished(
    config: CorpusConfig, tokenizer: PreTrainedTokenizerBase, done: Path, limits: Limits
) -> TokenDataset:
    """The rows that are there, if they are the ones asked for."""
    dataset = TokenDataset.open(done)
    wanted = corpus_identity(config, tokenizer, dataset.record["identity"])
    check_identity(dataset.record["identity"], wanted, done)
    for split in dataset.splits:
        limit, rows = limits.get(split), dataset.num_rows(split)
        if dataset.record["splits"][split].get("was_cut") and (limit is None or limit > rows):
            raise UsageError(
                "the token rows here are only the first ones of the corpus",
                where=f"{done}: {split}",
                got=f"{rows} rows",
                expected="all of them" if limit is None else limit,
                remedy=f"ask for as many, choose another output folder, or remove {done}",
            )
    return dataset


def _build(
    config: CorpusConfig,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    limits: Limits,
    main_process: bool,
) -> TokenDataset:
    work = out / ".tokens.partial"
    spans = plan_spans(config)
    identity = corpus_identity(config, tokenizer, None)
    progress = _resume(work, {**identity, "limits": limits})
    with progress_bar("tokenize", None, main_process=main_process) as bar:
        for index in range(progress.span, len(spans)):
            note = partial(_save, work, {**identity, "limits": limits}, progress)
            split, limit = spans[index].split, limits.get(spans[index].split)
            _tokenize_span(
                spans[index], config, tokenizer, work / split, limit, progress, bar, note
            )
            progress.span, progress.next_document, progress.packer = index + 1, None, None
            note()
    files = [file for files in identity["sources"].values() for file in files]
    if not all(looks_unchanged(file) for file in files if "path" in file):
        raise GdistillError(
            "the corpus changed while it was read",
            where=config.source,
            remedy=f"remove {work} and run again",
        )
    _finish(config, tokenizer, work, identity, progress)
    publish_folder(work, out / "tokens")
    return TokenDataset.open(out / "tokens")


def _resume(work: Path, identity: dict[str, Any]) -> _Progress:
    """Where an interrupted run of the same identity stopped, or the beginning."""
    try:
        journal = json.loads((work / JOURNAL).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        return _Progress()
    found = journal.pop("identity")
    check_identity(found, identity, work)
    if found.get("limits") != identity["limits"]:
        raise UsageError(
            "another number of rows is being tokenized here",
            where=work,
            got=found.get("limits"),
            expected=identity["limits"],
            remedy=f"finish that run with its --rows, or remove {work}",
        )
    journal["parts"] = {
        split: [Part(**part) for part in parts] for split, parts in journal["parts"].items()
    }
    journal["tallies"] = {split: Tally(**tally) for split, tally in journal["tallies"].items()}
    return _Progress(**journal)


def _save(work: Path, identity: dict[str, Any], progress: _Progress) -> None:
    write_json_atomic(work / JOURNAL, {**asdict(progress), "identity": identity})


def _tokenize_span(
    span: Span,
    config: CorpusConfig,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    limit: int | None,
    progress: _Progress,
    bar: Bar,
    note: Callable[[], None],
) -> None:
    """Write the parts of one split, noting every closed part in the journal."""
    assert config.row_length is not None
    split, parts = span.split, progress.parts.setdefault(span.split, [])
    ids = special_ids(tokenizer, config, split)
    packer = make_packer(config.packing, config.row_length, ids, config.group_documents)
    if progress.packer is not None:
        packer.restore(progress.packer)
    writer = PartWriter(folder, config.row_length, len(parts))
    num_left = math.inf if limit is None else limit - sum(part.num_rows for part in parts)
    tally, specials = progress.tallies.get(split, Tally()), special_token_pattern(tokenizer)
    documents = read_span(span, config, tally, progress.next_document) if num_left else iter(())
    texts = batches(documents, tally, num_left * config.row_length)
    for batch, encoded_documents in encoded(tokenizer, texts, config.special_tokens):
        rows = packer.pack(encoded_documents)
        writer.write(rows[: int(min(num_left, len(rows)))])
        num_left -= min(num_left, len(rows))
        found = sum(len(specials.findall(text)) for text in batch.texts) if specials else 0
        progress.num_special_tokens[split] = progress.num_special_tokens.get(split, 0) + found
        bar.advance(sum(map(len, encoded_documents)))
        bar.note(f"{split} {batch.next_document - span.start}/{span.stop - span.start} documents")
        progress.tallies[split] = batch.tally
        if not num_left:
            break
        if writer.is_full and (part := writer.close()):
            parts.append(part)
            progress.next_document, progress.packer = batch.next_document, packer.state()
            note()
    progress.was_cut[split] = not num_left
    if not progress.was_cut[split]:
        packer.finish()
        progress.tallies[split] = tally
    if part := writer.close():
        parts.append(part)
    progress.num_dropped_tokens[split] = packer.num_dropped_tokens


def _finish(
    config: CorpusConfig,
    tokenizer: PreTrainedTokenizerBase,
    work: Path,
    identity: dict[str, Any],
    progress: _Progress,
) -> None:
    """Write ``tokens.json`` and the tokenizer; refuse a data set without a row."""
    parts = {split: progress.parts.get(split, []) for split in SPLITS}
    if not any(parts.values()):
        raise GdistillError(
            "the corpus does not fill one row",
            where=config.source,
            got=f"{sum(progress.num_dropped_tokens.values())} tokens",
            expected=f"at least {config.row_length}",
            remedy="choose a shorter row_length",
        )
    ids = special_ids(tokenizer, config)
    counts = {
        split: {
            "num_dropped_tokens": progress.num_dropped_tokens.get(split, 0),
            "num_special_tokens": progress.num_special_tokens.get(split, 0),
            "was_cut": progress.was_cut.get(split, False),
            **asdict(progress.tallies.get(split, Tally())),
        }
        for split in SPLITS
    }
    border_ids = {"bos_id": ids.bos, "eos_id": ids.eos}
    write_record(work, parts, counts, identity, to_mapping(config), tokenizer, border_ids)
    (work / JOURNAL).unlink(missing_ok=True)
    for name in (JOURNAL, RECORD):  # of a process that was killed while it wrote
        discard_leftovers(work / name)


def write_given_rows(
    blocks: Mapping[str, Iterable[np.ndarray]],
    row_length: int,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    corpus: Mapping[str, Any],
) -> TokenDataset:
    """Write ``out/tokens`` from rows, or open what is there if it came from the same corpus.

    Args:
        blocks: Split -> blocks of rows, [n, L] int32 each; read only if they are needed.
        row_length: L.
        tokenizer: Whose ids the rows hold.
        out: The run's folder.
        corpus: What the rows are, with a ``source``: their identity.

    Raises:
        UsageError: If ``out/tokens`` holds rows of another corpus.
    """
    identity = {
        "corpus": dict(corpus),
        "special_ids": {},
        "tokenizer": {"sha256": tokenizer_sha256(tokenizer), "vocab_size": len(tokenizer)},
        "sources": {},
    }
    done, work = out / "tokens", out / ".tokens.partial"
    out.mkdir(parents=True, exist_ok=True)
    with file_claim(out / ".tokens.lock", wait=True):
        if done.exists():
            dataset = TokenDataset.open(done)
            check_identity(dataset.record["identity"], identity, done)
            return dataset
        shutil.rmtree(work, ignore_errors=True)
        parts = {}
        for split, rows in blocks.items():
            writer, closed = PartWriter(work / split, row_length), []
            for block in rows:
                writer.write(block)
                if writer.is_full:
                    closed.append(writer.close())
            parts[split] = [part for part in [*closed, writer.close()] if part is not None]
        counts = {split: {"num_dropped_tokens": 0, **asdict(Tally())} for split in parts}
        border_ids = {"bos_id": tokenizer.bos_token_id, "eos_id": tokenizer.eos_token_id}
        settings = {**corpus, "row_length": row_length}
        write_record(work, parts, counts, identity, settings, tokenizer, border_ids)
        publish_folder(work, done)
        return TokenDataset.open(done)
