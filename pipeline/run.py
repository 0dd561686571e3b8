"""One run of ``gdistill-extract``: teacher, stage 1, stage 2, summary; whatever is done stays."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from pipeline.corpus import scheme_of
from pipeline.extract import (
    CorpusRows,
    Extractor,
    Process,
    RowSource,
    build_manifest,
    corpus_unigram,
    resources_on,
    rows_per_unit,
    settle_way,
    side_files,
    teacher_identity,
    unchanged,
)
from pipeline.maze import (
    MOVES,
    MazeTeacherConfig,
    demo_teacher_config,
    load_maze,
    train_maze_teacher,
)
from pipeline.report import report, require_writable, write_config
from pipeline.scored_run import is_scored, run_scored
from pipeline.settings import ExtractRequest, TeacherSettings
from pipeline.teacher import (
    BatchSize,
    GeneratedRows,
    ProcessOutput,
    Teacher,
    check_row_length,
    check_vocabulary,
)
from pipeline.tokens import RECORD, TokenDataset, load_tokenizer, prepare_tokens
from pipeline.workers import Stopped, StopRequest, Worker
from shards.base import GdistillError, UsageError, progress_bar
from shards.language_model import PretrainedFiles, find_pretrained, resolve_device
from shards.storage import file_claim, open_location
from shards.store import MANIFEST_FILE, Manifest, ShardRange, ShardStore, ShardWriter


@dataclass
class LazyTeacher:
    """The teacher, loaded when it is first needed: never, where nothing is left to do."""

    files: PretrainedFiles
    settings: TeacherSettings
    vocab_size: int
    device: torch.device

    @cached_property
    def loaded(self) -> Teacher:
        return Teacher.load(
            self.files,
            self.settings.dtype,
            self.device,
            vocab_size=self.vocab_size,
            attention=self.settings.attention,
            compiled=self.settings.compiled,
        )


@dataclass(frozen=True)
class Inputs:
    """What stage 2 starts from.

    Attributes:
        request: With its row length settled.
        teacher: Found and checked; its weights are loaded when first needed.
        dataset: The token rows.
    """

    request: ExtractRequest
    teacher: LazyTeacher
    dataset: TokenDataset


def run_extraction(request: ExtractRequest, worker: Worker) -> list[str]:
    """Do whatever of the run is not done yet; what there is to say at the end.

    One process of several speaks for all: the others return nothing to say.

    Raises:
        UsageError: If the request cannot be met, or differs from what is there.
        GdistillError: If something fails on the way; finished shards are kept.
    """
    if is_scored(request):
        return run_scored(request, worker)
    started = time.monotonic()
    device = resolve_device(worker.device(request.settings.device))
    require_writable(request.out)
    begun = require_store_place(request.store)
    request, tokenizer, teacher = prepare_teacher(request, device)
    if not (begun and tokenized(request.out)):
        _ = teacher.loaded  # what its weights are refused for comes before hours of tokenization
    dataset = prepare_tokens(
        request.corpus,
        tokenizer,
        request.out,
        limits=request.row_limits,
        main_process=worker.is_main,
    )
    require_known_ids(dataset)
    inputs = Inputs(request, teacher, dataset)
    writer, resources = begin_store(inputs)
    pending = [shard for split in writer.manifest.splits for shard in writer.pending(split)]
    num_tokens, waiting = 0, 0.0
    if pending:
        done = extract(inputs, writer, resources, pending, worker)
        num_tokens, waiting = done.num_extracted_tokens, done.seconds_waiting
    seconds = time.monotonic() - started - waiting
    lines = report(request, dataset, writer, num_tokens, seconds)
    return lines if worker.is_main else []


def prepare_teacher(
    request: ExtractRequest, device: torch.device
) -> tuple[ExtractRequest, PreTrainedTokenizerBase, LazyTeacher]:
    """Find or train the teacher, and check all that its files tell.

    Returns:
        The request with its row length settled, the tokenizer, the teacher not yet loaded.

    Raises:
        UsageError: If teacher, tokenizer, rows, corpus and store do not fit together.
    """
    settings = request.settings.teacher
    files = find_pretrained(
        settings.location or train_own_teacher(request),
        revision=settings.revision,
        trust_remote_code=settings.trust_remote_code,
    )
    request = request.with_row_length(files.context_length)
    assert request.corpus.row_length is not None
    check_row_length(files, request.corpus.row_length)
    place = settings.tokenizer or files.folder
    tokenizer = load_tokenizer(place)
    check_vocabulary(files.num_logits, len(tokenizer), f"{place} and {files.name}")
    if scheme_of(request.corpus.source)[0] == "maze":
        check_maze_vocabulary(tokenizer, files.name)
    arrays = request.codec.array_specs(len(tokenizer), files.hidden_size)
    rows_per_unit(request.corpus.row_length, arrays, request.settings.store)
    return request, tokenizer, LazyTeacher(files, settings, len(tokenizer), device)


def check_maze_vocabulary(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Refuse a teacher that does not speak in moves.

    Raises:
        UsageError: If it is one.
    """
    unknown = sorted(set(MOVES) - set(tokenizer.get_vocab()))
    if unknown:
        raise UsageError(
            "the teacher does not know the moves of a maze",
            where=f"--teacher {name}",
            got=f"no token {unknown[0]!r}",
            expected=f"the tokens {', '.join(MOVES)}",
            remedy="leave --teacher out: a maze trains its own",
        )


def require_store_place(store: str) -> bool:
    """Refuse a place where no store can be, before anything costly; whether one is begun there.

    Raises:
        UsageError: If the place is a file, or its scheme is not known here.
        GdistillError: If it cannot be reached.
    """
    if Path(store).is_file():
        raise UsageError("the store is a folder", where="--store", got=f"the file {store}")
    return open_location(store).size(MANIFEST_FILE) is not None


def tokenized(out: Path) -> bool:
    """Whether stage 1 is finished."""
    return (out / "tokens" / RECORD).is_file()


def require_known_ids(dataset: TokenDataset) -> None:
    """Refuse rows with ids that the vocabulary has not.

    Raises:
        UsageError: If there are any.
    """
    if dataset.max_token_id >= dataset.vocab_size:
        raise UsageError(
            "token id outside the vocabulary",
            where=dataset.path,
            got=dataset.max_token_id,
            expected=f"below {dataset.vocab_size}",
        )


def begin_store(inputs: Inputs) -> tuple[ShardWriter, dict[str, np.ndarray]]:
    """Create the store or take it up; with the arrays that its codec keeps once."""
    request, files = inputs.request, inputs.teacher.files
    teacher = teacher_identity(files, request.settings.teacher.dtype)
    manifest = build_manifest(request, inputs.dataset, teacher, files.hidden_size)
    resources = kept_resources(request.store, manifest) or make_resources(inputs)
    sides = side_files(request.corpus, inputs.dataset, files.folder)
    writer = ShardWriter.create_or_resume(request.store, manifest, resources, sides)
    write_config(request.out / "config.json", request)
    return writer, resources


def train_own_teacher(request: ExtractRequest) -> Path:
    """The teacher that a corpus brings along, trained once into ``<out>/teacher``."""
    scheme, layout = scheme_of(request.corpus.source)
    if scheme != "maze":
        raise UsageError(
            "no teacher",
            where="--teacher",
            expected="a local folder or the hub id of a causal language model",
        )
    config = MazeTeacherConfig()
    if request.settings.teacher.preset == "demo":
        config = demo_teacher_config()
    config = replace(config, seed=request.corpus.seed)
    out = request.out / "teacher"
    with file_claim(request.out / ".teacher.lock", wait=True):
        train_maze_teacher(load_maze(layout or "k4"), out, config)
    return out


def kept_resources(location: str, manifest: Manifest) -> dict[str, np.ndarray] | None:
    """The resources of a store of this identity that is already there, if they are intact.

    Making them anew may take the teacher, which a finished store does not need.
    """
    try:
        store = ShardStore.open(location, allow_incomplete=True)
        if store.manifest.difference(manifest.with_files(store.manifest.files)) is not None:
            return None
        return {name: tensor.numpy() for name, tensor in store.resources.items()}
    except GdistillError:  # no store, or a damaged one: made and judged by the writer
        return None


def make_resources(inputs: Inputs) -> dict[str, np.ndarray]:
    """The arrays that the codec wants once per store."""
    resources: dict[str, np.ndarray] = {}
    for name in inputs.request.codec.resource_names:
        if name == "unigram_log_probs":
            resources[name] = corpus_unigram(inputs.dataset)
        elif name == "lm_head":
            resources[name] = inputs.teacher.loaded.lm_head[0].numpy()
        elif name == "lm_head_bias":
            weight, bias = inputs.teacher.loaded.lm_head
            resources[name] = np.zeros(len(weight), np.float32) if bias is None else bias.numpy()
        else:
            raise GdistillError("the codec wants an unknown resource", got=name)
    return resources


def extract(
    inputs: Inputs,
    writer: ShardWriter,
    resources: dict[str, np.ndarray],
    pending: list[ShardRange],
    worker: Worker,
) -> Extractor:
    """Stage 2 of this process; what it did, when all shards are done.

    Raises:
        Stopped: With what remains.
    """
    manifest, stop, teacher = writer.manifest, StopRequest(), inputs.teacher.loaded
    way = settle_way(writer, inputs.request.settings, teacher)
    rows, process = row_source(inputs, teacher, stop)
    extractor = Extractor(
        teacher=teacher,
        rows=rows,
        process=process,
        codec=inputs.request.codec,
        writer=writer,
        resources=resources_on(teacher.device, resources),
        batch_size=BatchSize(way.rows_per_pass),
        stop=stop,
    )
    total = sum(manifest.splits.values()) * manifest.row_length
    left = sum(shard.num_rows for shard in pending) * manifest.row_length
    with (
        stop.listening(),
        progress_bar("extract", total, done=total - left, main_process=worker.is_main) as bar,
    ):
        try:
            extractor.run(pending, worker, bar)
        except Stopped as error:
            remaining = sum(len(writer.pending(split)) for split in manifest.splits)
            raise Stopped(
                "stopped by SIGTERM",
                where=writer.location.url,
                got=f"{remaining} shards still to do",
                remedy="run the same command again to finish",
            ) from error
    return extractor


def row_source(inputs: Inputs, teacher: Teacher, stop: StopRequest) -> tuple[RowSource, Process]:
    """Where rows come from in this mode, and what is done to the teacher's distribution."""
    settings = inputs.request.settings
    if settings.mode == "parallel":
        return CorpusRows(inputs.dataset), unchanged
    rows = GeneratedRows(teacher, inputs.dataset, settings.sequential, settings.seed, stop.check)
    return rows, ProcessOutput(settings.sequential)
