"""Tiny students with random weights for the tests of the samplers."""

from __future__ import annotations

import torch
from torch import Tensor

from shards.noise.gumbel import KeyedPrior
from shards.settings import resolve
from trainer.sampling.noise import sampling_noise
from trainer.students.registry import STUDENTS, Student, StudentSettings

VOCAB, LENGTH, BOS = 11, 12, 0
WIDE, NARROW = 1.5, 0.3


def tiny_student(
    kind: str = "mdlm",
    conditioning: str = "gumbel",
    *,
    block_size: int | None = None,
    vocab_size: int = VOCAB,
    row_length: int = LENGTH,
    **settings: object,
) -> Student:
    """A student whose predictions vary from position to position."""
    student_class = STUDENTS[kind]
    shape = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "condition_size": 8}
    own = {"dropout": 0.3, "conditioning": conditioning, "block_size": block_size}
    chosen = resolve(StudentSettings, shape, own, settings)
    config = student_class.config_class.build(
        chosen, vocab_size=vocab_size, row_length=row_length, bos_token_id=BOS, eos_token_id=1
    )
    torch.manual_seed(0)
    student = student_class(config).eval()
    for name, parameter in student.named_parameters():
        if "norm" not in name:
            scale = WIDE if name.endswith(("embedding", "conditioner.weight")) else NARROW
            torch.nn.init.normal_(parameter, std=scale)
    return student


def open_rows(student: Student, num_rows: int, length: int | None = None) -> Tensor:
    """Rows of bos and masks."""
    tokens = torch.full((num_rows, length or student.config.row_length), student.mask_id)
    tokens[:, 0] = BOS
    return tokens


def noise_for(student: Student, ids: Tensor, seed: int, length: int = LENGTH) -> KeyedPrior | None:
    """The samples' noise, for a conditioned student."""
    if not student.is_conditioned:
        return None
    return sampling_noise(seed, ids, length, student.config.vocab_size)


def draw(student: Student, sampler, ids: Tensor, tokens: Tensor | None = None, seed: int = 3):
    """Sample some ids with the samples' own noise."""
    tokens = open_rows(student, len(ids)) if tokens is None else tokens
    noise = noise_for(student, ids, seed, tokens.shape[1])
    return sampler.sample(student, tokens, ids, noise, seed)
