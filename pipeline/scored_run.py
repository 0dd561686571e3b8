"""A run of ``gdistill-extract`` whose teacher is elsewhere: an engine is asked, or has answered.

``scores:GLOB`` as the corpus reads files of rows with their log-probabilities; ``engine.url`` has a
running server score the rows of any corpus. Either way rows become token rows, stores are
``posterior``, and ledger, claims and resume are those of every extraction.
"""

from __future__ import annotations

import glob
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from pipeline.corpus.config import scheme_of
from pipeline.engine.client import Engine
from pipeline.engine.scored import ScoredRow, ScoreFiles, same_length
from pipeline.extract.loop import write_all
from pipeline.extract.manifest import build_manifest, corpus_unigram, side_files
from pipeline.extract.scores import ScoreWriter
from pipeline.report import report, write_config
from pipeline.settings import ExtractRequest
from pipeline.tokens.build import prepare_tokens, write_given_rows
from pipeline.tokens.dataset import TokenDataset
from pipeline.tokens.tokenizer import load_tokenizer
from pipeline.workers import StopRequest, Worker
from shards.atomic import require_writable, write_json_atomic
from shards.codec.posterior import PosteriorCodec
from shards.errors import UsageError
from shards.store.layout import ShardRange
from shards.store.writer import ShardWriter

ENGINE_FILE = "engine.json"
ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class FileTeacher:
    """Scores that lie in files: the rows themselves, split in two.

    Attributes:
        files: All rows; the last ``num_validation_rows`` are the validation split.
    """

    files: ScoreFiles
    num_validation_rows: int

    @property
    def splits(self) -> dict[str, range]:
        border = self.files.num_rows - self.num_validation_rows
        return {"train": range(border), "validation": range(border, self.files.num_rows)}

    def identity(self) -> dict[str, Any]:
        """Of the scores, for the manifest."""
        return {
            "id": "scores",
            "scores_sha256": self.files.sha256,
            "num_top": self.files.num_top,
        }

    def fetch(self, part: ShardRange, tokens: np.ndarray) -> Sequence[ScoredRow]:
        first = self.splits[part.split].start
        return self.files.read(first + part.start, first + part.stop)

    def rows(self, split: str, row_length: int) -> Iterator[np.ndarray]:
        """Token ids of a split, every row checked; blocks of [n, L] int32."""
        places = self.splits[split]
        for start in range(places.start, places.stop, ROWS_AT_ONCE):
            block = self.files.read(start, min(start + ROWS_AT_ONCE, places.stop))
            yield same_length(block, row_length, f"rows from {start + 1}")


@dataclass(frozen=True)
class ServerTeacher:
    """A running server that scores rows when asked."""

    engine: Engine

    def identity(self) -> dict[str, Any]:
        return self.engine.identity()

    def fetch(self, part: ShardRange, tokens: np.ndarray) -> Sequence[ScoredRow]:
        names = [f"{part.split} row {part.start + i}" for i in range(len(tokens))]
        return list(self.engine.score(tokens.tolist(), names))


def is_scored(request: ExtractRequest) -> bool:
    """Whether the teacher of this run is elsewhere."""
    return request.settings.engine.url is not None or _reads_files(request)


def _reads_files(request: ExtractRequest) -> bool:
    return scheme_of(request.corpus.source)[0] == "scores"


def run_scored(request: ExtractRequest, worker: Worker) -> list[str]:
    """Do whatever of the run is not done yet; what there is to say at the end.

    Raises:
        UsageError: If the request does not fit an engine's scores.
        GdistillError: If scores cannot be used or the engine fails; finished shards are kept.
    """
    started = time.monotonic()
    codec = require_posterior(request)
    require_writable(request.out)
    tokenizer = require_tokenizer(request)
    if _reads_files(request):
        teacher, dataset = open_files(request, codec, tokenizer)
    else:
        teacher, dataset = ask_engine(request, tokenizer, worker)
    manifest = build_manifest(request, dataset, teacher.identity())
    resources = {"unigram_log_probs": corpus_unigram(dataset)}
    sides = side_files(request.corpus, dataset)
    writer = ShardWriter.create_or_resume(request.store, manifest, resources, sides)
    write_config(request.out / "config.json", request)
    tensors = {name: torch.from_numpy(array) for name, array in resources.items()}
    work = ScoreWriter(teacher.fetch, dataset, codec, writer, tensors, StopRequest())
    write_all(work, writer.all_pending(), worker, "scores")
    seconds = time.monotonic() - started - work.seconds_waiting
    lines = report(request, dataset, writer, work.num_extracted_tokens, seconds)
    return lines if worker.is_main else []


def require_posterior(request: ExtractRequest) -> PosteriorCodec:
    """The codec, if it can be made of the likeliest tokens.

    Raises:
        UsageError: If it needs a whole distribution, or the rows are to be written by the teacher.
    """
    if request.settings.mode != "parallel":
        raise UsageError("an engine scores rows, it writes none", where="--mode", got="sequential")
    if not isinstance(request.codec, PosteriorCodec):
        raise UsageError(
            "this codec needs the teacher's whole distribution, which engines do not give",
            where="--codec",
            got=request.codec.name,
            expected="posterior",
        )
    return request.codec


def require_tokenizer(request: ExtractRequest) -> PreTrainedTokenizerBase:
    """The tokenizer of the engine's model.

    Raises:
        UsageError: If none is named.
    """
    place = request.settings.teacher.tokenizer or request.settings.teacher.location
    if place is None:
        raise UsageError(
            "whose token ids are these?",
            where="--tokenizer",
            expected="folder or hub id of the tokenizer that the engine's model uses",
        )
    return load_tokenizer(place)


def open_files(
    request: ExtractRequest, codec: PosteriorCodec, tokenizer: PreTrainedTokenizerBase
) -> tuple[FileTeacher, TokenDataset]:
    """Scored rows as a teacher, and their ids as stage 1; all of them are checked on the way."""
    pattern = scheme_of(request.corpus.source)[1]
    paths = [Path(name) for name in sorted(glob.glob(pattern))]
    if not paths:
        raise UsageError("no such file", where="--from-logprobs", got=pattern)
    files = ScoreFiles.open(paths, len(tokenizer), codec.num_entries)
    if not files.num_rows:
        raise UsageError("the files have no rows", where="--from-logprobs", got=pattern)
    held_out = round(files.num_rows * request.corpus.validation_fraction)
    teacher = FileTeacher(files, max(held_out, int(request.corpus.validation_fraction > 0)))
    row_length = request.corpus.row_length or len(files.read(0, 1)[0].token_ids)
    corpus = {"source": request.corpus.source, "sha256": files.sha256, "row_length": row_length}
    blocks = {split: teacher.rows(split, row_length) for split in teacher.splits}
    dataset = write_given_rows(blocks, row_length, tokenizer, request.out, corpus)
    return teacher, dataset


def ask_engine(
    request: ExtractRequest, tokenizer: PreTrainedTokenizerBase, worker: Worker
) -> tuple[ServerTeacher, TokenDataset]:
    """The server as a teacher, once it is known to be the one that the run began with."""
    engine = Engine(request.settings.engine, len(tokenizer))
    identity = engine.identity()  # a server that cannot be reached is told before stage 1
    request = request.with_row_length(None)
    dataset = prepare_tokens(
        request.corpus,
        tokenizer,
        request.out,
        limits=request.row_limits,
        main_process=worker.is_main,
    )
    first = dataset.read_rows("train", 0, 1)[0].tolist()
    record = request.out / ENGINE_FILE
    known = read_record(record)
    if known is None:
        (row,) = engine.score([first], ["the first row"])
        write_json_atomic(record, {**identity, "log_probs": row.token_log_probs.tolist()})
    else:
        engine.require_unchanged(first, np.asarray(known["log_probs"], np.float32))
    return ServerTeacher(engine), dataset


def read_record(path: Path) -> Mapping[str, Any] | None:
    """What an earlier run noted of the engine, if there was one."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
