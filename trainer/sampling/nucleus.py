"""Nucleus (top-p) truncation of a categorical distribution."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

NucleusRule = Literal["strict", "crossing"]
"""What happens to the token that crosses p: ``strict`` drops it, ``crossing`` keeps it."""
FIRST_CANDIDATES = 512


def truncate_to_nucleus(
    probs: Float[Tensor, "n v"], nucleus_p: float, rule: NucleusRule = "strict"
) -> Float[Tensor, "n v"]:
    """Keep the most probable tokens of each row and renormalise.

    ``strict`` is the authors' rule: tokens whose cumulative probability, their own included, is at
    most p, and always the top token. ``crossing`` is the rule of Holtzman et al. (2020) and of
    transformers: the smallest set whose probability reaches p, so one token more.

    Args:
        probs: Normalised probabilities; cumulated in their own precision, give float64.
        nucleus_p: p in (0, 1]; 1 keeps everything.
        rule: See above.
    """
    if nucleus_p >= 1.0:
        return probs
    values, ids = _head(probs, nucleus_p)
    cumulative = values.cumsum(dim=-1)
    reached = cumulative if rule == "strict" else cumulative - values
    kept = reached <= nucleus_p if rule == "strict" else reached < nucleus_p
    kept[..., 0] = True
    values = values * kept
    values = values / values.sum(dim=-1, keepdim=True)
    return torch.zeros_like(probs).scatter_(-1, ids, values)


def _head(probs: Tensor, nucleus_p: float) -> tuple[Tensor, Tensor]:
    """The largest entries in descending order: enough of them to pass p in every row.

    Sorting a vocabulary of 50,000 costs ten times as much as finding its 512 largest entries,
    which nearly always suffice.
    """
    size = probs.shape[-1]
    if size > 2 * FIRST_CANDIDATES:
        values, ids = probs.topk(FIRST_CANDIDATES, dim=-1)
        if bool((values.sum(dim=-1) > nucleus_p).all()):
            return values, ids
    values, ids = probs.sort(dim=-1, descending=True, stable=True)
    return values, ids
