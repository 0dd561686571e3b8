"""Vocabulary ids as frequency ranks: small numbers for frequent tokens, whatever the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class FrequencyOrder:
    """Ids by falling unigram probability, ties by id.

    Attributes:
        id_of_rank: [V] int64.
        rank_of_id: [V] int64, its inverse.
    """

    id_of_rank: Int[Tensor, "v"]
    rank_of_id: Int[Tensor, "v"]

    @staticmethod
    @lru_cache(maxsize=8)  # by identity: a store's resource is one tensor, sorted once
    def of(unigram_log_probs: Float[Tensor, "v"]) -> FrequencyOrder:
        """The order of a store's ``unigram_log_probs``."""
        ids = unigram_log_probs.argsort(descending=True, stable=True)
        ranks = torch.empty_like(ids)
        ranks[ids] = torch.arange(len(ids), device=ids.device)
        return FrequencyOrder(ids, ranks)
