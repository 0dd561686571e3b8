"""One run of ``gdistill-extract``: teacher, stage 1, stage 2, summary; whatever is done stays."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from pipeline.extract.loop import Extractor, Process, ReadRows, resources_on, unchanged, write_all
from pipeline.extract.manifest import (
    build_manifest,
    corpus_unigram,
    settle_way,
    side_files,
    teacher_identity,
)
from pipeline.inputs import (
    LazyTeacher,
    prepare_teacher,
    require_known_ids,
    require_store_place,
    tokenized,
)
from pipeline.report import report, write_config
from pipeline.scored_run import is_scored, run_scored
from pipeline.settings import ExtractRequest
from pipeline.teacher.generate import GeneratedRows, ProcessOutput
from pipeline.teacher.model import Teacher
from pipeline.teacher.model_group import ModelGroup
from pipeline.tokens.build import prepare_tokens
from pipeline.tokens.dataset import TokenDataset
from pipeline.workers import StopRequest, Worker
from shards.atomic import require_writable
from shards.console import stderr
from shards.errors import GdistillError
from shards.language_model.forward import BatchSize, resolve_device
from shards.noise.philox import use_noise_kernel
from shards.store.layout import ShardRange
from shards.store.manifest import Manifest
from shards.store.store import ShardStore
from shards.store.writer import ShardWriter


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
    if not request.settings.teacher.tensor_parallel:
        return run_teacher(request, worker)
    group = ModelGroup.join()
    if not group.is_leader:
        group.follow(prepare_teacher(request, torch.device("cpu"), group)[-1].load)
        return []
    try:
        return run_teacher(request, worker, group)
    finally:
        group.end()


def run_teacher(
    request: ExtractRequest, worker: Worker, group: ModelGroup | None = None
) -> list[str]:
    """The same with a teacher that runs here, alone or as the first of a group."""
    started = time.monotonic()
    device = resolve_device(worker.device(request.settings.device))
    require_writable(request.out)
    begun = require_store_place(request.store)
    request, tokenizer, teacher = prepare_teacher(request, device, group)
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
    pending = writer.all_pending()
    num_tokens, waiting = 0, 0.0
    if pending:
        done = extract(inputs, writer, resources, pending, worker)
        num_tokens, waiting = done.num_extracted_tokens, done.seconds_waiting
    seconds = time.monotonic() - started - waiting
    lines = report(request, dataset, writer, num_tokens, seconds)
    return [*lines, *padding_lines(teacher)] if worker.is_main else []


def padding_lines(teacher: LazyTeacher) -> list[str]:
    """Says so where the model's output is wider than its vocabulary."""
    width = teacher.files.num_logits
    padding = width - teacher.vocab_size
    return [f"  logits         {width:,}, the last {padding:,} of no token: left out"] * bool(
        padding
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
    stop, teacher = StopRequest(), inputs.teacher.loaded
    if obstacle := use_noise_kernel("auto", teacher.device):
        stderr.print(f"noise kernel: eager on {teacher.device}; {obstacle}", markup=False)
    way = settle_way(writer, inputs.request.settings, teacher)
    read_rows, process = row_source(inputs, teacher, stop)
    extractor = Extractor(
        teacher=teacher,
        read_rows=read_rows,
        process=process,
        codec=inputs.request.codec,
        writer=writer,
        resources=resources_on(teacher.device, resources),
        batch_size=BatchSize(way.rows_per_pass),
        stop=stop,
    )
    write_all(extractor, pending, worker, "extract")
    return extractor


def row_source(inputs: Inputs, teacher: Teacher, stop: StopRequest) -> tuple[ReadRows, Process]:
    """Where rows come from in this mode, and what is done to the teacher's distribution."""
    settings = inputs.request.settings
    if settings.mode == "parallel":
        read = inputs.dataset.read_rows
        return lambda split, start, stop, note: read(split, start, stop), unchanged
    rows = GeneratedRows(teacher, inputs.dataset, settings.sequential, settings.seed, stop.check)
    return rows.read, ProcessOutput(settings.sequential)
