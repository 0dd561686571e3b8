"""The likeliest tokens of many distributions: the costliest step of encoding, made cheap.

``torch.topk`` takes 5 us for 64 of 512 entries on one CPU core and 110 us for 64 of 50,257, more
than a third of which a small teacher's own forward pass takes. Two remedies, both exact:

- numpy's partition is vectorised: 2 us.
- Cut V into blocks of 8. The k largest entries lie in the k blocks with the largest maxima, so only
  8 k entries need to be ranked: 30 us.

Among equal probabilities at the border any may be chosen, as by ``torch.topk``.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

BLOCK_SIZE = 8
SMALLEST_SHARE = 4
"""Blocks pay where there are at least so many times more of them than wanted entries."""


def likeliest_tokens(
    log_probs: Float[Tensor, "n v"], num_entries: int
) -> tuple[Float[Tensor, "n m"], Int[Tensor, "n m"]]:
    """The M largest of each row, largest first, and their ids (int64)."""
    if log_probs.device.type != "cpu":
        values, ids = log_probs.topk(num_entries, dim=-1)
        return values, ids
    num_blocks = log_probs.shape[1] // BLOCK_SIZE
    if num_blocks < SMALLEST_SHARE * num_entries:
        return _sorted(log_probs, _partition(log_probs, num_entries))
    candidates = _best_blocks(log_probs, num_blocks, num_entries)
    chosen = _partition(log_probs.gather(1, candidates), num_entries)
    return _sorted(log_probs, candidates.gather(1, chosen))


def _best_blocks(
    log_probs: Float[Tensor, "n v"], num_blocks: int, num_entries: int
) -> Int[Tensor, "n c"]:
    """Ids of all entries of the best blocks, and of what fills no block.

    Block b holds ids b, b + num_blocks, ..., so that its maximum is taken across whole vectors.
    """
    whole = BLOCK_SIZE * num_blocks
    maxima = log_probs[:, :whole].unflatten(1, (BLOCK_SIZE, num_blocks)).amax(1)
    blocks = _partition(maxima, num_entries)
    ids = (blocks[:, None] + torch.arange(0, whole, num_blocks)[:, None]).flatten(1)
    rest = torch.arange(whole, log_probs.shape[1]).expand(len(log_probs), -1)
    return torch.cat([ids, rest], dim=1)


def _partition(values: Float[Tensor, "n w"], num_entries: int) -> Int[Tensor, "n m"]:
    """Indices of the largest entries, in no order."""
    first = values.shape[1] - num_entries
    order = np.argpartition(values.numpy(), first, axis=-1) if first else None
    if order is None:
        return torch.arange(num_entries).expand(len(values), -1)
    return torch.from_numpy(order[:, first:])


def _sorted(
    log_probs: Float[Tensor, "n v"], ids: Int[Tensor, "n m"]
) -> tuple[Float[Tensor, "n m"], Int[Tensor, "n m"]]:
    values, order = log_probs.gather(1, ids).sort(1, descending=True)
    return values, ids.gather(1, order)
