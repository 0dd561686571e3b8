"""The rule by which an engine keeps drafts, and the token it draws: two pure functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shards.noise.murmur3 import engine_gumbels, hashed_seed, scrambled_ids

NOTHING = -1
"""What the engine skips in a row of drawn tokens."""


def draw(
    logits: Float[Tensor, "n v"],
    seeds: Int[Tensor, "n"],
    positions: Int[Tensor, "n"],
    dtype: torch.dtype = torch.float32,
    is_greedy: Bool[Tensor, "n"] | None = None,
) -> Int[Tensor, "n"]:
    """argmax(l / T + g) with the keyed noise of each row.

    Args:
        logits: l / T, where top-k and nucleus have left -inf; l itself in greedy rows. They are
            overwritten.
        seeds: int64, of the rows' requests.
        positions: int64, of the token before the drawn one.
        dtype: Of the noise: float32, or float64 as the engine's ``use_fp64_gumbel``.
        is_greedy: Rows that get argmax l.
    """
    kernel = _cpu_kernel() if logits.device.type == "cpu" and dtype == torch.float32 else None
    if kernel is not None:
        begun = [hashed_seed(seed, 0) & 0xFFFFFFFF for seed in seeds.tolist()]
        greedy = np.zeros(len(seeds), np.bool_) if is_greedy is None else is_greedy.numpy()
        drawn = np.empty(len(seeds), np.int64)
        words = np.array(begun, dtype=np.uint32), positions.long().numpy()
        ids = scrambled_ids(0, logits.shape[1], logits.device).numpy().view(np.uint32)
        kernel(logits.float().numpy(), *words, ids, greedy, drawn)
        return torch.from_numpy(drawn)
    noise = engine_gumbels(seeds, positions, 0, logits.shape[1], dtype)
    if is_greedy is not None:
        noise.masked_fill_(is_greedy[:, None], 0.0)
    return noise.add_(logits).argmax(dim=-1)


@lru_cache(maxsize=1)
def _cpu_kernel() -> Callable[..., None] | None:
    """The same draws without most of the logarithms, where numba is: it comes with vLLM."""
    try:
        from trainer.serving.fast_draw import fast_draw
    except ImportError:
        return None
    return fast_draw


def keep_agreeing(
    drafts: Int[Tensor, "n"], targets: Int[Tensor, "n"], counts: Int[Tensor, "b"], bonus: Int[Tensor, "b"], width: int
) -> Int[Tensor, "b k"]:
    """The drawn tokens of each request: drafts while they are what the target draws, and one more.

    Whatever is drafted, the tokens are the target's own draws; a draft only saves a pass.

    Args:
        drafts: Drafts of all requests, one behind the other.
        targets: What the target draws at each of them, if the drafts before it stand.
        counts: Drafts per request.
        bonus: What the target draws behind the last draft.
        width: The largest count.

    Returns:
        [b, width + 1] int32; ``NOTHING`` behind a request's last token.
    """
    columns = torch.arange(width + 1, device=counts.device)
    starts, is_draft = counts.cumsum(0) - counts, columns < counts[:, None]
    places = torch.where(is_draft, starts[:, None] + columns, 0)
    agrees = is_draft & (drafts[places] == targets[places]) if len(drafts) else is_draft
    kept = agrees.int().cumprod(dim=1).sum(dim=1, keepdim=True)
    tokens = torch.where(is_draft, targets[places], NOTHING) if len(drafts) else columns - columns
    tokens = tokens.expand(len(counts), -1).scatter(1, counts[:, None].long(), bonus[:, None])
    return torch.where(columns <= kept, tokens, NOTHING).int()
