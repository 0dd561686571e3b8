"""What a sampler returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxtyping import Int
from torch import Tensor


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
