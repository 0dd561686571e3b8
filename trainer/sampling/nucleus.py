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
    transformers: the smallest set whose probability reaches p, so one token more. Of equally
    probable tokens the one with the smaller id comes first; no row depends on the others.

    Args:
        probs: Normalised probabilities; cumulated in their own precision, give float64.
        nucleus_p: p in (0, 1]; 1 keeps everything.
        rule: See above.
    """
    if nucleus_p >= 1.0:
        return probs
    if probs.shape[-1] <= 2 * FIRST_CANDIDATES:
        return _truncate_ordered(probs, *_in_order(probs), nucleus_p, rule)
    values, ids = _head(probs)
    truncated = _truncate_ordered(probs, values, ids, nucleus_p, rule)
    # Behind the head may stand further tokens as probable as its last one: it decides a row only
    # where those above them pass p.
    passes = (values.cumsum(dim=-1) > nucleus_p) & (values > values[..., -1:])
    rest = (~passes.any(dim=-1)).nonzero()[:, 0]
    if len(rest):
        whole = probs[rest]
        truncated[rest] = _truncate_ordered(whole, *_in_order(whole), nucleus_p, rule)
    return truncated


def _truncate_ordered(
    probs: Tensor, values: Tensor, ids: Tensor, nucleus_p: float, rule: NucleusRule
) -> Float[Tensor, "n v"]:
    """The nucleus among the first entries, which are given in descending order."""
    cumulative = values.cumsum(dim=-1)
    reached = cumulative if rule == "strict" else cumulative - values
    kept = reached <= nucleus_p if rule == "strict" else reached < nucleus_p
    kept[..., 0] = True
    values = values * kept
    values = values / values.sum(dim=-1, keepdim=True)
    return torch.zeros_like(probs).scatter_(-1, ids, values)


def _head(probs: Float[Tensor, "n v"]) -> tuple[Tensor, Tensor]:
    """The largest entries of each row in order, ties by id.

    Sorting a vocabulary of 50,000 costs ten times as much as finding its 512 largest entries,
    which nearly always suffice.
    """
    ids = probs.topk(FIRST_CANDIDATES, dim=-1).indices.sort(dim=-1).values
    values, order = _in_order(probs.gather(-1, ids))
    return values, ids.gather(-1, order)


def _in_order(values: Float[Tensor, "n k"]) -> tuple[Tensor, Tensor]:
    """In descending order; equal values in the order in which they stand."""
    ordered, places = values.sort(dim=-1, descending=True, stable=True)
    return ordered, places
