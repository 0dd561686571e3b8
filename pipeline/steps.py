"""Steps of every run, whoever scores its rows: token rows first, config and summary at the end."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from pipeline.corpus.documents import Tally
from pipeline.settings import ExtractRequest
from pipeline.tokens.build import prepare_tokens
from pipeline.tokens.dataset import TokenDataset
from pipeline.workers import Worker
from shards.atomic import write_json_atomic
from shards.errors import GdistillError, UsageError
from shards.store.location import file_claim
from shards.store.store import ShardStore
from shards.store.writer import ShardWriter
from shards.tools.description import Description


def tokenize(
    request: ExtractRequest, tokenizer: PreTrainedTokenizerBase, worker: Worker
) -> TokenDataset:
    """Stage 1, or its rows if they are there."""
    dataset = prepare_tokens(
        request.corpus,
        tokenizer,
        request.out,
        limits=request.row_limits,
        main_process=worker.is_main,
    )
    if dataset.max_token_id >= dataset.vocab_size:
        raise UsageError(
            "token id outside the vocabulary",
            where=dataset.path,
            got=dataset.max_token_id,
            expected=f"below {dataset.vocab_size}",
        )
    return dataset


def corpus_lines(dataset: TokenDataset) -> list[str]:
    """What stage 1 read, left out and repaired, split by split."""
    lines = []
    for split, record in dataset.record["splits"].items():
        tally = Tally(**{name: record[name] for name in vars(Tally())})
        documents = [f"{tally.num_documents:,} documents"] * bool(tally.num_documents)
        parts = [*documents, f"{record['num_rows']:,} rows"]  # scored rows come without documents
        notes = {
            "empty documents left out": tally.num_empty,
            "documents of bad UTF-8": tally.num_bad_utf8,
            "control characters kept": tally.num_control_characters,
            "special tokens spelled out in the text": record.get("num_special_tokens", 0),
            "tokens left over": record["num_dropped_tokens"],
        }
        parts += [f"{count:,} {what}" for what, count in notes.items() if count]
        parts += ["cut there, as asked"] * record.get("was_cut", False)
        lines.append(f"  {split:<14} {', '.join(parts)}")
    return lines


def write_config(path: Path, request: ExtractRequest) -> None:
    """The resolved request beside its outputs; a file that says the same is left alone."""
    values = request.to_mapping()
    with contextlib.suppress(OSError, ValueError):
        if json.loads(path.read_text(encoding="utf-8")) == values:
            return
    write_json_atomic(path, values)


def report(
    request: ExtractRequest,
    dataset: TokenDataset,
    writer: ShardWriter,
    num_tokens: int,
    seconds: float,
) -> list[str]:
    """The store in numbers, kept as ``summary.json`` too.

    ``num_tokens`` there counts position 0; ``shard_bytes`` are those of ``num_bytes`` that grow
    with the corpus, and what ``bytes_per_token`` is of; ``fp16_bytes_per_token`` is what the noise
    as fp16 vectors would take, 2 V.

    Args:
        request: What was asked for.
        dataset: The rows.
        writer: The store's.
        num_tokens: Those that this process extracted.
        seconds: The time that took it.

    Raises:
        GdistillError: If files of finished shards went missing meanwhile.
    """
    if not writer.is_complete():
        raise GdistillError(
            "finished shards went missing while the run was on",
            where=request.store,
            remedy="run the same command again",
        )
    store = ShardStore.open(request.store)
    found = Description.of(store)
    per_token, fp16 = found.shard_bytes / found.num_tokens, found.fp16_vector_bytes_per_token
    figures: Mapping[str, int | float] = {
        "num_rows": sum(store.manifest.splits.values()),
        "num_tokens": found.num_tokens,
        "num_bytes": found.num_bytes,
        "shard_bytes": found.shard_bytes,
        "fp16_bytes_per_token": fp16,
        "bytes_per_token": per_token,
        "fp16_ratio": fp16 / per_token,
    }
    done = "nothing was left to do"
    if num_tokens:
        done = f"{num_tokens / seconds:,.0f} tokens/s"
        record = {
            **figures,
            "seconds": seconds,
            "num_tokens_of_this_process": num_tokens,
            "tokens_per_second": num_tokens / seconds,
        }
        # All workers end at once; one that finds another at it leaves it to that one.
        with file_claim(request.out / ".summary.lock", wait=False) as mine:
            if mine:
                write_json_atomic(request.out / "summary.json", record)
    return [
        "corpus",
        *corpus_lines(dataset),
        f"store {request.store}",
        f"  rows           {figures['num_rows']:,}",
        f"  tokens         {figures['num_tokens']:,}",
        f"  bytes          {figures['num_bytes']:,}",
        f"  bytes/token    {per_token:.1f}",
        f"  fp16 vectors   {fp16:,} bytes/token: {fp16 / per_token:.1f} x this store",
        f"  seconds        {seconds:.1f} ({done})",
    ]
