"""Tiny diffusion students with random weights, and batches of given noise."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.goldens import ArrivalRows
from shards.settings import resolve, to_mapping
from trainer.objective.batch import Batch
from trainer.students.conditioning import EmbeddedNoise
from trainer.students.registry import AR, BD3LM, MDLM, Student, StudentSettings

VOCAB, LENGTH, BLOCK = 11, 8, 4
TINY = StudentSettings(hidden_size=16, num_layers=2, num_heads=2, condition_size=8, dropout=0.0, conditioning="gumbel")


def make_student(kind: type[Student] = MDLM, std: float | None = 0.1, **changes: Any) -> Any:
    """In evaluation mode; a BD3-LM in blocks of 4, with heads as wide as FlexAttention needs.

    Weights have the deviation ``std``; without one, they are those of a new student.
    """
    if kind is AR:
        changes = {"conditioning": "none", **changes}
    if kind is BD3LM:
        changes = {"block_size": BLOCK, "hidden_size": 32, **changes}
    settings = resolve(StudentSettings, to_mapping(TINY), changes)
    student = kind(kind.config_class.build(settings, vocab_size=VOCAB, row_length=LENGTH)).eval()
    torch.manual_seed(0)
    for parameter in student.parameters() if std else ():
        torch.nn.init.normal_(parameter, std=std)
    return student


def make_batch(num_rows: int = 4) -> Any:
    """Rows of random tokens and prior noise; rows 100, 101, ... of a run of seed 7."""
    generator, rows = torch.Generator().manual_seed(0), torch.arange(num_rows)
    arrivals = -torch.log1p(-torch.rand((num_rows, LENGTH, VOCAB), generator=generator))
    tokens = torch.randint(VOCAB, (num_rows, LENGTH), generator=generator)
    noise = ArrivalRows(arrivals)
    return Batch(tokens, torch.zeros(tokens.shape), 100 + rows, rows, num_rows, 0, 7, noise)


def row_noise(student: Any, batch: Batch, tau: float = 1.0) -> EmbeddedNoise:
    """The noise of every position, embedded and laid out like the rows."""
    everywhere = torch.ones(batch.tokens.shape, dtype=torch.bool)
    embedded = student.embed_noise(batch.noise.at(everywhere), tau)
    return embedded.map(lambda part: part.detach().unflatten(0, batch.tokens.shape))
