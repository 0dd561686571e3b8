"""The trainer: from a store to a student, and from a student to samples.

store -> batch -> corruption -> student -> loss -> checkpoint -> model/ -> samples

objective/   batches, schedules, corruption: pure functions
students/    MDLM, BD3-LM and AR on one backbone; the noise conditioner; model folders
training/    one loop for all of them      importing/  the authors' checkpoints
sampling/    six samplers                  presets/    recipes and shapes
From Python: ``trainer.load_student(path).generate(num_samples=4, nfe=16)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from trainer.loading import load_student
    from trainer.students import load_tokenizer

__getattr__, __dir__ = open_door(__name__, __file__)
