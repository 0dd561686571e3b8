"""Nucleus truncation, by the authors' rule and by that of transformers."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

FIRST_CANDIDATES = 512
"""Sorting a vocabulary of 50,000 costs ten times as much as finding its 512 largest entries, which
nearly always suffice for a nucleus."""

NucleusRule = Literal["strict", "crossing"]


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

    def cut(given: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The nucleus among the tokens ``ids``, and the rows that further tokens may belong to."""
        values, order = given.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
        cumulative = values.cumsum(dim=-1)
        within = cumulative <= nucleus_p if rule == "strict" else cumulative - values < nucleus_p
        within[..., 0] = True
        kept = values * within
        kept = kept / kept.sum(dim=-1, keepdim=True)
        # Behind the last of them may stand further tokens as probable as it: these decide a row
        # unless those above them pass p.
        passes = ((cumulative > nucleus_p) & (values > values[..., -1:])).any(dim=-1)
        return torch.zeros_like(given).scatter_(-1, ids.gather(-1, order), kept), ~passes

    everything = torch.arange(probs.shape[-1], device=probs.device).expand(probs.shape)
    if probs.shape[-1] <= 2 * FIRST_CANDIDATES:
        return cut(probs, everything)[0]
    first = probs.topk(FIRST_CANDIDATES, dim=-1).indices.sort(dim=-1).values
    truncated, is_open = cut(probs, first)
    if len(rest := is_open.nonzero()[:, 0]):
        truncated[rest] = cut(probs[rest], everything[rest])[0]
    return truncated
