"""Samples and their ends: at the first eos token, or anew where one repeats itself too much."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shards.errors import UsageError
from shards.settings import check_bounds, setting
from trainer.students.registry import Student

COUNTS = ("verifier_nfe", "drafted", "agreed", "reached", "accepted")
"""Details that say what was computed: those of all draws of a sample are summed."""


@dataclass(frozen=True)
class SampleResult:
    """B finished samples.

    Attributes:
        tokens: [B, L] int64; no mask id is left.
        nfe: [B] int64, forward passes of the student that each sample took part in. Keeping a
            key/value cache up to date costs none of its own; a verifier's are in ``details``.
        lengths: [B] int64, tokens that belong to the sample (all L, unless it stopped early).
        details: Further numbers per sample, each [B] or [B, K] (``accepted`` of apd, ...).
    """

    tokens: Int[Tensor, "b l"]
    nfe: Int[Tensor, "b"]
    lengths: Int[Tensor, "b"]
    details: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class StopRule:
    """Variable length and redraws; the default does neither.

    Attributes:
        at_eos: A sample ends with the first eos token that was filled in.
        min_entropy_nats: A sample is drawn anew when the unigram entropy of its last
            ``entropy_window`` tokens falls below this (the authors use 4 nats); None never.
        entropy_window: Tokens looked at; samples that end sooner are not judged, and rows that
            cannot be so long are refused.
        max_tries: Draws of one sample before the last one is kept, flagged ``low_entropy``.
    """

    at_eos: bool = False
    min_entropy_nats: float | None = setting(None, within="(0, inf)")
    entropy_window: int = setting(256, within="[1, inf)")
    max_tries: int = setting(10, within="[1, inf)")

    def check(self, student: Student, tokens: Int[Tensor, "b l"]) -> None:
        """Refuse an end of text that cannot be found, or that would cut off given tokens.

        Raises:
            UsageError: When there is no eos token, given tokens follow positions to fill, or the
                rows are too short for their entropy to be judged.
        """
        check_bounds(self, "stop")
        length, window = tokens.shape[1], self.entropy_window
        if self.min_entropy_nats is None:
            for name, default in (("entropy_window", 256), ("max_tries", 10)):
                if (got := getattr(self, name)) != default:
                    remedy = "give --min-entropy, or leave it out"
                    raise UsageError("no sample is redrawn", where=f"stop.{name}", got=got, remedy=remedy)
        elif length < window:
            what, got = "so short rows are never judged", f"{window} tokens for rows of {length}"
            remedy = f"--set stop.entropy_window={length}, or fewer; or no --min-entropy"
            raise UsageError(what, where="stop.entropy_window", got=got, remedy=remedy)
        if self.at_eos and student.config.eos_token_id is None:
            raise UsageError("the model has no eos token", where="stop.at_eos")
        if self.at_eos and has_gaps(student, tokens):
            what = "given tokens stand behind positions to fill"
            raise UsageError(what, where="stop.at_eos", remedy="an infilled row cannot end early")

    def ends(self, tokens: Int[Tensor, "b l"], filled: Bool[Tensor, "b l"], eos_id: int | None) -> Int[Tensor, "b"]:
        """Length of each row up to its first filled-in eos, which is included."""
        length = tokens.shape[1]
        if not self.at_eos or eos_id is None:
            return tokens.new_full((len(tokens),), length)
        found = (tokens == eos_id) & filled
        return torch.where(found.any(dim=1), found.int().argmax(dim=1) + 1, length).to(tokens.dtype)

    def is_monotonous(self, tokens: Int[Tensor, "b l"], lengths: Int[Tensor, "b"]) -> Bool[Tensor, "b"]:
        """Whether the last ``entropy_window`` tokens before each row's end are too uniform."""
        if self.min_entropy_nats is None or tokens.shape[1] < self.entropy_window:
            return torch.zeros_like(lengths, dtype=torch.bool)
        offset = torch.arange(-self.entropy_window, 0, device=tokens.device)
        last = tokens.gather(1, (lengths[:, None] + offset).clamp_min(0))
        is_uniform = unigram_entropy_nats(last) < self.min_entropy_nats
        return (lengths >= self.entropy_window) & is_uniform

    def judged(self, result: SampleResult, filled: Bool[Tensor, "b l"], eos_id: int | None) -> SampleResult:
        """The samples with their lengths, and flagged where they are too monotonous."""
        lengths, details = self.ends(result.tokens, filled, eos_id), dict(result.details)
        if self.min_entropy_nats is not None:
            low = self.is_monotonous(result.tokens, lengths)
            details["low_entropy"] = details.get("low_entropy", low) | low
        return replace(result, lengths=lengths, details=details)

    def redrawn(self, first: SampleResult, draw: Callable[[Int[Tensor, "m"], int], SampleResult]) -> SampleResult:
        """The samples with those of low entropy drawn anew, until they pass or tries run out.

        Args:
            first: The first draw of every sample.
            draw: Draws some of them anew, given the attempt's number.
        """
        if self.min_entropy_nats is None:
            return first
        tokens, nfe, lengths = (x.clone() for x in (first.tokens, first.nfe, first.lengths))
        details = {name: values.clone() for name, values in first.details.items()}
        attempts = torch.zeros_like(nfe)
        for attempt in range(1, self.max_tries):
            rows = details["low_entropy"].nonzero()[:, 0]
            if not len(rows):
                break
            again = draw(rows, attempt)
            tokens[rows], lengths[rows], attempts[rows] = again.tokens, again.lengths, attempt
            nfe[rows] += again.nfe
            for name, values in again.details.items():
                details[name][rows] = values + details[name][rows] if name in COUNTS else values
        return replace(first, tokens=tokens, nfe=nfe, lengths=lengths, details={**details, "attempt": attempts})


def unigram_entropy_nats(tokens: Int[Tensor, "b w"]) -> Float[Tensor, "b"]:
    """Entropy of the empirical token distribution of each row, nats, float64."""
    ordered = tokens.sort(dim=1).values
    counts = torch.searchsorted(ordered, ordered, right=True) - torch.searchsorted(ordered, ordered)
    # Each of a token's c occurrences contributes -(1/w) log(c/w): together -(c/w) log(c/w).
    return -(counts.double() / tokens.shape[1]).log().mean(dim=1)


def has_gaps(student: Student, tokens: Int[Tensor, "b l"]) -> bool:
    """Whether given tokens stand behind positions to fill."""
    masked = tokens == student.mask_id
    return bool((masked[:, :-1] & ~masked[:, 1:]).any())
