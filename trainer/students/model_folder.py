"""Reading a student from its Hugging Face folder: all of its weights, or an error."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModel

from shards.base import UsageError
from trainer.importing import without_library_bars
from trainer.students.registry import Student, StudentConfig


def read_model(directory: Path) -> Student:
    """The student in a folder, float32, on the CPU.

    Raises:
        UsageError: When the folder holds no student of ours, or a weight is missing, left over or
            of another shape; the library would put a random one in its place.
    """
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        if not isinstance(config, StudentConfig):
            raise _not_ours(directory, config.model_type)
        with without_library_bars():
            student, found = AutoModel.from_pretrained(
                directory, local_files_only=True, dtype=torch.float32, output_loading_info=True
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
