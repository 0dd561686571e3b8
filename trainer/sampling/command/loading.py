"""A trained student from its folder, with what sampling needs beside the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from shards.base import GdistillError, UsageError, sha256_file
from trainer.students import Student, read_model

STUDENT_FILE = "student.json"
WEIGHTS_PATTERN = "*.safetensors"


@dataclass(frozen=True)
class LoadedStudent:
    """A student and its surroundings.

    Attributes:
        directory: The model folder.
        student: In evaluation mode, on its device.
        tokenizer: The corpus' tokenizer; None when the folder has none.
        record: Content of ``student.json``; empty for a model that was not trained here.
    """

    directory: Path
    student: Student
    tokenizer: Any = None
    record: Mapping[str, Any] = field(default_factory=dict)

    @property
    def store(self) -> Mapping[str, Any]:
        """What the model remembers of the store it was trained on."""
        return self.record.get("run", {}).get("store", {})

    @property
    def weights_sha256(self) -> str:
        """Hash of the weights: of the file, or of the files' hashes where there are several."""
        hashes = [sha256_file(path) for path in sorted(self.directory.glob(WEIGHTS_PATTERN))]
        return hashes[0] if len(hashes) == 1 else "+".join(hashes)


def model_folder(path: Path) -> Path:
    """``path`` itself, or its ``model/`` folder when it is the output of a training run.

    Raises:
        UsageError: When there is no model in either place.
    """
    for candidate in (path / "model", path):
        if is_model(candidate):
            return candidate
    unfinished = path.is_dir() and any((path / "checkpoints").glob("*"))
    raise UsageError(
        "no model there",
        where=path,
        got="an unfinished training run" if unfinished else "no config.json of a model",
        remedy="finish the run with the same gdistill-train command"
        if unfinished
        else "give a training run's --out folder or the model/ folder in it",
    )


def is_model(directory: Path) -> bool:
    """True for a model's config.json; that of a training run names no model type."""
    try:
        return "model_type" in json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def load_student(path: Path, device: torch.device | str = "cpu") -> LoadedStudent:
    """Read a student in Hugging Face layout.

    Raises:
        UsageError: When the folder holds no student of ours, or a broken one.
        GdistillError: When its tokenizer or its record is damaged.
    """
    directory = model_folder(path)
    student = read_model(directory)
    student = student.to(device).eval()  # type: ignore[arg-type]
    loaded = LoadedStudent(directory, student, load_tokenizer(directory), _read_record(directory))
    if student.is_conditioned and student.config.codec is None:
        # Models exported before the config named the codec have it in their record.
        student.config.codec = loaded.store.get("codec")
    _ = student.codec  # a bad one is found here, not in the first batch
    return loaded


def load_tokenizer(directory: Path) -> Any:
    """The folder's tokenizer, or None when there is none."""
    if not any(
        (directory / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")
    ):
        return None
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise GdistillError("the tokenizer cannot be loaded", where=directory, got=error) from error


def _read_record(directory: Path) -> dict[str, Any]:
    file = directory / STUDENT_FILE
    if not file.is_file():
        return {}
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise GdistillError("not JSON", where=file, got=error) from error
    store: Any = record
    for name in ("run", "store"):
        store = store.get(name, {}) if isinstance(store, Mapping) else None
    if not isinstance(store, Mapping):
        raise GdistillError("damaged record", where=file, expected="an object with run.store")
    return record
