"""The finished model: Hugging Face layout, tokenizer, corpus side files, what it was trained on.

model/
    config.json, model.safetensors      averaged weights; AutoModel loads them
    tokenizer files, corpus/            as the store carries them
    student.json                        run config, store essentials, last validation
    README.md                           model card
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from shards.base import fsync_path, write_json_atomic
from shards.store import ShardStore
from trainer.importing import without_library_bars
from trainer.students.card import model_card
from trainer.students.registry import Student

STUDENT_FILE = "student.json"


def export_model(
    directory: Path,
    student: Student,
    weights: Mapping[str, Tensor],
    record: Mapping[str, Any],
    store: ShardStore,
) -> None:
    """Write the model so that ``directory`` is either the old one, absent, or whole.

    Args:
        directory: Where the model goes.
        student: Gives class and config; its weights are not looked at.
        weights: State dict to write, whole tensors.
        record: Content of ``student.json``.
        store: Gives tokenizer and corpus files.
    """
    temporary = directory.with_name(f".writing-{directory.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    whole = type(student)(student.config)
    whole.load_state_dict(dict(weights))
    with without_library_bars():
        whole.save_pretrained(temporary)
    store.copy_files("tokenizer", temporary)
    store.copy_files("corpus", temporary / "corpus")
    write_json_atomic(temporary / STUDENT_FILE, record)
    (temporary / "README.md").write_text(model_card(record, whole), encoding="utf-8")
    for path in temporary.rglob("*"):
        fsync_path(path)
    if directory.exists():
        shutil.rmtree(directory)
    os.replace(temporary, directory)
    fsync_path(directory.parent)
