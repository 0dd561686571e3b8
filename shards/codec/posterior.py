"""``posterior``: the teacher's most probable tokens, the tail's mass; fresh noise at every visit.

What is stored is the distribution, not a draw. At every visit the posterior is drawn with the exact p_x, the stored
head of p, and a tail spread in proportion to the unigram of the corpus. With total variation d between that
distribution and the teacher's, the token is still the argmax of log p + xi with probability 1 / (1 + d).

Bytes: the head is listed by falling probability, ids as frequency ranks in byte planes, -log p as
steps from one entry to the next; zstd then needs about 13 bits per id and 2 per probability, almost
nothing for slots left unused. Where M >= V the distribution is kept whole and no ids are needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from shards.codec.ids import (
    FrequencyOrder,
    check_ranks,
    cut_slots,
    from_planes,
    most_probable_tokens,
    plane_specs,
    to_planes,
    used_width,
)
from shards.codec.protocol import Arrays, ArraySpec, FreshDraws, LogProbs, TeacherOutput, Tokens, encode_in_parts
from shards.noise.gumbel import DenseProbabilities, Entries, HeadAndTail, Probabilities
from shards.settings import check_bounds, setting

SMALLEST_HALF = -65504.0


@dataclass(frozen=True)
class PosteriorCodec(FreshDraws):
    """Head, tail mass, and the exact p_x that every store keeps.

    Arrays for M < V: ``entry_rank`` [M] in byte planes, 1 + frequency rank, 0 where unused; ``entry_step`` [M] in byte
    planes, growth of round(-log p / log_prob_step_nats) from the entry before; ``tail_log_mass`` float16, log of what
    the entries and the token leave over. Arrays for M >= V: ``log_probs`` [V] float16.

    Attributes:
        num_entries: M, the most entries a position can have.
        min_probability: Less likely tokens are left to the tail.
        log_prob_step_nats: Resolution of the stored log-probabilities.
    """

    num_entries: int = setting(64, within="[1, inf)")
    min_probability: float = setting(3e-4, within="[1e-12, 1)")
    log_prob_step_nats: float = setting(1 / 64, within="[0.001, 1]")

    name: ClassVar[str] = "posterior"

    def __post_init__(self) -> None:
        check_bounds(self, "codec")

    @property
    def _max_step(self) -> int:
        return math.ceil(-math.log(self.min_probability) / self.log_prob_step_nats)

    def array_specs(self, vocab_size: int, hidden_size: int | None) -> dict[str, ArraySpec]:
        if self.num_entries >= vocab_size:
            return {"log_probs": ArraySpec("float16", (vocab_size,))}
        return {
            **plane_specs("entry_rank", vocab_size, (self.num_entries,)),
            **plane_specs("entry_step", self._max_step, (self.num_entries,)),
            "tail_log_mass": ArraySpec("float16"),
        }

    def encode(self, output: TeacherOutput, seed: int, resources: Arrays) -> dict[str, Tensor]:
        log_probs, tokens = output.log_probs.flatten(0, 1), output.tokens.flatten()
        if self.num_entries >= log_probs.shape[1]:
            return {"log_probs": output.log_probs.clamp(min=SMALLEST_HALF).half()}
        order = FrequencyOrder.of(resources["unigram_log_probs"])

        def encode(part: slice) -> dict[str, Tensor]:
            return self._encode(log_probs[part], tokens[part], order)

        return encode_in_parts(output, encode)

    def _encode(self, log_probs: Float[Tensor, "n v"], tokens: Tokens, order: FrequencyOrder) -> dict[str, Tensor]:
        listed, ids = most_probable_tokens(log_probs, self.num_entries)
        used = listed >= math.log(self.min_probability)
        # What is neither listed nor the token's. Nothing large is left in the sum, so float32 is
        # enough: a float64 one takes seven times longer.
        rest = log_probs.exp()
        rest.scatter_(1, ids, torch.where(used, 0.0, rest.gather(1, ids)))
        rest.scatter_(1, tokens[:, None], 0.0)
        tail = rest.sum(1).clamp_(min=1e-30).log_()
        return self._arrays(listed, ids, used, tail, order)

    def encode_likeliest(
        self,
        ids: Int[Tensor, "n k"],
        log_probs: Float[Tensor, "n k"],
        tokens: Tokens,
        log_p: LogProbs,
        resources: Arrays,
    ) -> dict[str, Tensor]:
        """Arrays of n positions from their k most probable tokens alone, as engines give them.

        ``ids`` come most probable first, -1 where fewer than k are known; ``log_probs`` are nats, -inf there.
        M must be less than V: k tokens are no whole distribution.
        """
        order = FrequencyOrder.of(resources["unigram_log_probs"])
        missing = (0, self.num_entries - ids.shape[1])  # negative: cut off
        ids, listed = pad(ids, missing, value=-1), pad(log_probs, missing, value=-math.inf)
        used = (ids >= 0) & (listed >= math.log(self.min_probability))
        is_listed = (used & (ids == tokens[:, None])).any(1)
        known = torch.where(used, listed.double().exp(), 0.0).sum(1)
        known += torch.where(is_listed, 0.0, log_p.double().exp())
        tail = (1 - known).clamp(min=1e-30).log().float()
        return self._arrays(listed, ids.clamp(min=0), used, tail, order)

    def _arrays(
        self,
        listed: Float[Tensor, "n m"],
        ids: Int[Tensor, "n m"],
        used: Bool[Tensor, "n m"],
        tail_log_mass: Float[Tensor, "n"],
        order: FrequencyOrder,
    ) -> dict[str, Tensor]:
        ranks = torch.where(used, order.rank_of_id[ids] + 1, 0)
        # -log p in whole steps; those too unlikely to be kept share the last level.
        steps = (-listed / self.log_prob_step_nats).round_().clamp_(0, self._max_step).int()
        steps[:, 1:] -= steps[:, :-1].clone()
        steps.mul_(used)
        return {
            **to_planes("entry_rank", ranks, len(order.id_of_rank)),
            **to_planes("entry_step", steps, self._max_step),
            "tail_log_mass": tail_log_mass.half(),
        }

    def cut(self, arrays: Arrays) -> Arrays:
        return cut_slots(arrays, "entry_rank", "entry_step")

    def check_ids(self, arrays: Mapping[str, np.ndarray], vocab_size: int) -> str:
        return check_ranks("entry_rank", arrays, vocab_size, are_gaps=False)

    def distribution(self, arrays: Arrays, tokens: Tokens, log_p: LogProbs, resources: Arrays) -> Probabilities:
        """Normalised: p_x exact, the tail's mass as stored, the listed take the rest."""
        if "log_probs" in arrays:
            log_probs = arrays["log_probs"].float()
            return DenseProbabilities(log_probs.scatter(1, tokens[:, None], log_p[:, None]))
        order = FrequencyOrder.of(resources["unigram_log_probs"])
        unigram_probs = resources["unigram_log_probs"].float().exp()
        ranks = from_planes("entry_rank", arrays, len(order.id_of_rank))
        width = used_width(ranks > 0)
        ranks = ranks[:, :width]
        ids = order.id_of_rank[(ranks - 1).clamp(min=0)]
        others = (ranks > 0) & (ids != tokens[:, None])
        steps = from_planes("entry_step", arrays, self._max_step)[:, :width]
        probs = (-self.log_prob_step_nats * steps.cumsum(1).float()).exp()
        own, tail_mass = log_p.double().exp(), arrays["tail_log_mass"].double().exp()
        total = torch.where(others, probs, 0.0).sum(1, dtype=torch.float64)
        wanted = 1 - own - tail_mass
        scale = torch.where(wanted > 0, wanted / total.clamp(min=1e-30), 1.0).clamp(0.5, 2.0)
        probs = torch.cat([probs * scale[:, None].float(), own[:, None].float()], dim=1)
        ids = torch.cat([ids, tokens[:, None]], dim=1)
        used = torch.cat([others, others.new_ones(len(others), 1)], dim=1)
        head = Entries(ids, probs, used, len(unigram_probs))
        known = torch.where(head.used, unigram_probs[ids], 0.0).sum(1, dtype=torch.float64)
        tail_scale = tail_mass / (1 - known).clamp(min=1e-9)
        return HeadAndTail(head, tail_scale.float(), unigram_probs)
