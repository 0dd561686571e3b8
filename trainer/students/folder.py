"""A model folder: how it is named, written and read back.

model/
    config.json, model.safetensors      averaged weights
    tokenizer files, corpus/            as the store carries them
    student.json                        run config, store essentials, last validation
    README.md                           model card
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoTokenizer

from shards.base import (
    GdistillError,
    UsageError,
    publish_folder,
    sha256_file,
    without_library_bars,
    write_json_atomic,
)
from shards.store import ShardStore
from trainer.students.card import model_card, without_places
from trainer.students.registry import Student, StudentConfig

STUDENT_FILE = "student.json"
WEIGHTS_PATTERN = "*.safetensors"


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
        record: Content of ``student.json``, where absolute paths become names.
        store: Gives tokenizer and corpus files.
    """
    record = without_places(record)
    temporary = directory.with_name(f".writing-{directory.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    config = copy.deepcopy(student.config)
    for name, value in student.published(directory).items():
        setattr(config, name, value)
    whole = type(student)(config)
    whole.load_state_dict(dict(weights))
    with without_library_bars():
        whole.save_pretrained(temporary)
    store.copy_files("tokenizer", temporary)
    store.copy_files("corpus", temporary / "corpus")
    write_json_atomic(temporary / STUDENT_FILE, record)
    (temporary / "README.md").write_text(model_card(record, whole), encoding="utf-8")
    publish_folder(temporary, directory)


@dataclass(frozen=True)
class ModelFolder:
    """A student and what lies beside its weights.

    Attributes:
        directory: The folder.
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
        """See :func:`weights_sha256`."""
        return weights_sha256(self.directory)


def weights_sha256(directory: Path) -> str:
    """Hash of the weights: of the file, or of the files' hashes where there are several."""
    hashes = [sha256_file(path) for path in sorted(directory.glob(WEIGHTS_PATTERN))]
    return hashes[0] if len(hashes) == 1 else "+".join(hashes)


def open_model(
    path: Path, device: torch.device | str = "cpu", backbone: str | None = None
) -> ModelFolder:
    """Read a student in Hugging Face layout, with its tokenizer and its record.

    Args:
        path: A model folder, or the ``--out`` folder of a finished run.
        device: Where the student goes.
        backbone: Where the language model is that the student stands on, if not where it says.

    Raises:
        UsageError: When the folder holds no student of ours, or a broken one, or its backbone is
            another one or absent.
        GdistillError: When its tokenizer or its record is damaged.
    """
    directory = find_model(path)
    student = read_model(directory)
    student.complete(directory, backbone)
    student = student.to(device).eval()  # type: ignore[arg-type]
    model = ModelFolder(directory, student, load_tokenizer(directory), _read_record(directory))
    if student.is_conditioned and student.config.codec is None:
        # Models exported before the config named the codec have it in their record.
        student.config.codec = model.store.get("codec")
    _ = student.codec  # a bad one is found here, not in the first batch
    return model


def find_model(path: Path) -> Path:
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


def read_model(directory: Path) -> Student:
    """The student in a folder, float32, on the CPU.

    Raises:
        UsageError: When the folder holds no student of ours, or a weight is missing, left over or
            of another shape; the library would put a random one in its place.
    """
    try:
        config = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
        if not isinstance(config, StudentConfig):
            raise _not_ours(directory, config.model_type)
        with without_library_bars():
            student, found = AutoModel.from_pretrained(
                directory,
                local_files_only=True,
                trust_remote_code=False,
                dtype=torch.float32,
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UsageError("the model cannot be loaded", where=directory, got=error) from error
    if not isinstance(student, Student):
        raise _not_ours(directory, type(student).__name__)
    wrong = {kind: sorted(map(str, names)) for kind, names in found.items() if names}
    if wrong:
        listed = "; ".join(f"{kind}: {', '.join(names[:3])}" for kind, names in wrong.items())
        remedy = "copy the folder again, or finish the run that writes it"
        raise UsageError("the weights do not fit", where=directory, got=listed, remedy=remedy)
    return student


def _not_ours(directory: Path, kind: str) -> UsageError:
    return UsageError(
        "not a gdistill student",
        where=directory,
        got=kind,
        remedy="train one with gdistill-train, or convert with gdistill-train import",
    )


def load_tokenizer(directory: Path) -> Any:
    """The folder's tokenizer, or None when there is none."""
    if not any(
        (directory / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")
    ):
        return None
    try:
        return AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
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
