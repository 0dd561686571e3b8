"""The randomness of samples, all of it named by (seed, purpose, sample, position, attempt).

Nothing here has state: a sample depends on the seed and its own index alone, whatever the batch.
First the Gumbel noise that students read, then the draws that turn a prediction into a token:
exponential races, see :func:`shards.noise.philox.race`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shards.codec.protocol import Codec
from shards.errors import UsageError
from shards.noise.embedding import Noise
from shards.noise.gumbel import KeyedPrior
from shards.noise.nucleus import NucleusRule, truncate_to_nucleus
from shards.noise.philox import PositionKeys, race, uniforms
from shards.settings import check_bounds, derive_seed, setting
from trainer.objective.batch import Places
from trainer.students.conditioning import EmbeddedNoise
from trainer.students.registry import Student

DEFAULT_TAU = 0.85
STEPS_PER_ATTEMPT = 1 << 20
"""Draw numbers of one attempt: its own, then one per pass of APD."""
MOST_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 25}
"""Most float64 probabilities at a time: 32 MiB on a CPU, of which a draw holds a dozen copies."""

Decision = Literal["categorical", "argmax"]


def sampling_noise(
    seed: int,
    sample_ids: Int[Tensor, "b"],
    row_length: int,
    vocab_size: int,
    *,
    codec: Codec | None = None,
    draw: int = 0,
) -> KeyedPrior:
    """Noise of B * row_length positions, sample by sample; position 0 is there but never read.

    A pure function of its arguments: evaluation regenerates a sample's noise from them.

    Args:
        seed: The user's sampling seed.
        sample_ids: Index of each sample in the run.
        row_length: Positions per sample.
        vocab_size: V.
        codec: Of the student's store: it truncates this noise as it truncates what it stores.
        draw: 0, or the attempt's number where a sample is drawn anew.
    """
    positions = torch.arange(row_length, device=sample_ids.device).repeat(len(sample_ids))
    rows = sample_ids.repeat_interleave(row_length)
    keys = PositionKeys(derive_seed(seed, "sampling noise"), rows, positions, draw)
    return KeyedPrior(keys, vocab_size) if codec is None else codec.prior(keys, vocab_size)


def noise_of_rows(student: Student, seed: int, sample_ids: Int[Tensor, "b"], row_length: int) -> KeyedPrior | None:
    """``sampling_noise`` as the student reads it; None for one without conditioning."""
    if not student.is_conditioned:
        return None
    size = student.config.vocab_size
    return sampling_noise(seed, sample_ids, row_length, size, codec=student.codec)


@dataclass(frozen=True)
class RowNoise:
    """Noise of B rows of ``length`` positions, and how the student reads it.

    Attributes:
        noise: B * length positions, row by row; None for a student without conditioning.
        tau: Scale of xi.
    """

    noise: Noise | None
    length: int
    tau: float = DEFAULT_TAU

    def of(self, rows: Int[Tensor, "m"], attempt: int = 0) -> RowNoise:
        """The noise of some rows, for an attempt at them; attempt 0 is the first."""
        if self.noise is None:
            return self
        index = rows[:, None] * self.length + torch.arange(self.length, device=rows.device)
        noise = self.noise.select(index.flatten().to(self.noise.device))
        if attempt:
            if not isinstance(noise, KeyedPrior):
                raise UsageError("this noise cannot be redrawn", where="noise", remedy="give sampling_noise")
            noise = noise.redrawn(attempt * STEPS_PER_ATTEMPT)
        return replace(self, noise=noise)

    def at(self, where: Bool[Tensor, "b l"] | Places) -> Noise:
        """That of some places, row-major: as a batch of training has it."""
        assert self.noise is not None
        places = Places.of(where)
        return self.noise.select((places.rows * self.length + places.positions).to(self.noise.device))

    def embed(
        self, student: Any, masked: Bool[Tensor, "m w"], rows: Int[Tensor, "m"], first: int = 0
    ) -> EmbeddedNoise | None:
        """What the student reads at masked positions (column 0 is position ``first``), zero elsewhere; or None."""
        if self.noise is None:
            return None
        row, column = masked.nonzero(as_tuple=True)
        noise = self.at(Places(rows[row], first + column))
        return student.embed_noise(noise.to(row.device), self.tau).laid_out((row, column), masked.shape)


@dataclass(frozen=True)
class SampleKeys:
    """Names the draws of B samples; ``attempt`` says how often they have been drawn before."""

    seed: int
    sample_ids: Int[Tensor, "b"]
    attempt: int = 0

    def at(self, purpose: str, where: Bool[Tensor, "b l"] | Places) -> PositionKeys:
        """Keys of some places, row-major; ``purpose`` separates them from other uses."""
        rows, positions = Places.of(where).index
        ids = self.sample_ids.to(rows.device)[rows]
        return PositionKeys(derive_seed(self.seed, purpose), ids, positions, self.attempt)

    def uniforms(self, purpose: str, rows: Int[Tensor, "m"], columns: slice) -> Float[Tensor, "m w"]:
        """One float64 uniform for each position of some columns of some rows."""
        width = columns.stop - columns.start
        positions = torch.arange(columns.start, columns.stop, device=rows.device)
        everywhere = Places(rows.repeat_interleave(width), positions.repeat(len(rows)))
        return uniforms(self.at(purpose, everywhere), 0, 1).view(len(rows), width)


def position_chunks(num_positions: int, size: int, device: torch.device) -> Iterator[slice]:
    """Groups of positions whose float64 probabilities of ``size`` tokens fit in memory; one at least."""
    step = max(1, MOST_ELEMENTS["cpu" if device.type == "cpu" else "cuda"] // size)
    for first in range(0, max(1, num_positions), step):
        yield slice(first, first + step)


@dataclass(frozen=True)
class TokenRule:
    """How tokens are chosen from log-probabilities or logits.

    Attributes:
        decision: ``categorical`` draws; ``argmax`` takes the most probable token.
        nucleus_p: p of nucleus truncation, after top-k; 1 is off.
        nucleus_rule: ``strict`` (the authors') or ``crossing`` (transformers').
        temperature: Divides the log-probabilities, before anything is cut off.
        top_k: Most probable tokens kept; None keeps all.
    """

    decision: Decision = "categorical"
    nucleus_p: float = setting(1.0, within="(0, 1]")
    nucleus_rule: NucleusRule = "strict"
    temperature: float = setting(1.0, within="(0, inf)")
    top_k: int | None = setting(None, within="[1, inf)")

    def __post_init__(self) -> None:
        check_bounds(self)
        for name, neutral in (("nucleus_p", 1), ("temperature", 1), ("top_k", None)):
            if self.decision == "argmax" and (got := getattr(self, name)) != neutral:
                what, remedy = "argmax is the same whatever the setting", "leave it out, or draw: decision=categorical"
                raise UsageError(what, where=name, got=got, remedy=remedy)

    @property
    def truncates(self) -> bool:
        """Whether any token is cut off."""
        return self.nucleus_p < 1 or self.top_k is not None

    def probabilities(self, logits: Float[Tensor, "n v"]) -> Float[Tensor, "n v"]:
        """Truncated float64 probabilities."""
        # Normalised again: a float32 log-softmax over 50,000 tokens is off by 1e-5 or so.
        probs = (logits.double() / self.temperature).softmax(dim=-1)
        if self.top_k is not None and self.top_k < probs.shape[-1]:
            least = probs.topk(self.top_k, dim=-1).values[..., -1:]
            probs = torch.where(probs >= least, probs, 0.0)  # as transformers: ties stay
            probs = probs / probs.sum(dim=-1, keepdim=True)
        if self.nucleus_p == 1:
            return probs
        return truncate_to_nucleus(probs, self.nucleus_p, self.nucleus_rule)

    def choose(self, log_probs: Float[Tensor, "n v1"], keys: PositionKeys) -> Int[Tensor, "n"]:
        """One token for each of n positions, a few at a time; the last entry, the mask's, is never taken."""
        logits = log_probs[:, :-1]
        if self.decision == "argmax":
            return logits.argmax(dim=-1)
        parts = [
            race(self.probabilities(logits[part]), uniforms(keys.select(part), 0, logits.shape[1]))
            for part in position_chunks(len(logits), log_probs.shape[1], logits.device)
        ]
        return torch.cat(parts)
