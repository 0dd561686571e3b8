"""``posterior``: the teacher's likeliest tokens and the tail's mass; fresh noise at every visit.

What is stored is the distribution, not a draw. At every visit the posterior is drawn with the
exact p_x, the stored head of p, and a tail spread in proportion to the unigram of the corpus.
With total variation d between that distribution and the teacher's, the token is still the argmax
of log p + xi with probability 1 / (1 + d).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shards.codec.protocol import Arrays, ArraySpec, TeacherOutput
from shards.errors import UsageError
from shards.noise import KeyedPosterior, KeyedPrior, PositionKeys
from shards.probabilities import HeadAndTail


@dataclass(frozen=True)
class PosteriorCodec:
    """Arrays: ``entry_ids`` [M] and ``entry_log_probs`` [M] float16, likeliest first;
    ``tail_log_mass`` float32, log of what they and the token leave over.

    Attributes:
        num_entries: M; never more than V are stored.
    """

    num_entries: int = 64

    name: ClassVar[str] = "posterior"
    is_fresh: ClassVar[bool] = True
    needs_hidden: ClassVar[bool] = False
    resource_names: ClassVar[tuple[str, ...]] = ("unigram_log_probs",)

    def __post_init__(self) -> None:
        if self.num_entries < 1:
            raise UsageError(
                "too few entries", where="num_entries", got=self.num_entries, expected=">= 1"
            )

    def array_specs(self, vocab_size: int, hidden_size: int | None) -> dict[str, ArraySpec]:
        kept = min(self.num_entries, vocab_size)
        id_dtype = "uint16" if vocab_size <= 1 << 16 else "int32"
        return {
            "entry_ids": ArraySpec(id_dtype, (kept,)),
            "entry_log_probs": ArraySpec("float16", (kept,)),
            "tail_log_mass": ArraySpec("float32"),
        }

    def encode(self, output: TeacherOutput, seed: int, resources: Arrays) -> dict[str, Tensor]:
        vocab_size = output.log_probs.shape[-1]
        log_probs, ids = output.log_probs.topk(min(self.num_entries, vocab_size), dim=-1)
        rest = output.log_probs.exp()
        rest.scatter_(-1, ids, 0.0).scatter_(-1, output.tokens[..., None], 0.0)
        tail = rest.double().sum(-1).clamp(min=1e-30).log().float()
        id_dtype = torch.uint16 if vocab_size <= 1 << 16 else torch.int32
        return {
            "entry_ids": ids.to(id_dtype),
            "entry_log_probs": log_probs.half(),
            "tail_log_mass": tail,
        }

    def decode(
        self,
        arrays: Arrays,
        tokens: Int[Tensor, "n"],
        token_log_probs: Float[Tensor, "n"],
        keys: PositionKeys,
        resources: Arrays,
    ) -> KeyedPosterior:
        distribution = self.distribution(arrays, tokens, token_log_probs, resources)
        return KeyedPosterior(keys, tokens, token_log_probs, distribution)

    def distribution(
        self,
        arrays: Arrays,
        tokens: Int[Tensor, "n"],
        token_log_probs: Float[Tensor, "n"],
        resources: Arrays,
    ) -> HeadAndTail:
        """The stored approximation of the teacher's distribution (for distillation losses too)."""
        ids = torch.cat([arrays["entry_ids"].long(), tokens[:, None]], dim=1)
        repeated = (ids[:, :-1] == tokens[:, None]).any(1)
        probs = torch.cat([arrays["entry_log_probs"].float(), token_log_probs[:, None]], 1).exp()
        probs[:, :-1][ids[:, :-1] == tokens[:, None]] = token_log_probs.exp()[repeated]
        probs[:, -1][repeated] = -1.0
        unigram = resources["unigram_log_probs"].float().exp()
        listed = unigram[ids].double().masked_fill(probs < 0, 0.0).sum(1)
        scale = arrays["tail_log_mass"].double().exp() / (1 - listed).clamp(min=1e-9)
        return HeadAndTail(ids, probs, scale.float(), unigram)

    def prior(self, keys: PositionKeys, vocab_size: int) -> KeyedPrior:
        """The noise to sample with: the untruncated prior."""
        return KeyedPrior(keys, vocab_size)
