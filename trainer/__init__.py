"""The trainer: from a store to a student, and from a student to samples.

store -> batch -> corruption -> student -> loss -> checkpoint -> model/ -> samples

objective/   batches, schedules, corruption: pure functions
students/    MDLM, BD3-LM and AR on one backbone; the noise conditioner; model folders
training/    one loop for all of them      importing/  the authors' checkpoints
sampling/    six samplers                  presets/    recipes and shapes
From Python: ``trainer.load_student(path).generate(num_samples=4, nfe=16)``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.loading import load_student
    from trainer.students.folder import load_tokenizer

_HOME = {"load_student": "trainer.loading", "load_tokenizer": "trainer.students.folder"}


def __getattr__(name: str) -> Any:
    # Loaded on first use: a ``--help`` must not wait for torch.
    if name not in _HOME:
        raise AttributeError(f"{__name__!r} offers no {name!r}; it offers {sorted(_HOME)}")
    return getattr(import_module(_HOME[name]), name)
