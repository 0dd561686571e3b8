"""``topk``: the k largest xi of one posterior draw, and the total weight of the others.

What the student is shown is cut off after the k largest entries, at training and at sampling time
alike: :meth:`TopKCodec.prior` draws the k largest of V prior Gumbels in O(k). The observed token
is seldom among the k largest, so its xi has a field of its own; it is not shown to the student,
who could tell the token by an entry below the cut, but stands in for the token wherever the
whole draw is wanted (:meth:`TopKCodec.decode_with_token`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shards.base import UsageError
from shards.codec.array_spec import ArraySpec
from shards.codec.byte_planes import from_planes, plane_specs, to_planes
from shards.codec.draws import encode_draw
from shards.codec.full import half_gumbels
from shards.codec.protocol import Arrays, TeacherOutput
from shards.noise import (
    KeyedPosterior,
    PositionKeys,
    SparseNoise,
    arrivals_from_gumbel,
    first_arrivals_of,
)


@dataclass(frozen=True)
class TopKCodec:
    """Arrays: ``entry_gap`` [k] in byte planes, by rising id, less the one before (the first plus
    1); ``entry_gumbels`` [k] float16; ``rest_log_rate`` float32, log sum exp(xi) of the V - k
    others; ``token_gumbels`` float32, xi of the token.

    Attributes:
        num_entries: k; never more than V are stored.
    """

    num_entries: int = 128

    name: ClassVar[str] = "topk"
    is_fresh: ClassVar[bool] = False
    needs_hidden: ClassVar[bool] = False
    resource_names: ClassVar[tuple[str, ...]] = ("unigram_log_probs",)

    def __post_init__(self) -> None:
        if self.num_entries < 1:
            got = self.num_entries
            raise UsageError("bad codec parameter", where="num_entries", got=got, expected=">= 1")

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

    def decode(
        self,
        arrays: Arrays,
        tokens: Int[Tensor, "n"],
        token_log_probs: Float[Tensor, "n"],
        keys: PositionKeys,
        resources: Arrays,
    ) -> SparseNoise:
        vocab_size = len(resources["unigram_log_probs"])
        ids = from_planes("entry_gap", arrays, vocab_size).cumsum(1) - 1
        is_token = ids == tokens[:, None]
        own = arrays["token_gumbels"][:, None]
        gumbels = torch.where(is_token, own, arrays["entry_gumbels"].float())
        rest = arrays["rest_log_rate"].exp()
        return SparseNoise(ids, arrivals_from_gumbel(gumbels), vocab_size, rest)

    def decode_with_token(
        self,
        arrays: Arrays,
        tokens: Int[Tensor, "n"],
        token_log_probs: Float[Tensor, "n"],
        keys: PositionKeys,
        resources: Arrays,
    ) -> SparseNoise:
        """The k largest entries and the token's, of which log p + xi is largest at the token."""
        noise = self.decode(arrays, tokens, token_log_probs, keys, resources)
        if noise.ids.shape[1] == noise.vocab_size:
            return noise
        missing = ~(noise.ids == tokens[:, None]).any(1)
        own = arrivals_from_gumbel(arrays["token_gumbels"])
        rest = torch.where(missing, noise.rest_rate - own.reciprocal(), noise.rest_rate)
        # Where the token is kept already, the further slot holds an id that was cut off.
        places = torch.arange(noise.ids.shape[1], device=tokens.device)
        cut_off = (noise.ids == places).cumprod(1).sum(1)
        ids = torch.cat([noise.ids, torch.where(missing, tokens, cut_off)[:, None]], dim=1)
        own = torch.where(missing, own, torch.inf)
        arrivals = torch.cat([noise.arrivals, own[:, None]], dim=1)
        return SparseNoise(ids, arrivals, noise.vocab_size, rest.clamp(min=0.0))

    def prior(self, keys: PositionKeys, vocab_size: int) -> SparseNoise:
        """The noise to sample with: the k largest of V prior Gumbels."""
        return first_arrivals_of(keys, vocab_size, self.num_entries)
