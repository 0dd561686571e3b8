"""What a run would do, found out without writing a byte."""

from __future__ import annotations

import json

from pipeline.inputs import check_teacher, known_teacher, require_store_place
from pipeline.settings import ExtractRequest
from pipeline.tokens import RECORD, TokenDataset
from pipeline.workers import Worker
from shards.language_model import Spread, resolve_device
from shards.storage import open_location
from shards.store import MANIFEST_FILE, ShardStore


def what_would_be_done(request: ExtractRequest, worker: Worker) -> list[str]:
    """The resolved settings and the state of every step.

    Raises:
        UsageError: If the run would be refused before its first stage: by the same checks.
    """
    device = resolve_device(worker.device(request.settings.device))
    require_store_place(request.store)
    if request.settings.teacher.device_map is not None:
        Spread(request.settings.teacher.device_map)
    teacher = known_teacher(request)
    if teacher is not None:
        request, _ = check_teacher(request, teacher)
    return [
        json.dumps(request.to_mapping(), indent=2, sort_keys=True),
        f"device    {device}, worker {worker.index} of {worker.count}",
        f"teacher   {request.settings.teacher.location or 'trained on the spot'}",
        f"stage 1   {_stage1(request)}",
        f"stage 2   {_stage2(request)}",
        "nothing was written",
    ]


def _stage1(request: ExtractRequest) -> str:
    tokens = request.out / "tokens"
    if not (tokens / RECORD).is_file():
        return f"would tokenize {request.corpus.source} into {tokens}"
    dataset = TokenDataset.open(tokens)
    rows = ", ".join(f"{dataset.num_rows(split):,} {split}" for split in dataset.splits)
    return f"done: {rows} rows of {dataset.row_length}"


def _stage2(request: ExtractRequest) -> str:
    if open_location(request.store).size(MANIFEST_FILE) is None:
        return f"would write {request.store}"
    store = ShardStore.open(request.store, allow_incomplete=True)
    left = len(store.unfinished())
    return "done" if not left else f"would write {left} shards that are not done"
