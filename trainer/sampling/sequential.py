"""Left to right, one token per forward pass, from an autoregressive student."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from shards.errors import UsageError
from trainer.objective.batch import Places
from trainer.sampling.noise import NoiseUse
from trainer.sampling.sampler import RedrawingSampler, check_rows
from trainer.sampling.stopping import SampleResult
from trainer.sampling.token_rule import SampleKeys
from trainer.students.registry import AR, Student

TOKENS_BETWEEN_QUESTIONS = 8
"""How often rows that may end early are asked whether all have, which makes the host wait."""


@dataclass(frozen=True, kw_only=True)
class SequentialConfig(RedrawingSampler):
    """Ordinary autoregressive sampling with a key/value cache.

    NFE is the number of tokens from the first to the last position to fill; given tokens among
    them are kept. Settings as in :class:`RedrawingSampler`; the student takes no noise.
    """

    label: ClassVar[str] = "sequential"

    def check(self, student: Student, tokens: Int[Tensor, "b l"]) -> AR:
        """See :class:`Sampler`."""
        check_rows(student, tokens)
        self.stop.check(student, tokens)
        if not isinstance(student, AR):
            raise UsageError(
                "the sequential sampler goes from left to right",
                where="sampler",
                got=type(student).__name__,
                expected="an autoregressive student",
            )
        return student

    def fill(
        self, student: AR, tokens: Int[Tensor, "b l"], use: NoiseUse, keys: SampleKeys
    ) -> SampleResult:
        """See :class:`RedrawingSampler`."""
        tokens, masked = tokens.clone(), tokens == student.mask_id
        length, eos_id = tokens.shape[1], student.config.eos_token_id
        place = torch.arange(length, device=tokens.device)
        begin = torch.where(masked, place, length).amin(dim=1)
        end = torch.where(masked, place + 1, 0).amax(dim=1)
        first, cache = int(begin.min()), student.start_cache(len(tokens))
        has_ended = torch.zeros_like(begin, dtype=torch.bool)
        new, everyone = tokens[:, :first], torch.arange(len(tokens), device=tokens.device)
        for position in range(first, int(end.max())):
            log_probs = student.predict_next(new, cache)
            # All rows draw, also those whose token is given: to leave some out is to count them.
            here = masked[:, position] & ~has_ended
            names = keys.at("sampling tokens", Places(everyone, everyone * 0), position)
            drawn = self.rule.choose(log_probs, names)
            tokens[:, position] = torch.where(here, drawn, tokens[:, position])
            if self.stop.at_eos and eos_id is not None:
                has_ended |= here & (tokens[:, position] == eos_id)
                rest = tokens[:, position + 1 :]
                tokens[:, position + 1 :] = torch.where(has_ended[:, None], eos_id, rest)
                if position % TOKENS_BETWEEN_QUESTIONS == 0 and bool(has_ended.all()):
                    break
            new = tokens[:, position : position + 1]
        lengths = self.stop.ends(tokens, masked, eos_id)
        nfe = (torch.minimum(end, lengths) - begin).clamp_min(0)
        return SampleResult(tokens, nfe, lengths, self.stop.details(tokens, lengths))
