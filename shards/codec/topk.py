"""``topk``: the k largest xi of one posterior draw, and the total weight of the others.

What the student is shown is cut off after the k largest entries, at training and at sampling time
alike: :meth:`TopKCodec.prior` draws the k largest of V prior Gumbels in O(k). The observed token is seldom among the k
largest, so its xi has a field of its own; it is not shown to the student, who could tell the token by an entry below
the cut, but stands in for the token wherever the whole draw is wanted (``gdistill-shards show``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from shards.codec.full import encode_draw, half_gumbels
from shards.codec.ids import check_ranks, from_planes, plane_specs, to_planes
from shards.codec.protocol import Arrays, ArraySpec, Codec, LogProbs, TeacherOutput, Tokens
from shards.noise.gumbel import KeyedPosterior, arrivals_from_gumbel
from shards.noise.order_statistics import SparseNoise, TopPrior
from shards.noise.philox import PositionKeys
from shards.settings import check_bounds, setting


@dataclass(frozen=True)
class TopKCodec(Codec):
    """Arrays: ``entry_gap`` [k] in byte planes, by rising id, less the one before (the first plus
    1); ``entry_gumbels`` [k] float16; ``rest_log_rate`` float32, log sum exp(xi) of the V - k
    others; ``token_gumbels`` float32, xi of the token.

    Attributes:
        num_entries: k; never more than V are stored.
    """

    num_entries: int = setting(128, within="[1, inf)")

    name: ClassVar[str] = "topk"

    def __post_init__(self) -> None:
        check_bounds(self, "codec")

    def array_specs(self, vocab_size: int, hidden_size: int | None) -> dict[str, ArraySpec]:
        kept = (min(self.num_entries, vocab_size),)
        return {
            **plane_specs("entry_gap", vocab_size, kept),
            "entry_gumbels": ArraySpec("float16", kept),
            "rest_log_rate": ArraySpec("float32"),
            "token_gumbels": ArraySpec("float32"),
        }

    def encode(self, output: TeacherOutput, seed: int, resources: Arrays) -> dict[str, Tensor]:
        return encode_draw(output, seed, self._encode)

    def _encode(self, noise: KeyedPosterior) -> dict[str, Tensor]:
        vocab_size = noise.vocab_size
        arrivals = noise.tile(0, vocab_size)
        kept = min(self.num_entries, vocab_size)
        ids = arrivals.topk(kept, dim=1, largest=False).indices.sort(dim=1).values
        gumbels = half_gumbels(noise, arrivals).gather(1, ids)
        rest = arrivals.reciprocal_().scatter_(1, ids, 0.0).sum(1, dtype=torch.float64)
        gaps = ids.diff(dim=1, prepend=torch.full_like(ids[:, :1], -1))
        return {
            **to_planes("entry_gap", gaps, vocab_size),
            "entry_gumbels": gumbels,
            "rest_log_rate": rest.clamp(min=1e-30).log().float(),
            "token_gumbels": noise.token_gumbels,
        }

    def check_ids(self, arrays: Mapping[str, np.ndarray], vocab_size: int) -> str:
        return check_ranks("entry_gap", arrays, vocab_size, are_gaps=True)

    def decode(
        self, arrays: Arrays, tokens: Tokens, log_p: LogProbs, keys: PositionKeys, resources: Arrays
    ) -> SparseNoise:
        vocab_size = len(resources["unigram_log_probs"])
        ids = from_planes("entry_gap", arrays, vocab_size).cumsum(1) - 1
        is_token = ids == tokens[:, None]
        own = arrays["token_gumbels"][:, None]
        gumbels = torch.where(is_token, own, arrays["entry_gumbels"].float())
        rest, given = arrays["rest_log_rate"].exp(), (tokens, arrays["token_gumbels"])
        return SparseNoise(ids, arrivals_from_gumbel(gumbels), vocab_size, rest, given)

    def prior(self, keys: PositionKeys, vocab_size: int) -> TopPrior:
        """The noise to sample with: the k largest of V prior Gumbels."""
        return TopPrior(keys, vocab_size, self.num_entries)
