"""Prior noise of rows, for likelihoods that know nothing of the text they score."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from evaluation.samples import DataRows
from evaluation.score import PerSample, Score
from shards.console import progress_bar
from shards.errors import GdistillError, UsageError
from shards.settings import derive_seed, generator
from shards.store.store import ShardStore
from shards.stream.stream import RowBatch
from trainer.objective.batch import Batch, BatchMaker
from trainer.objective.corruption import FULL
from trainer.sampling.noise import RowNoise, sampling_noise
from trainer.students.registry import AR, MDLM, Student


def require_likelihood(student: Student) -> None:
    """Refuse (UsageError) a student that only drafts for another model."""
    if not isinstance(student, AR | MDLM):
        what, expected = "this student gives no text a likelihood", "an MDLM, BD3-LM or AR student"
        raise UsageError(what, where="student", got=type(student).__name__, expected=expected)


def prior_noise(student: Student, row_ids: Int[Tensor, "b"], row_length: int, seed: int, draw: int = 0) -> RowNoise:
    """Noise of B rows, drawn from the prior and truncated as the student has learnt to read it.

    A function of the user's seed, the rows' ids and the number of the draw.
    """
    codec, size = student.codec, student.config.vocab_size
    noise = sampling_noise(derive_seed(seed, "likelihood"), row_ids, row_length, size, codec=codec, draw=draw)
    return RowNoise(noise, row_length, tau=1.0)


# Validation perplexity of a student, with the noise it was given said beside the number.


NoiseSource = Literal["posterior", "prior", "none"]
"""Inferred from the very text by the teacher; drawn without looking at it; or no noise at all."""
CAVEAT = (
    "given noise that the teacher inferred from the very text: the paper's conditional validation "
    "perplexity, no likelihood of the text, and not to be compared with one without noise"
)


def validation_perplexity(
    student: Student,
    data: DataRows,
    *,
    noise: NoiseSource,
    store: Path | None = None,
    split: str = "validation",
    num_draws: int = 1,
    batch_size: int = 16,
    seed: int = 0,
) -> Score:
    """exp of the mean NLL per token: exact for AR, else of the bound over t in (1e-3, 1).

    Position 0 is given and not counted; of conversations only the assistant's tokens are.

    Args:
        student: In evaluation mode.
        data: Rows, of the student's row length and vocabulary.
        noise: What a conditioned student is given; others take ``none``.
        store: Where posterior noise is read; the rows must be its own.
        split: Of the store.
        num_draws: Times, masks and noise drawn for each row, averaged.
        batch_size: Rows at a time; changes no number but by rounding.
        seed: Of times, masks and noise.

    Raises:
        UsageError: For rows or noise that do not suit the student.
        GdistillError: When a likelihood is no number.
    """
    _check(student, data, noise, store)
    nats = np.zeros(len(data.rows))
    make = None
    if noise == "posterior" and store is not None:
        make = BatchMaker(ShardStore.find(store), split, seed, student.device, with_noise=True)
    with progress_bar("validation", num_draws * data.rows.size) as bar:
        for draw in range(num_draws):
            # Strata of t, of all rows however many are read at a time; a row has another one in every draw.
            slots = torch.randperm(len(data.rows), generator=generator(seed, "likelihood strata", draw))
            for start in range(0, len(data.rows), batch_size):
                part = range(start, min(start + batch_size, len(data.rows)))
                own = part, slots, draw
                batch = _stored(make, *own) if make else _plain(student, data, *own, seed, noise)
                with torch.no_grad():
                    found = student.loss(batch.to(student.device), time_bounds=FULL).row_nlls
                nats[part.start : part.stop] += found.double().cpu().numpy() / num_draws
                bar.advance(batch.tokens.numel())
    if not np.isfinite(nats).all():
        what = "the student gives a likelihood that is no number"
        got = f"{int((~np.isfinite(nats)).sum())} of {len(nats)} rows"
        raise GdistillError(what, where=data.name, got=got, remedy="check the student's weights")
    counted = np.ones(data.rows.shape, dtype=bool) if data.counted is None else data.counted
    counts = counted[:, 1:].sum(1).astype(float)
    prefix = "conditional_" if noise == "posterior" else ""
    return Score.of(
        f"{prefix}validation_perplexity",
        PerSample(tuple(range(len(nats))), tuple(nats.tolist()), tuple(counts.tolist()), is_exponential=True),
        settings={
            "data": data.name,
            "data_fingerprint": data.fingerprint,
            "estimate": "exact" if isinstance(student, AR) else "bound, t in (1e-3, 1)",
            "noise": noise,
            "draws_per_row": num_draws,
            "seed": seed,
            "precision": "fp32",
        },
        details={"nll_nats_per_token": float(nats.sum() / counts.sum())},
        cautions=(CAVEAT,) if noise == "posterior" else (),
    )


def _check(student: Student, data: DataRows, noise: NoiseSource, store: Path | None) -> None:
    require_likelihood(student)
    config, wrong = student.config, None
    if data.rows.shape[1] != config.row_length:
        wrong = ("rows", f"{data.rows.shape[1]} tokens", f"{config.row_length}, the student's")
    elif data.vocab_size != config.vocab_size:
        wrong = ("vocabulary", data.vocab_size, f"{config.vocab_size}, the student's")
    elif student.is_conditioned == (noise == "none"):
        fitting = "posterior or prior" if student.is_conditioned else "none"
        wrong = ("--noise", noise, f"{fitting}: conditioning is {student.settings.conditioning}")
    elif noise == "posterior" and store is None:
        wrong = ("--noise posterior", "rows without a teacher's noise", "a store of that codec")
    if wrong is not None:
        where, got, expected = wrong
        what = "the data do not suit the student"
        raise UsageError(what, where=where, got=got, expected=expected)


def _stored(make: BatchMaker, part: range, slots: Int[Tensor, "n"], draw: int) -> Batch:
    """Rows of a store with the teacher's noise."""
    arrays = make.store.split(make.split, make.arrays).read_rows(part.start, part.stop)
    tensors: dict[str, Any] = {name: torch.from_numpy(value) for name, value in arrays.items()}
    return make(RowBatch(tensors, torch.tensor(part), slots[part.start : part.stop], len(slots), draw, 0))


def _plain(student: Student, data: DataRows, part: range, slots: Tensor, draw: int, seed: int, noise: str) -> Batch:
    """Rows without noise, or with the prior's."""
    device = student.device
    tokens = torch.from_numpy(data.rows[part.start : part.stop]).to(device)
    ids, length = torch.tensor(part, device=device), tokens.shape[1]
    counted = None if data.counted is None else torch.from_numpy(data.counted[part.start : part.stop])
    return Batch(
        tokens=tokens,
        token_log_probs=torch.zeros(tokens.shape, device=device),
        row_ids=ids,
        slots=slots[part.start : part.stop].to(device),
        global_batch_size=len(slots),
        epoch=draw,
        seed=seed,
        noise=prior_noise(student, ids, length, seed, draw) if noise == "prior" else None,
        counted=None if counted is None else counted.to(device),
    )
