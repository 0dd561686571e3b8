"""The Python door: a trained student from its folder, able to generate.

Students stand below the samplers and do not know them; this file sees both and gives every student
its ``generate``.
"""

from __future__ import annotations

from pathlib import Path

import torch

from trainer.sampling.registry import generate
from trainer.students.folder import open_model
from trainer.students.registry import Student

Student.generate = generate  # type: ignore[method-assign]


def load_student(
    path: str | Path, device: torch.device | str = "cpu", backbone: str | None = None
) -> Student:
    """A student in evaluation mode, float32, with every weight from the file.

    >>> student = trainer.load_student("out/maze/mdlm")
    >>> rows = student.generate(num_samples=4, nfe=16, seed=0)

    Args:
        path: A model folder, or the ``--out`` folder of a finished run.
        device: Where it goes.
        backbone: Where the language model is that it stands on, if not where its config says.

    Raises:
        UsageError: When the folder holds no student of ours, or a broken one.
    """
    return open_model(Path(path), device, backbone).student
