"""Random draws of the samplers, each a pure function of (seed, purpose, sample, position, attempt).

Nothing here has state, so a sample depends neither on the batch it is drawn in nor on the order:
only on the seed and on its own index. Categorical draws are races: see :func:`shards.noise.race`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shards.errors import UsageError
from shards.noise.philox import PositionKeys, race, uniforms
from shards.provenance import derive_seed
from trainer.objective.batch import Places

ELEMENTS_PER_CHUNK = 1 << 22
"""Most float64 probabilities at a time: 32 MiB, of which a draw holds a dozen copies."""
ELEMENTS_PER_GPU_CHUNK = 1 << 25
"""The same on a GPU, which small chunks would leave idle."""


@dataclass(frozen=True)
class SampleKeys:
    """Names the randomness of B samples.

    Attributes:
        seed: The user's seed.
        sample_ids: [B] int64, index of each sample in the run.
        attempt: How often the sample has been drawn before (an entropy stop draws anew).
    """

    seed: int
    sample_ids: Int[Tensor, "b"]
    attempt: int = 0

    def at(
        self, purpose: str, where: Bool[Tensor, "b l"] | Places, first_position: int = 0
    ) -> PositionKeys:
        """Keys of the positions marked in ``where``, row-major.

        Args:
            purpose: Name of the use, which separates it from other uses of the seed.
            where: Positions; column 0 is row position ``first_position``.
            first_position: Row position of column 0.
        """
        rows, positions = Places.of(where).index
        seed = derive_seed(self.seed, purpose)
        ids = self.sample_ids.to(rows.device)[rows]
        return PositionKeys(seed, ids, positions + first_position, self.attempt)

    def select(self, rows: Int[Tensor, "m"] | Bool[Tensor, "b"]) -> SampleKeys:
        """The keys of some of the samples."""
        return SampleKeys(self.seed, self.sample_ids[rows], self.attempt)


def position_uniforms(
    keys: SampleKeys, purpose: str, num_positions: int, first_position: int = 0
) -> Float[Tensor, "b l"]:
    """One float64 uniform for each of ``num_positions`` consecutive positions of each sample."""
    count, device = len(keys.sample_ids), keys.sample_ids.device
    rows = torch.arange(count, device=device).repeat_interleave(num_positions)
    everywhere = Places(rows, torch.arange(num_positions, device=device).repeat(count))
    named = keys.at(purpose, everywhere, first_position)
    return uniforms(named, 0, 1).view(count, num_positions)


def position_chunks(num_positions: int, size: int, device: torch.device) -> Iterator[slice]:
    """Groups of positions whose float64 probabilities of ``size`` tokens fit in memory.

    There is always one, which is empty where there are no positions.
    """
    most = ELEMENTS_PER_CHUNK if device.type == "cpu" else ELEMENTS_PER_GPU_CHUNK
    step = max(1, most // size)
    for first in range(0, max(1, num_positions), step):
        yield slice(first, first + step)


# From a prediction to a token: nucleus truncation and a draw, or the most probable token.


Decision = Literal["categorical", "argmax"]
NucleusRule = Literal["strict", "crossing"]
"""What happens to the token that crosses p: ``strict`` drops it, ``crossing`` keeps it."""
FIRST_CANDIDATES = 512
MOST_STEPS = 1 << 20
"""More steps than any row has tokens; the times of so many still fit in memory."""


@dataclass(frozen=True)
class TokenRule:
    """How revealed tokens are chosen from the student's log-probabilities.

    Attributes:
        decision: ``categorical`` draws; ``argmax`` takes the most probable token (greedy decoding
            of x_0: with noise as input the student's map is meant to be deterministic).
        nucleus_p: p of nucleus truncation, in (0, 1]; 1 is off.
        nucleus_rule: ``strict`` (the authors') or ``crossing`` (transformers').
        temperature: Divides the log-probabilities, before the nucleus is taken.
    """

    decision: Decision = "categorical"
    nucleus_p: float = 1.0
    nucleus_rule: NucleusRule = "strict"
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_positive(temperature=self.temperature)
        if not 0 < self.nucleus_p <= 1:
            raise UsageError(
                "bad nucleus p", where="nucleus_p", got=self.nucleus_p, expected="in (0, 1]"
            )
        for name in ("nucleus_p", "temperature"):
            if self.decision == "argmax" and getattr(self, name) != 1:
                raise UsageError(
                    "the most probable token stays the same whatever the setting",
                    where=name,
                    got=getattr(self, name),
                    remedy="leave it out, or draw with --decision categorical",
                )

    def probabilities(self, log_probs: Float[Tensor, "n v1"]) -> Float[Tensor, "n v"]:
        """Truncated float64 probabilities of the V real tokens (the last entry is the mask's)."""
        # Normalised again: a float32 log-softmax over 50,000 tokens is off by 1e-5 or so.
        probs = (log_probs[:, :-1].double() / self.temperature).softmax(dim=-1)
        return truncate_to_nucleus(probs, self.nucleus_p, self.nucleus_rule)

    def choose(self, log_probs: Float[Tensor, "n v1"], keys: PositionKeys) -> Int[Tensor, "n"]:
        """One token for each of n positions; ``keys`` name the draws.

        A few positions at a time: the float64 copies of all would outgrow the student.
        """
        if self.decision == "argmax":
            return log_probs[:, :-1].argmax(dim=-1)
        num_tokens = log_probs.shape[1] - 1
        parts = [
            race(self.probabilities(log_probs[chunk]), uniforms(keys.select(chunk), 0, num_tokens))
            for chunk in position_chunks(len(log_probs), log_probs.shape[1], log_probs.device)
        ]
        return torch.cat(parts)


def check_positive(**settings: float | None) -> None:
    """Validate scales and temperatures; None is not looked at.

    Raises:
        UsageError: Naming the setting.
    """
    for name, value in settings.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UsageError("bad scale", where=name, got=value, expected="above 0, finite")


def check_nfe(nfe: int | None) -> None:
    """Validate a budget of forward passes; None is not looked at.

    Raises:
        UsageError: For one that is too small or too large.
    """
    if nfe is not None and nfe < 1:
        raise UsageError("too few forward passes", where="nfe", got=nfe, expected="at least 1")
    if nfe is not None and nfe > MOST_STEPS:
        expected = f"at most {MOST_STEPS}"
        raise UsageError("too many forward passes", where="nfe", got=nfe, expected=expected)


def truncate_to_nucleus(
    probs: Float[Tensor, "n v"], nucleus_p: float, rule: NucleusRule = "strict"
) -> Float[Tensor, "n v"]:
    """Keep the most probable tokens of each row and renormalise.

    ``strict`` is the authors' rule: tokens whose cumulative probability, their own included, is at
    most p, and always the top token. ``crossing`` is the rule of Holtzman et al. (2020) and of
    transformers: the smallest set whose probability reaches p, so one token more. Of equally
    probable tokens the one with the smaller id comes first; no row depends on the others.

    Args:
        probs: Normalised probabilities; cumulated in their own precision, give float64.
        nucleus_p: p in (0, 1]; 1 keeps everything.
        rule: See above.
    """
    if nucleus_p >= 1.0:
        return probs
    if probs.shape[-1] <= 2 * FIRST_CANDIDATES:
        return _truncate_ordered(probs, *_in_order(probs), nucleus_p, rule)
    values, ids = _head(probs)
    truncated = _truncate_ordered(probs, values, ids, nucleus_p, rule)
    # Behind the head may stand further tokens as probable as its last one: it decides a row only
    # where those above them pass p.
    passes = (values.cumsum(dim=-1) > nucleus_p) & (values > values[..., -1:])
    rest = (~passes.any(dim=-1)).nonzero()[:, 0]
    if len(rest):
        whole = probs[rest]
        truncated[rest] = _truncate_ordered(whole, *_in_order(whole), nucleus_p, rule)
    return truncated


def _truncate_ordered(
    probs: Tensor, values: Tensor, ids: Tensor, nucleus_p: float, rule: NucleusRule
) -> Float[Tensor, "n v"]:
    """The nucleus among the first entries, which are given in descending order."""
    cumulative = values.cumsum(dim=-1)
    reached = cumulative if rule == "strict" else cumulative - values
    kept = reached <= nucleus_p if rule == "strict" else reached < nucleus_p
    kept[..., 0] = True
    values = values * kept
    values = values / values.sum(dim=-1, keepdim=True)
    return torch.zeros_like(probs).scatter_(-1, ids, values)


def _head(probs: Float[Tensor, "n v"]) -> tuple[Tensor, Tensor]:
    """The largest entries of each row in order, ties by id.

    Sorting a vocabulary of 50,000 costs ten times as much as finding its 512 largest entries,
    which nearly always suffice.
    """
    ids = probs.topk(FIRST_CANDIDATES, dim=-1).indices.sort(dim=-1).values
    values, order = _in_order(probs.gather(-1, ids))
    return values, ids.gather(-1, order)


def _in_order(values: Float[Tensor, "n k"]) -> tuple[Tensor, Tensor]:
    """In descending order; equal values in the order in which they stand."""
    ordered, places = values.sort(dim=-1, descending=True, stable=True)
    return ordered, places
