"""Whether token rows belong to the corpus, settings and tokenizer at hand."""

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

from pipeline.corpus.config import SPLITS, CorpusConfig, Tally
from pipeline.corpus.files import looks_unchanged
from pipeline.corpus.splits import Span, open_source, plan_spans, read_span
from pipeline.tokens.dataset import Part, PartWriter, TokenDataset, write_record
from pipeline.tokens.packing import make_packer
from pipeline.tokens.tokenizer import (
    batches,
    encoded,
    load_tokenizer,
    special_ids,
    special_token_pattern,
    tokenizer_sha256,
)
from shards.atomic import publish_folder, write_json_atomic
from shards.console import Bar, progress_bar
from shards.errors import GdistillError, UsageError
from shards.settings import to_mapping
from shards.store.location import file_claim

NAMES_ONLY = ("source", "validation_source", "seed")
"""Settings that say where content is; the content itself is compared."""


def corpus_identity(
    config: CorpusConfig, tokenizer: PreTrainedTokenizerBase, known: dict[str, Any] | None
) -> dict[str, Any]:
    """Everything that decides the rows: settings, special ids, tokenizer and source content.

    Args:
        known: An earlier identity. Files whose path, size and modification time are as noted
            there are not hashed again.
    """
    settings = {key: value for key, value in to_mapping(config).items() if key not in NAMES_ONLY}
    known_files = {
        file["path"]: file
        for files in (known or {}).get("sources", {}).values()
        for file in files
        if "path" in file
    }
    sources: dict[str, Any] = {}
    for split in ("train", "validation"):
        source = open_source(config, split)
        if source is not None:
            sources[split] = source.identity(known_files)
    return {
        "corpus": settings,
        "special_ids": {
            split: vars(special_ids(tokenizer, config, split)) for split in ("train", "validation")
        },
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
            raise GdistillError(
                "the corpus is not the one that was tokenized",
                where=f"{where}: {split}: {_first_difference(old, new)}",
                got=f"content {_digests(new)}",
                expected=f"content {_digests(old)}",
                remedy=remedy,
            )


def sources_unchanged(identity: dict[str, Any]) -> bool:
    """Whether every source file still has its noted size and modification time."""
    files = [file for files in identity["sources"].values() for file in files]
    return all(looks_unchanged(file) for file in files if "path" in file)


def _contents(files: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Files by their content; other sources by all they tell."""
    return [{"sha256": file["sha256"]} if "path" in file else file for file in files]


def _first_difference(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> str:
    for before, after in zip(old, new, strict=False):
        if _contents([before]) != _contents([after]):
            return str(after.get("path") or after.get("name"))
    return f"{len(new)} files instead of {len(old)}"


def _digests(files: list[dict[str, Any]]) -> str:
    """Short forms of the content, of what has one."""
    digests = [file.get("sha256") or file.get("fingerprint") for file in files]
    return ", ".join(str(digest)[:12] for digest in digests if digest) or "none"


# Stage 1: corpus -> token rows on disk. A finished one is left alone, an interrupted one goes on.
#
# Work happens in ``.tokens.partial`` beside the result; after each closed part a journal notes how
# far the corpus was read, so a killed run loses at most one part's work. The finished folder is
# renamed to ``tokens``.


JOURNAL = "journal.json"
LONGEST_DEFAULT_ROW = 1024
Limits = Mapping[str, int]
"""The most rows of a split, by its name."""


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
    if not sources_unchanged(identity):
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


# Rows that are packed already (an engine scored them, say) as a token data set like any other.


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
