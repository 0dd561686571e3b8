"""What a sampler returns; when a sample ends early, and when it is too monotonous to keep."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shards.errors import UsageError
from trainer.students.registry import Student

COUNTS = ("verifier_nfe", "drafted", "agreed", "reached", "accepted")
"""Details that say what was computed: those of every draw of a sample count."""


@dataclass(frozen=True)
class SampleResult:
    """B finished samples.

    Attributes:
        tokens: [B, L] int64; no mask id is left.
        nfe: [B] int64, forward passes of the student that each sample took part in. Keeping a
            key/value cache up to date costs none of its own; a verifier's are in ``details``.
        lengths: [B] int64, tokens that belong to the sample (all L, unless it stopped early).
        details: Further numbers per sample, each [B] (``accepted`` of the adaptive sampler, ...).
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
    min_entropy_nats: float | None = None
    entropy_window: int = 256
    max_tries: int = 10

    def __post_init__(self) -> None:
        for name in ("entropy_window", "max_tries"):
            value = getattr(self, name)
            if value < 1:
                raise UsageError("a count below 1", where=f"stop.{name}", got=value)
        least = self.min_entropy_nats
        if least is not None and not 0 < least < math.inf:
            raise UsageError(
                "bad entropy", where="stop.min_entropy_nats", got=least, expected="above 0, finite"
            )

    def check(self, student: Student, tokens: Int[Tensor, "b l"]) -> None:
        """Refuse an end of text that cannot be found, or that would cut off given tokens.

        Raises:
            UsageError: When there is no eos token, given tokens follow positions to fill, or the
                rows are too short for their entropy to be judged.
        """
        self._check_window(tokens.shape[1])
        if not self.at_eos:
            return
        if student.config.eos_token_id is None:
            raise UsageError("the model has no eos token", where="stop.at_eos")
        masked = tokens == student.mask_id
        if bool((masked[:, :-1] & ~masked[:, 1:]).any()):
            raise UsageError(
                "given tokens stand behind positions to fill",
                where="stop.at_eos",
                remedy="an infilled row cannot end early",
            )

    def _check_window(self, row_length: int) -> None:
        if self.min_entropy_nats is None or row_length >= self.entropy_window:
            return
        raise UsageError(
            "the entropy of so short rows is never looked at",
            where="stop.entropy_window",
            got=f"{self.entropy_window} tokens for rows of {row_length}",
            remedy=f"--set stop.entropy_window={row_length}, or fewer; or no --min-entropy",
        )

    def ends(
        self, tokens: Int[Tensor, "b l"], filled: Bool[Tensor, "b l"], eos_id: int | None
    ) -> Int[Tensor, "b"]:
        """Length of each row up to its first filled-in eos, which is included."""
        length = tokens.shape[1]
        if not self.at_eos or eos_id is None:
            return tokens.new_full((len(tokens),), length)
        found = (tokens == eos_id) & filled
        first = torch.where(found.any(dim=1), found.int().argmax(dim=1) + 1, length)
        return first.to(tokens.dtype)

    def is_monotonous(
        self, tokens: Int[Tensor, "b l"], lengths: Int[Tensor, "b"]
    ) -> Bool[Tensor, "b"]:
        """Whether the last ``entropy_window`` tokens before each row's end are too uniform."""
        if self.min_entropy_nats is None or tokens.shape[1] < self.entropy_window:
            return torch.zeros_like(lengths, dtype=torch.bool)
        offset = torch.arange(-self.entropy_window, 0, device=tokens.device)
        index = (lengths[:, None] + offset).clamp_min(0)
        entropy = unigram_entropy_nats(tokens.gather(1, index))
        return (lengths >= self.entropy_window) & (entropy < self.min_entropy_nats)

    def details(
        self, tokens: Int[Tensor, "b l"], lengths: Int[Tensor, "b"]
    ) -> dict[str, Bool[Tensor, "b"]]:
        """What ``draw`` needs to know of finished rows."""
        if self.min_entropy_nats is None:
            return {}
        return {"low_entropy": self.is_monotonous(tokens, lengths)}

    def draw(
        self,
        draw: Callable[[Int[Tensor, "m"], int], SampleResult],
        num_rows: int,
        device: torch.device,
    ) -> SampleResult:
        """Draw rows, and those flagged ``low_entropy`` anew with fresh randomness.

        Args:
            draw: (rows, attempt) -> their result; with ``low_entropy`` in its details when this
                rule has a ``min_entropy_nats``.
            num_rows: Rows in the batch.
            device: Of the rows.

        Returns:
            The last draw of each row. With ``min_entropy_nats`` passes and drafts (``COUNTS``) are
            summed over all draws, and ``attempt`` is in the details.
        """
        result = draw(torch.arange(num_rows, device=device), 0)
        if self.min_entropy_nats is None:
            return result
        tokens, nfe, lengths = result.tokens.clone(), result.nfe.clone(), result.lengths.clone()
        details = {name: values.clone() for name, values in result.details.items()}
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
        return SampleResult(tokens, nfe, lengths, {**details, "attempt": attempts})


def unigram_entropy_nats(tokens: Int[Tensor, "b w"]) -> Float[Tensor, "b"]:
    """Entropy of the empirical token distribution of each row, nats, float64."""
    ordered = tokens.sort(dim=1).values
    counts = torch.searchsorted(ordered, ordered, right=True) - torch.searchsorted(ordered, ordered)
    # Each of a token's c occurrences contributes -(1/w) log(c/w): together -(c/w) log(c/w).
    return -(counts.double() / tokens.shape[1]).log().mean(dim=1)
