"""Students, trainers and batches on the small store, as several files of this folder want them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shards.store.store import ShardStore
from tests.trainer.run_cases import tiny_run
from trainer.objective.batch import Batch
from trainer.students.registry import Student
from trainer.training.loop import Trainer, Validator
from trainer.training.settings import build_student


def student_of(store: Path, init_from: Path | None = None, **changes: Any) -> Student:
    """The student at step 0 of a tiny run."""
    return build_student(tiny_run(**changes), ShardStore.open(store), init_from)


def trainer_of(store: Path, out: Path, *given: Any, **changes: Any) -> tuple[Trainer, Validator]:
    """A tiny run that is about to begin."""
    trainer = Trainer(tiny_run(*given, **changes), ShardStore.open(store), out)
    assert trainer.validator is not None
    return trainer, trainer.validator


def first_batch(trainer: Trainer) -> Batch:
    return trainer.make_batch(next(trainer._rows()))
