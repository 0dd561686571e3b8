"""Stage 1: corpus -> rows of token ids on disk. A finished one is left alone, an interrupted one goes on.

::

    tokens/
      tokens.json               what was tokenized, how, and the fingerprint of the rows
      tokenizer/                the tokenizer's files
      train/part-00000.parquet  column input_ids: fixed_size_list<int32>[L]
      validation/part-00000.parquet

Work happens in ``.tokens.partial`` beside it; after each closed part a journal notes how far the
corpus was read, so a killed run loses at most one part's work. The finished folder is renamed to
``tokens``: it appears complete, never before.
"""

from __future__ import annotations

import bisect
import hashlib
import io
import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import transformers
from jaxtyping import Bool, Int
from transformers import PreTrainedTokenizerBase

from pipeline.corpus.config import MARKED, SPLITS, CorpusConfig
from pipeline.corpus.documents import Span, Tally, looks_unchanged, open_source, plan_spans, read_span
from pipeline.tokens.chat import encode_chats
from pipeline.tokens.tokenizer import (
    Packer,
    batches,
    encode,
    encoded,
    special_ids,
    special_token_pattern,
    tokenizer_sha256,
)
from shards.atomic import (
    canonical_json,
    discard_leftovers,
    file_claim,
    publish_folder,
    write_bytes_atomic,
    write_json_atomic,
)
from shards.console import Bar, progress_bar, stderr
from shards.errors import GdistillError, IntegrityError, UsageError, safe_name
from shards.settings import flatten, to_mapping

PART_TOKENS = 1 << 24
"""A part is closed at the first batch border behind so many tokens."""
ROW_GROUP_TOKENS = 1 << 20
FORMAT_VERSION = 1
RECORD, JOURNAL = "tokens.json", "journal.json"
COLUMN = "input_ids"
FIELDS = (
    "fingerprint", "identity", "corpus", "row_length", "vocab_size", "bos_id", "eos_id",
    "tokenizer", "splits",
)  # fmt: skip
"""What ``tokens.json`` must hold beside its format version."""
NAMES_ONLY = ("source", "validation_source", "seed")
"""Settings that say where content is; the content itself is compared."""
Limits = Mapping[str, int]
"""The most rows of a split, by its name."""


def rows_per_group(row_length: int) -> int:
    """Rows of one Parquet row group: what one read brings into memory."""
    return max(1, ROW_GROUP_TOKENS // row_length)


@dataclass(frozen=True)
class Part:
    """One Parquet file of a split; the hash is of its ids as little-endian int32, row by row."""

    name: str
    num_rows: int
    num_bytes: int
    tokens_sha256: str
    max_token_id: int


class PartWriter:
    """Gathers rows to parts of one split, of which an earlier run closed some; a closed part is on disk whole."""

    def __init__(self, folder: Path, row_length: int, num_closed: int = 0) -> None:
        self.folder, self.row_length, self._number = folder, row_length, num_closed
        self._rows: list[np.ndarray] = []
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".*.tmp"):
            leftover.unlink()

    @property
    def is_full(self) -> bool:
        """Whether the open part has reached its size."""
        return sum(map(len, self._rows)) * self.row_length >= PART_TOKENS

    def write(self, rows: np.ndarray) -> None:
        """Append rows [n, L] int32."""
        if len(rows):
            self._rows.append(rows)

    def close(self) -> Part | None:
        """Write the open part durably and start the next; None if it has no rows."""
        if not self._rows:
            return None
        rows = np.ascontiguousarray(np.concatenate(self._rows), "<i4")
        kind, name, file = pa.list_(pa.int32(), self.row_length), f"part-{self._number:05d}.parquet", io.BytesIO()
        column = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), type=kind)
        table = pa.Table.from_arrays([column], schema=pa.schema([pa.field(COLUMN, kind, nullable=False)]))
        pq.write_table(
            table,
            file,
            row_group_size=rows_per_group(self.row_length),
            compression="zstd",
            use_dictionary=False,
            write_page_checksum=True,
        )
        write_bytes_atomic(self.folder / name, file.getvalue())
        self._rows, self._number = [], self._number + 1
        largest = max(int(rows.max()), int((~rows).max()))
        return Part(name, len(rows), len(file.getvalue()), hashlib.sha256(rows.data).hexdigest(), largest)


@dataclass
class Split:
    """What is done of one split."""

    parts: list[Part] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    num_dropped_tokens: int = 0
    num_special_tokens: int = 0
    was_cut: bool = False


def publish_rows(
    out: Path,
    splits: Mapping[str, Split],
    identity: Mapping[str, Any],
    corpus: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    border_ids: Mapping[str, Any],
) -> TokenDataset:
    """Make ``out/tokens`` of the parts in ``.tokens.partial``, by split.

    ``identity`` decides the rows; ``corpus`` holds the corpus's settings, ``row_length`` among them, and
    ``border_ids`` are ``bos_id`` and ``eos_id``.
    """
    work = out / ".tokens.partial"
    row_length = corpus["row_length"]
    tokenizer.save_pretrained(work / "tokenizer")
    content = {name: [[part.num_rows, part.tokens_sha256] for part in split.parts] for name, split in splits.items()}
    # Equal rows in equal parts, equal fingerprint.
    digest = hashlib.sha256(canonical_json({"row_length": row_length, "splits": content}))
    record = {
        "format_version": FORMAT_VERSION,
        "fingerprint": digest.hexdigest(),
        "identity": identity,
        "corpus": corpus,
        "row_length": row_length,
        "vocab_size": len(tokenizer),
        **border_ids,
        "tokenizer": {"id": str(tokenizer.name_or_path), "sha256": tokenizer_sha256(tokenizer)},
        "splits": {name: _counts(split, row_length) for name, split in splits.items()},
        "versions": {"transformers": transformers.__version__},
    }
    write_json_atomic(work / RECORD, record)
    (work / JOURNAL).unlink(missing_ok=True)
    for name in (JOURNAL, RECORD):  # of a process that was killed while it wrote
        discard_leftovers(work / name)
    publish_folder(work, out / "tokens")
    return TokenDataset.open(out / "tokens")


def _counts(split: Split, row_length: int) -> dict[str, Any]:
    values = asdict(split)
    rows = sum(part.num_rows for part in split.parts)
    return {"num_rows": rows, "num_tokens": rows * row_length, **values.pop("tally"), **values}


class TokenDataset:
    """Reader of a finished stage 1; see :meth:`open`. Memory: two row groups at a time."""

    def __init__(self, path: Path, record: dict[str, Any]) -> None:
        self.path, self.record, self.tokenizer_path = path, record, path / "tokenizer"
        self.fingerprint: str = record["fingerprint"]
        self.row_length: int = record["row_length"]
        self.vocab_size: int = record["vocab_size"]
        self.bos_id: int = record["bos_id"]
        self.eos_id: int = record["eos_id"]
        self.splits: tuple[str, ...] = tuple(record["splits"])
        self._parts = {split: [Part(**part) for part in found["parts"]] for split, found in record["splits"].items()}
        every = [part for parts in self._parts.values() for part in parts]
        self.max_token_id = max((part.max_token_id for part in every), default=-1)
        self._group = lru_cache(maxsize=2)(self._read_group)

    @classmethod
    def open(cls, path: str | Path) -> TokenDataset:
        """Open a ``tokens`` folder; every part must be there at its noted size."""
        path = Path(path)
        file, remedy = path / RECORD, f"remove {path} and run stage 1 again"
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
            version = record.get("format_version")
        except OSError as error:
            raise UsageError("no finished token data set", where=path, expected=f"a {RECORD} in it") from error
        except (ValueError, RecursionError, AttributeError) as error:
            raise IntegrityError("damaged file", where=file, got=error, remedy=remedy) from error
        if version != FORMAT_VERSION:
            what, remedy = "token rows of another format version", "run stage 1 in a new folder"
            raise UsageError(what, where=path, got=version, expected=FORMAT_VERSION, remedy=remedy)
        if missing := [name for name in FIELDS if name not in record]:
            raise IntegrityError("a field is missing", where=file, got=missing[0], remedy=remedy)
        try:
            dataset = cls(path, record)
            every = [(split, part) for split in dataset.splits for part in dataset.parts(split)]
            # The folder may come from anywhere.
            parts = {safe_name("/".join((split, part.name))): part for split, part in every}
        except (KeyError, TypeError, AttributeError, UsageError) as error:
            raise IntegrityError("malformed list of parts", where=file, got=str(error)[:400], remedy=remedy) from error
        for name, part in parts.items():
            place = path / name
            size = place.stat().st_size if place.is_file() else None
            if size != part.num_bytes:
                what = f"token rows are {'missing' if size is None else 'truncated'}"
                got, expected = f"{size} bytes", f"{part.num_bytes} bytes"
                raise IntegrityError(what, where=place, got=got, expected=expected, remedy=remedy)
        return dataset

    def parts(self, split: str) -> list[Part]:
        """The files of a split, in row order."""
        if split not in self._parts:
            raise UsageError("unknown split", where=self.path, got=split, expected=self.splits)
        return self._parts[split]

    def num_rows(self, split: str) -> int:
        """Rows of a split."""
        return sum(part.num_rows for part in self.parts(split))

    @property
    def packing(self) -> str:
        """How documents became rows; ``chat`` and ``prompts`` rows are marked."""
        return self.record["corpus"].get("packing", "concat")

    def read_rows(self, split: str, start: int, stop: int) -> np.ndarray:
        """Token ids of rows start..stop-1 of a split; [stop - start, L] int32."""
        rows = self.read_marked(split, start, stop)
        return unmarked(rows)[0] if self.packing in MARKED else rows

    def read_marked(self, split: str, start: int, stop: int) -> np.ndarray:
        """The same rows, with -1 - id where a token does not count (:mod:`pipeline.tokens.chat`)."""
        if not 0 <= start <= stop <= self.num_rows(split):
            raise IndexError(f"rows {start}..{stop} of {self.num_rows(split)} in {split!r}")
        blocks = [np.empty((0, self.row_length), np.int32)]
        firsts = [*accumulate((part.num_rows for part in self._parts[split]), initial=0)]
        while start < stop:
            part = bisect.bisect_right(firsts, start) - 1
            group, offset = divmod(start - firsts[part], rows_per_group(self.row_length))
            blocks.append(self._group(split, part, group)[offset : offset + stop - start])
            start += len(blocks[-1])
        return np.concatenate(blocks)

    def _read_group(self, split: str, part: int, group: int) -> np.ndarray:
        path = self.path / split / self._parts[split][part].name
        try:
            file = pq.ParquetFile(path, page_checksum_verification=True)
            column = file.read_row_group(group, columns=[COLUMN]).column(0).combine_chunks()
        except (pa.ArrowException, OSError) as error:
            raise IntegrityError("damaged token rows", where=f"{path}, row group {group}", got=error) from error
        return column.flatten().to_numpy(zero_copy_only=False).reshape(-1, self.row_length)


def unmarked(rows: Int[np.ndarray, "*s"]) -> tuple[Int[np.ndarray, "*s"], Bool[np.ndarray, "*s"]]:
    """Token ids of marked rows, and which of them count."""
    counted = rows >= 0
    return np.where(counted, rows, ~rows), counted


# What decides the rows.


def corpus_identity(
    config: CorpusConfig, tokenizer: PreTrainedTokenizerBase, known: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything that decides the rows: settings, special ids, tokenizer and source content.

    ``known`` are sources of finished rows: files whose path, size and modification time are as noted
    there are not hashed again, and a source that has gone since is taken to be that one.
    """
    settings = {key: value for key, value in to_mapping(config).items() if key not in NAMES_ONLY}
    files = {file["path"]: file for of in known.values() for file in of if "path" in file}
    sources: dict[str, Any] = {}
    for split in SPLITS:
        try:
            if (source := open_source(config, split)) is not None:
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
    """Refuse rows of another identity, naming the first difference."""
    remedy = f"choose another output folder, or remove {where}"
    parts = ("corpus", "special_ids", "tokenizer")
    old, new = (flatten({part: of.get(part, {}) for part in parts}) for of in (found, wanted))
    for key in sorted(old | new):
        if old.get(key) != new.get(key):
            what, got, expected = "the token rows here were made with other settings", old.get(key), new.get(key)
            raise UsageError(what, where=f"{where}: {key}", got=got, expected=expected, remedy=remedy)
    for split in sorted(found["sources"] | wanted["sources"]):
        files = (of["sources"].get(split, []) for of in (wanted, found))
        for new, old in zip_longest(*files, fillvalue={}):
            if _content(old) != _content(new):
                name = (new or old).get("path") or (new or old).get("name")
                hashes = (str(of.get("sha256") or of.get("fingerprint") or "none")[:12] for of in (new, old))
                got, expected = (f"content {each}" for each in hashes)
                what, place = "the corpus is not the one that was tokenized", f"{where}: {split}: {name}"
                raise GdistillError(what, where=place, got=got, expected=expected, remedy=remedy)


def _content(file: dict[str, Any]) -> dict[str, Any]:
    """A file by its content; another source by all that is noted of it."""
    return {"sha256": file["sha256"]} if "path" in file else file


# The stage.


@dataclass
class _Progress:
    """What the journal holds: how far the corpus was read."""

    span: int = 0
    next_document: int | None = None
    packer: dict[str, Any] | None = None
    splits: dict[str, Split] = field(default_factory=lambda: {name: Split() for name in SPLITS})


def prepare_tokens(
    config: CorpusConfig,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    *,
    limits: Limits | None = None,
    main_process: bool = True,
) -> TokenDataset:
    """Tokenize and pack a corpus into ``out/tokens``, or open what is already there.

    Processes that call this for one ``out`` at the same time wait for the first of them. Of the corpus no
    more is tokenized than fills the ``limits``, the most rows of a split.

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
    ids = special_ids(tokenizer, config)
    border_ids = {"bos_id": ids.bos, "eos_id": ids.eos}
    return publish_rows(out, splits, identity, to_mapping(config), tokenizer, border_ids)


def _resume(work: Path, identity: dict[str, Any], limits: Limits) -> _Progress:
    """Where an interrupted run of the same identity stopped, or the beginning."""
    try:
        journal = json.loads((work / JOURNAL).read_text(encoding="utf-8"))
        known, found = journal.pop("identity"), journal.pop("limits")
        for name, split in journal["splits"].items():
            parts, tally = [Part(**part) for part in split["parts"]], Tally(**split["tally"])
            journal["splits"][name] = Split(**{**split, "parts": parts, "tally": tally})
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
    packer = Packer(config.packing, length, ids, config.group_documents)
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
