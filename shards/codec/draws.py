"""The one frozen posterior draw that the frozen codecs store, each in its own way."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from shards.codec.protocol import TeacherOutput
from shards.noise import DenseProbabilities, KeyedPosterior, PositionKeys

PART_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 23}
"""Temporaries should stay in a core's cache, and should fill a GPU."""


def position_keys(output: TeacherOutput, seed: int, draw: int = 0) -> PositionKeys:
    """Keys of the B x T scored positions in row-major order; T counts from position 1."""
    num_rows, num_tokens = output.tokens.shape
    positions = torch.arange(1, num_tokens + 1, device=output.tokens.device)
    rows = output.rows.to(output.tokens.device)
    return PositionKeys(seed, rows.repeat_interleave(num_tokens), positions.repeat(num_rows), draw)


def frozen_posterior(output: TeacherOutput, seed: int) -> KeyedPosterior:
    """The exact posterior of the teacher's output: draw 0 of the keys."""
    log_probs = output.log_probs.flatten(0, 1)
    tokens = output.tokens.flatten()
    token_log_probs = log_probs.gather(1, tokens[:, None]).squeeze(1)
    keys = position_keys(output, seed)
    return KeyedPosterior(keys, tokens, token_log_probs, DenseProbabilities(log_probs))


def encode_in_parts(
    output: TeacherOutput, encode: Callable[[slice], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Encode some of the B x T positions at a time; arrays [B, T, ...].

    A codec makes several temporaries as large as the log-probabilities it is given; this keeps
    them small. The result does not depend on the parts.
    """
    device = output.log_probs.device.type
    step = max(1, PART_ELEMENTS.get(device, 1 << 20) // output.log_probs.shape[-1])
    num_positions = output.tokens.numel()
    parts = [encode(slice(first, first + step)) for first in range(0, num_positions, step)]
    return {
        name: torch.cat([part[name] for part in parts]).unflatten(0, output.tokens.shape)
        for name in parts[0]
    }


def encode_draw(
    output: TeacherOutput, seed: int, encode: Callable[[KeyedPosterior], dict[str, Tensor]]
) -> dict[str, Tensor]:
    """Encode the frozen draw, some positions at a time."""
    noise = frozen_posterior(output, seed)
    return encode_in_parts(output, lambda part: encode(noise.select(part)))


def passes_token(noise: KeyedPosterior, gumbels: Float[Tensor, "n v"]) -> Bool[Tensor, "n v"]:
    """Where rounding of xi has lifted log p_j + xi_j to the token's value or past it.

    The exact xi never does; rounding those entries down instead of to the nearest restores the
    order, so that the token stays the argmax of what is stored.
    """
    assert isinstance(noise.probabilities, DenseProbabilities)
    log_probs = noise.probabilities.log_probs
    winner = noise.token_log_probs.double() + noise.token_gumbels.double()
    close = log_probs + gumbels > (winner - 1e-3).float()[:, None]
    close.scatter_(1, noise.tokens[:, None], False)
    rows, columns = close.nonzero(as_tuple=True)
    sums = log_probs[rows, columns].double() + gumbels[rows, columns].double()
    passes = torch.zeros_like(close)
    passes[rows, columns] = sums >= winner[rows]
    return passes
