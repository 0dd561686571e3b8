"""One run of ``gdistill-extract``: teacher, stage 1, stage 2, summary; whatever is done stays.

Stage 1 may take hours; what a run would be refused for after it is asked here, before it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from pipeline.corpus.config import scheme_of
from pipeline.engine import checked_engine, require_tokenizer, run_scored
from pipeline.extract import Extractor, Process, ReadRows, resources_on, write_all
from pipeline.manifest import (
    build_manifest,
    corpus_unigram,
    rows_per_unit,
    settle_environment,
    side_files,
    teacher_identity,
)
from pipeline.settings import TOKENS_RECORD, ExtractRequest
from pipeline.steps import corpus_lines, report, tokenize, write_config
from pipeline.teacher import Teacher, check_row_length, check_vocabulary, tokenizer_size
from pipeline.tokens.dataset import TokenDataset
from pipeline.tokens.tokenizer import load_tokenizer
from pipeline.workers import StopRequest, Worker
from shards.atomic import require_writable
from shards.console import stderr
from shards.errors import GdistillError, UsageError
from shards.language_model.forward import BatchSize, resolve_device
from shards.language_model.loading import PretrainedFiles, check_device_map, find_pretrained
from shards.noise.philox import use_noise_kernel
from shards.store.location import file_claim, open_location
from shards.store.manifest import MANIFEST_FILE, Manifest
from shards.store.store import ShardStore
from shards.store.writer import ShardWriter

MOST_OTHER_TOKENS = 0.01


def run_extraction(request: ExtractRequest, worker: Worker) -> list[str]:
    """Do whatever of the run is not done yet; what there is to say at the end.

    One process of several speaks for all: the others return nothing to say.

    Raises:
        UsageError: If the request cannot be met, or differs from what is there.
        GdistillError: If something fails on the way; finished shards are kept.
    """
    if request.is_scored:
        return run_scored(request, worker)
    started, settings = time.monotonic(), request.settings
    device = resolve_device(worker.device(settings.device))
    require_writable(request.out)
    begun = require_store_place(request.store)
    check_device_map(settings.teacher.device_map)  # refuses a device that is not there
    files = known_teacher(request, weights=True)
    request, tokenizer = check_teacher(request, files)
    teacher = LazyTeacher(request, files, len(tokenizer), device)
    if not (begun and (request.out / TOKENS_RECORD).is_file()):
        _ = teacher.loaded  # what its weights are refused for comes before hours of tokenization
    dataset = tokenize(request, tokenizer, worker)
    inputs = Inputs(request, teacher, dataset)
    writer, resources = inputs.begin_store()
    num_tokens, waiting = 0, 0.0
    if writer.all_pending():
        done = extract(inputs, writer, resources, worker)
        num_tokens, waiting = done.num_extracted_tokens, done.seconds_waiting
    lines = report(request, dataset, writer, num_tokens, time.monotonic() - started - waiting)
    if padding := files.num_logits - len(tokenizer):
        width = f"{files.num_logits:,}"
        lines.append(f"  logits         {width}, the last {padding:,} of no token: left out")
    return lines if worker.is_main else []


def run_tokens(request: ExtractRequest, worker: Worker) -> list[str]:
    """Stage 1 alone, as the run would do it; of a teacher no weights are read.

    Raises:
        UsageError: If the request cannot be met, or differs from what is there.
        GdistillError: If the corpus cannot be read.
    """
    require_writable(request.out)
    if request.corpus.source.startswith("scores:"):
        raise UsageError("scored rows are tokens already", where="--corpus")
    if request.is_scored:
        tokenizer = require_tokenizer(request)
        _, request = checked_engine(request, tokenizer)
    else:
        request, tokenizer = check_teacher(request, known_teacher(request))
    dataset = tokenize(request, tokenizer, worker)
    return [f"tokens {dataset.path}", *corpus_lines(dataset)] if worker.is_main else []


# What stage 2 starts from.


@dataclass
class LazyTeacher:
    """The teacher, loaded when it is first needed: never, where nothing is left to do."""

    request: ExtractRequest
    files: PretrainedFiles
    vocab_size: int
    device: torch.device

    @cached_property
    def loaded(self) -> Teacher:
        """The teacher with its weights, once it has done what the run will ask for."""
        settings = self.request.settings
        teacher = Teacher.load(
            self.files,
            settings.teacher.dtype,
            self.device,
            vocab_size=self.vocab_size,
            attention=settings.teacher.attention,
            compiled=settings.teacher.compiled,
            device_map=settings.teacher.device_map,
        )
        teacher.try_out(self.request.codec.needs_hidden, settings.mode == "sequential")
        return teacher


def known_teacher(request: ExtractRequest, weights: bool = False) -> PretrainedFiles:
    """The teacher's files, trained first where the corpus (a maze) brings its own.

    Raises:
        UsageError: If there is no teacher.
    """
    settings = request.settings.teacher
    location = settings.location or train_own_teacher(request)
    return find_pretrained(
        location,
        revision=settings.revision,
        trust_remote_code=settings.trust_remote_code,
        weights=weights,
    )


def own_teacher(request: ExtractRequest) -> tuple[str, Path]:
    """Layout and folder of a maze's own teacher; a UsageError for any other corpus."""
    scheme, layout = scheme_of(request.corpus.source)
    if scheme != "maze":
        expected = "a local folder or the hub id of a causal language model"
        raise UsageError("no teacher", where="--teacher", expected=expected)
    return layout or "k4", request.out / "teacher"


def train_own_teacher(request: ExtractRequest) -> Path:
    """The teacher of a maze, trained once into ``<out>/teacher``."""
    layout, out = own_teacher(request)
    from pipeline import maze, maze_teacher

    is_demo = request.settings.teacher.preset == "demo"
    config = maze_teacher.demo_teacher_config() if is_demo else maze_teacher.MazeTeacherConfig()
    config = replace(config, seed=request.corpus.seed)
    with file_claim(request.out / ".teacher.lock", wait=True):
        maze_teacher.train_maze_teacher(maze.load_maze(layout), out, config)
    return out


def check_teacher(
    request: ExtractRequest, files: PretrainedFiles
) -> tuple[ExtractRequest, PreTrainedTokenizerBase]:
    """Refuse what a run, a plan and a dry run refuse alike: no weights are needed to see it.

    Returns:
        The request with its row length settled, the tokenizer.

    Raises:
        UsageError: If teacher, tokenizer, rows, corpus and store do not fit together.
    """
    settings = request.settings.teacher
    request = request.with_row_length(files.context_length)
    assert request.corpus.row_length is not None
    check_row_length(files, request.corpus.row_length)
    place = settings.tokenizer or files.folder
    tokenizer = load_tokenizer(place)
    check_vocabulary(files.num_logits, len(tokenizer), f"{place} and {files.name}")
    if settings.tokenizer is not None and tokenizer_size(files) is not None:
        _check_same_tokens(tokenizer, load_tokenizer(files.folder), f"{place} and {files.name}")
    if scheme_of(request.corpus.source)[0] == "maze":
        from pipeline.maze import check_vocabulary as check_moves

        check_moves(tokenizer, files.name)
    arrays = request.codec.array_specs(len(tokenizer), files.hidden_size)
    rows_per_unit(request.corpus.row_length, arrays, request.settings.store)
    return request, tokenizer


def _check_same_tokens(
    tokenizer: PreTrainedTokenizerBase, beside: PreTrainedTokenizerBase, where: str
) -> None:
    """Refuse a tokenizer more than 1% of whose ids mean other tokens than the teacher's own.

    A few may differ, as special tokens get new names; vocabularies of one size that are another's
    would otherwise pass for the teacher's own.
    """
    own = {index: token for token, index in beside.get_vocab().items()}
    given = {index: token for token, index in tokenizer.get_vocab().items()}
    others = sorted(index for index in given if index in own and own[index] != given[index])
    if len(others) > MOST_OTHER_TOKENS * len(given):
        first = others[0]
        raise UsageError(
            "the tokenizer is of another family than the teacher",
            where=where,
            got=f"{len(others):,} ids that mean other tokens: {first} is {given[first]!r}",
            expected=f"{own[first]!r}, as beside the teacher",
            remedy="leave --tokenizer out",
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


@dataclass(frozen=True)
class Inputs:
    """What stage 2 starts from: the request with its row length settled, teacher and rows."""

    request: ExtractRequest
    teacher: LazyTeacher
    dataset: TokenDataset

    def begin_store(self) -> tuple[ShardWriter, dict[str, np.ndarray]]:
        """Create the store or take it up; with the arrays that its codec keeps once."""
        request, files = self.request, self.teacher.files
        identity = teacher_identity(files, request.settings.teacher.dtype)
        manifest = build_manifest(request, self.dataset, identity, files.hidden_size)
        resources = kept_resources(request.store, manifest) or self.make_resources()
        sides = side_files(request.corpus, self.dataset, files.folder)
        writer = ShardWriter.create_or_resume(request.store, manifest, resources, sides)
        write_config(request.out / "config.json", request)
        return writer, resources

    def make_resources(self) -> dict[str, np.ndarray]:
        """The arrays that the codec wants once per store."""
        resources: dict[str, np.ndarray] = {}
        for name in self.request.codec.resource_names:
            if name == "unigram_log_probs":
                resources[name] = corpus_unigram(self.dataset)
            elif name in ("lm_head", "lm_head_bias"):
                weight, bias = self.teacher.loaded.lm_head
                value = weight if name == "lm_head" else bias
                zeros = np.zeros(len(weight), np.float32)
                resources[name] = zeros if value is None else value.numpy()
            else:
                raise GdistillError("the codec wants an unknown resource", got=name)
        return resources


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


def extract(
    inputs: Inputs, writer: ShardWriter, resources: dict[str, np.ndarray], worker: Worker
) -> Extractor:
    """Stage 2 of this process; what it did, when all shards are done.

    Raises:
        Stopped: With what remains.
    """
    stop, teacher, settings = StopRequest(), inputs.teacher.loaded, inputs.request.settings
    if obstacle := use_noise_kernel("auto", teacher.device):
        stderr.print(f"noise kernel: eager on {teacher.device}; {obstacle}", markup=False)
    environment = settle_environment(writer, settings, teacher)
    process: Process | None = None
    if settings.mode == "parallel":
        read: ReadRows = lambda split, start, stop, note: inputs.dataset.read_rows(  # noqa: E731
            split, start, stop
        )
    else:
        from pipeline.generate import GeneratedRows, ProcessOutput

        sampling = settings.sequential
        rows = GeneratedRows(teacher, inputs.dataset, sampling, settings.seed, stop.check)
        read, process = rows.read, ProcessOutput(sampling)
    extractor = Extractor(
        teacher=teacher,
        read_rows=read,
        process=process,
        codec=inputs.request.codec,
        writer=writer,
        resources=resources_on(teacher.device, resources),
        batch_size=BatchSize(environment.rows_per_pass),
        stop=stop,
    )
    write_all(extractor, writer.all_pending(), worker, "extract")
    return extractor
