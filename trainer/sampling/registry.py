"""Samplers: from a student, its noise and rows with masked positions to finished rows.

Each is a frozen dataclass of settings with one method::

    config = make_sampler("ancestral", nfe=16, nucleus_p=0.9)
    noise = sampling_noise(seed, sample_ids, row_length, vocab_size, codec=student.codec)
    result = config.sample(student, tokens, sample_ids, noise, seed)

All randomness is named by (seed, sample id, position), so samples depend neither on the batch they
are drawn in nor on their order, and samplers that differ in one setting share their draws.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from shards.errors import UsageError, did_you_mean
from shards.noise.kinds import Noise
from shards.settings import from_mapping
from trainer.sampling.ancestral import AncestralConfig, FirstHittingConfig, FixedCountConfig
from trainer.sampling.block import BlockConfig
from trainer.sampling.confidence import ConfidenceConfig
from trainer.sampling.noise import noise_of_rows
from trainer.sampling.sampler import Sampler
from trainer.sampling.sequential import SequentialConfig
from trainer.sampling.verified.adaptive import AdaptiveConfig
from trainer.sampling.verified.coupled import CoupledConfig
from trainer.sampling.verified.medusa import MedusaConfig
from trainer.sampling.verified.slots import DrafterSampler
from trainer.students.registry import Student

SAMPLERS: dict[str, type[Sampler]] = {
    "ancestral": AncestralConfig,
    "first_hitting": FirstHittingConfig,
    "fixed_count": FixedCountConfig,
    "confidence": ConfidenceConfig,
    "block": BlockConfig,
    "sequential": SequentialConfig,
    "apd": AdaptiveConfig,
    "coupled": CoupledConfig,
    "medusa": MedusaConfig,
    "drafter": DrafterSampler,
}


def sampler_class(name: str) -> type[Sampler]:
    """The settings of the sampler of that name.

    Raises:
        UsageError: For an unknown name, naming the nearest known one.
    """
    name = name.replace("-", "_")
    if name not in SAMPLERS:
        known, hint = f"one of {sorted(SAMPLERS)}", did_you_mean(name, SAMPLERS)
        raise UsageError("unknown sampler", where=name, expected=known, remedy=hint)
    return SAMPLERS[name]


def make_sampler(name: str, **settings: Any) -> Sampler:
    """The sampler of that name.

    Raises:
        UsageError: For an unknown name or setting (naming the nearest known one), or a bad value.
    """
    return from_mapping(sampler_class(name), settings, where=name)


# ``generate``: from a student to rows of tokens, as Hugging Face's models offer it.


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
    """Fill open positions with one of ``trainer.sampling``'s samplers.

    Args:
        student: From :func:`trainer.load_student`; in evaluation mode.
        input_ids: Rows [B, l], the student's ``mask_id`` where to fill. Shorter rows are prompts:
            what lies behind them is filled too. None is ``num_samples`` rows of which only the
            first token is given (bos, or eos where the tokenizer has no bos).
        attention_mask: As a tokenizer gives it beside ``input_ids``; all of it must be 1.
        num_samples: Rows, when ``input_ids`` is None.
        max_length: Tokens of a finished row; None is the student's row length.
        sampler: Registry name; None takes the one that suits the student.
        seed: With the row's index it names all randomness, the noise included.
        noise: Noise over B * ``max_length`` positions; None draws prior noise for a conditioned
            student, truncated as the noise that it was trained on.
        **sampler_settings: ``nfe``, ``nucleus_p``, ``tau``, ...

    Returns:
        [B, ``max_length``] token ids, int64, on the student's device.

    Raises:
        UsageError: For an unknown sampler or setting, padding, or rows that cannot be filled.
    """
    _refuse_padding(attention_mask)
    length = student.config.row_length if max_length is None else max_length
    rows = _first_tokens(student, num_samples) if input_ids is None else input_ids
    rows = _open_to(rows.to(student.device), length, student.mask_id)
    sample_ids = torch.arange(len(rows), device=rows.device)
    if noise is None:
        noise = noise_of_rows(student, seed, sample_ids, length)
    config = make_sampler(sampler or student.default_sampler, **sampler_settings)
    return config.sample(student, rows, sample_ids, noise, seed).tokens


def _first_tokens(student: Student, num_samples: int) -> Int[Tensor, "b 1"]:
    first = student.config.first_token_id
    if first is None:
        remedy = "pass input_ids whose first token is given"
        raise UsageError("the student knows no first token", where="generate", remedy=remedy)
    return torch.full((num_samples, 1), first)


def _open_to(rows: Int[Tensor, "b l"], length: int, mask_id: int) -> Int[Tensor, "b length"]:
    if rows.shape[1] > length:
        expected = f"at most max_length = {length} tokens"
        raise UsageError("the rows are too long", got=rows.shape[1], expected=expected)
    return pad(rows, (0, length - rows.shape[1]), value=mask_id)


def _refuse_padding(attention_mask: Tensor | None) -> None:
    if attention_mask is not None and not bool(attention_mask.all()):
        remedy = "pass rows of one length, or one call for each length"
        raise UsageError("padded rows cannot be continued", where="attention_mask", remedy=remedy)
