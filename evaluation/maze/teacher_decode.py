"""What the teacher itself would have written from the same noise, one token at a time.

By the Gumbel-max trick the teacher's sequential decode of noise xi is x_i = argmax(log p + xi_i).
A student that has learnt the map from noise to text writes the same sample in parallel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from evaluation.score import Score, wilson_interval
from shards.errors import GdistillError
from shards.noise.kinds import Noise


@torch.no_grad()
def teacher_decode(
    model: Any, first_tokens: Int[Tensor, "b"], noise: Noise, row_length: int
) -> Int[Tensor, "b l"]:
    """Decode B rows by Gumbel-max, position 0 given.

    Args:
        model: A causal language model of transformers, float32.
        first_tokens: Token at position 0 of each row.
        noise: Arrival times of B * row_length positions, row by row; position 0 is unused.
        row_length: Tokens in a row.

    Raises:
        GdistillError: When noise and rows differ in number, or the model has no logit for an entry.
    """
    num_rows = first_tokens.shape[0]
    if noise.num_positions != num_rows * row_length:
        raise GdistillError(
            "the noise does not fit the rows",
            got=f"{noise.num_positions} positions",
            expected=f"{num_rows} x {row_length}",
        )
    tokens, cache = first_tokens[:, None], None
    for position in range(1, row_length):
        output = model(input_ids=tokens[:, -1:], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        log_probs = output.logits[:, -1].float().log_softmax(-1)[:, : noise.vocab_size]
        index = torch.arange(num_rows) * row_length + position
        arrivals = noise.select(index).tile(0, noise.vocab_size)
        tokens = torch.cat([tokens, (log_probs - arrivals.log()).argmax(-1)[:, None]], dim=1)
    return tokens


def teacher_agreement(samples: Sequence[Sequence[int]], teacher_rows: Int[Tensor, "b l"]) -> Score:
    """Share of samples that equal the teacher's decode token by token."""
    expected = teacher_rows.tolist()
    if len(expected) != len(samples):
        raise GdistillError(
            "one teacher row per sample is needed", got=len(expected), expected=len(samples)
        )
    num_equal = sum(list(ours) == theirs for ours, theirs in zip(samples, expected, strict=True))
    return Score(
        name="equal_to_teacher_decode",
        value=num_equal / len(expected),
        num_samples=len(expected),
        interval=wilson_interval(num_equal, len(expected)),
        details={"num_equal": num_equal},
    )
