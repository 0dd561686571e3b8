"""One tiny forward pass at load: does each position see earlier tokens only?

A model type says little: ``AutoModelForCausalLM`` loads a BERT as well, whose log p of a token has
seen the token. So the model is asked.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

LENGTH, NUM_VARIANTS = 8, 3
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.02}
"""How far logits may move by rounding alone, as a share of their spread over the vocabulary."""
NOISE_FACTOR = 8
"""... or by so many times what they differ between equal rows (sums in no fixed order on a GPU)."""


def probe_rows(vocab_size: int, length: int) -> Int[Tensor, "b l"]:
    """Two equal rows, then rows that differ from them in the last token alone; int64."""
    row = torch.arange(length) * vocab_size // length
    rows = row.repeat(2 + NUM_VARIANTS, 1)
    steps = 1 + torch.arange(NUM_VARIANTS) * max(1, vocab_size // (NUM_VARIANTS + 1))
    rows[2:, -1] = (rows[2:, -1] + steps) % vocab_size
    return rows


def look_ahead(logits: Float[Tensor, "b l v"], tolerance: float) -> float | None:
    """How far logits before the last position moved, by their spread; None if by rounding alone.

    Root mean squares over the vocabulary, at the position where they are worst. Logits that are
    not finite count as equal: scoring has an error of its own for those.
    """
    earlier = logits[:, :-1].nan_to_num(0.0, 0.0, 0.0)
    spread = earlier[0].std(-1)
    moves = (earlier[1:] - earlier[0]).square().mean(-1).sqrt() / spread
    if not moves.numel():
        return None
    noise, moved = float(moves[0].max()), float(moves[1:].max())
    return moved if moved > tolerance + NOISE_FACTOR * noise else None
