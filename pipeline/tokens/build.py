"""Stage 1: corpus -> token rows on disk. A finished one is left alone, an interrupted one goes on.

Work happens in ``.tokens.partial`` beside the result; after each closed part a journal notes how
far the corpus was read, so a killed run loses at most one part's work. The finished folder is
renamed to ``tokens``.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from pipeline.corpus import (
    SPLITS,
    CorpusConfig,
    Span,
    Tally,
    plan_spans,
    read_span,
)
from pipeline.tokens.dataset import Part, TokenDataset
from pipeline.tokens.identity import check_identity, corpus_identity, sources_unchanged
from pipeline.tokens.packing import make_packer
from pipeline.tokens.tokenizer import (
    batches,
    encoded,
    load_tokenizer,
    special_ids,
    special_token_pattern,
)
from pipeline.tokens.writer import PartWriter, write_record
from shards.base import (
    Bar,
    GdistillError,
    UsageError,
    progress_bar,
    publish_folder,
    to_mapping,
    write_json_atomic,
)
from shards.storage import file_claim

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
