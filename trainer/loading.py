"""From Python: a trained student from its folder, and rows of tokens from a student."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from shards.errors import UsageError
from shards.noise.embedding import Noise
from trainer.sampling.noise import noise_of_rows
from trainer.sampling.registry import make_sampler
from trainer.students.folder import open_model
from trainer.students.registry import Student


def load_student(path: str | Path, device: torch.device | str = "cpu", backbone: str | None = None) -> Student:
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


@torch.no_grad()
def generate(
    student: Student,
    input_ids: Int[Tensor, "b l"] | None = None,
    *,
    attention_mask: Shaped[Tensor, "b l"] | None = None,
    num_samples: int = 1,
    max_length: int | None = None,
    sampler: str | None = None,
    seed: int = 0,
    noise: Noise | None = None,
    **sampler_settings: Any,
) -> Int[Tensor, "b length"]:
    """Fill open positions; ``student.generate`` is this function.

    Args:
        student: From :func:`load_student` or ``AutoModel``; in evaluation mode.
        input_ids: Rows [B, l], the student's ``mask_id`` where to fill. Shorter rows are prompts:
            what lies behind them is filled too. None is ``num_samples`` rows of which only the
            first token is given (bos, or eos where the tokenizer has no bos).
        attention_mask: As a tokenizer gives it beside ``input_ids``; all of it must be 1.
        num_samples: Rows, when ``input_ids`` is None.
        max_length: Tokens of a finished row; None is the student's row length.
        sampler: Name of a sampler; None takes the one that suits the student.
        seed: With the row's index it names all randomness, the noise included.
        noise: Noise over B * ``max_length`` positions; None draws prior noise for a conditioned
            student, truncated as the noise that it was trained on.
        **sampler_settings: ``nfe``, ``nucleus_p``, ``tau``, ...

    Returns:
        [B, ``max_length``] token ids, int64, on the student's device.

    Raises:
        UsageError: For an unknown sampler or setting, padding, or rows that cannot be filled.
    """
    if attention_mask is not None and not bool(attention_mask.all()):
        remedy = "pass rows of one length, or one call for each length"
        raise UsageError("padded rows cannot be continued", where="attention_mask", remedy=remedy)
    if input_ids is None:
        input_ids = torch.full((num_samples, 1), student.config.require_first_token())
    length = student.config.row_length if max_length is None else max_length
    if input_ids.shape[1] > length:
        expected = f"at most max_length = {length} tokens"
        raise UsageError("the rows are too long", got=input_ids.shape[1], expected=expected)
    rows = input_ids.to(student.device, torch.int64)
    rows = pad(rows, (0, length - rows.shape[1]), value=student.mask_id)
    sample_ids = torch.arange(len(rows), device=rows.device)
    if noise is None:
        noise = noise_of_rows(student, seed, sample_ids, length)
    chosen = make_sampler(sampler or student.default_sampler, **sampler_settings)
    return chosen.sample(student, rows, sample_ids, noise, seed).tokens
