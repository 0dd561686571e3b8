"""First weights of a student, from wherever ``--init-from`` leads."""

from __future__ import annotations

from pathlib import Path

from shards.store import ShardStore
from trainer.initial_weights.language_model import adopt_language_model
from trainer.initial_weights.source import find_source
from trainer.initial_weights.student import load_student_weights, silence_noise
from trainer.students import Student


def load_initial_weights(student: Student, place: str | Path, store: ShardStore) -> None:
    """Start from a trained student of the same shape, or from the language model below a student.

    Noise that is added (``injection``) begins silent behind both: the first loss is the source's.

    Args:
        student: Receives the weights.
        place: See :func:`find_source`.
        store: What the student is trained on.

    Raises:
        UsageError: When nothing is there, or it does not fit; see the two.
    """
    source = find_source(place)
    if source.language_model is None:
        load_student_weights(student, source.folder, store.manifest)
        return
    if student.is_conditioned and student.settings.injection == "add":
        silence_noise(student)
    adopt_language_model(student, source.language_model, store)
