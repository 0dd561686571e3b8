"""One tiny forward pass at load: is this model fit to be a teacher?

A model type says little: ``AutoModelForCausalLM`` loads a BERT as well, whose log p of a token has
seen the token. So the model is asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shards.base import UsageError

if TYPE_CHECKING:
    from pipeline.teacher.model import Teacher

LENGTH, NUM_VARIANTS = 8, 3
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.02}
"""How far logits may move by rounding alone, as a share of their spread over the vocabulary."""
NOISE_FACTOR = 8
"""... or by so many times what they differ between equal rows (sums in no fixed order on a GPU)."""


@torch.inference_mode()
def check_teacher(teacher: Teacher) -> None:
    """Refuse a model that looks ahead, or whose logits cannot be had in float32.

    Raises:
        UsageError: If it is one.
    """
    rows = probe_rows(teacher.vocab_size, min(LENGTH, teacher.context_length or LENGTH))
    head = teacher.head
    try:
        logits = teacher.model(input_ids=rows.to(teacher.device), use_cache=False).logits
        unused = head is None or head.last_logits is None
    finally:
        if head is not None:
            head.forget()
    if teacher.dtype != "float32" and (unused or logits.dtype != torch.float32):
        raise UsageError(
            "this teacher's output layer gives no float32 logits",
            where=f"{teacher.files.name}, --dtype {teacher.dtype}",
            got="no plain linear layer" if unused else f"logits rounded to {logits.dtype}",
            expected="logits that are not rounded: that would cost fidelity in every token",
            remedy="use --dtype float32",
        )
    moved = look_ahead(logits[..., : teacher.vocab_size].float(), TOLERANCES[teacher.dtype])
    if moved is not None:
        raise UsageError(
            "the teacher is not causal",
            where=teacher.files.name,
            got=f"logits that move by {moved:.2g} of their spread when a later token changes",
            expected="a model that sees earlier tokens only",
            remedy="a BERT-type decoder needs is_decoder in its config.json; any other model of "
            "this kind tells a token's probability after seeing the token",
        )


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
