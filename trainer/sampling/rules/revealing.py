"""The loop that all samplers share: forward pass, choose this step's tokens, repeat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trainer.sampling.rules.draws import SampleKeys
from trainer.sampling.rules.token_rule import TokenRule

POSITIONS_AT_A_TIME = 8192
"""Most positions whose log-probabilities are held: 1.6 GB at V = 50,257. With few passes a whole
batch would be revealed at once, and its logits would outgrow the student."""


@runtime_checkable
class Predict(Protocol):
    """A student as the loop sees it; the forward pass of one step."""

    def __call__(
        self,
        rows: Int[Tensor, "m"],
        tokens: Int[Tensor, "m l"],
        where: Bool[Tensor, "m l"],
        steps: Int[Tensor, "m"],
    ) -> Float[Tensor, "n v1"]:
        """Log-probabilities of x_0 at the n positions of ``where``, row-major.

        Args:
            rows: Batch rows that take part.
            tokens: Their tokens so far, the mask id where unknown.
            where: Positions to predict, all of them masked.
            steps: Step of the sampler that each row is in, from 1.
        """
        ...


def reveal(
    predict: Predict,
    tokens: Int[Tensor, "b l"],
    steps: Int[Tensor, "b l"],
    rule: TokenRule,
    keys: SampleKeys,
    *,
    first_position: int = 0,
) -> tuple[Int[Tensor, "b l"], Int[Tensor, "b"]]:
    """Reveal every position in its step.

    A row skips the steps that reveal nothing in it. Between two of its forward passes its input
    always changes, so this is what reusing p(x_0) while x stays the same comes to. Rows of a batch
    need not be in the same step: pass k serves each row's k-th step that reveals something.

    Args:
        predict: The student.
        tokens: The mask id where a token is to be filled in; other tokens are never changed.
        steps: Step that reveals each position; 0 where it is given, or is to stay masked.
        rule: How tokens are chosen.
        keys: Names of the draws.
        first_position: Row position of column 0, for the names of the draws.

    Returns:
        Tokens, and the forward passes each row took part in.
    """
    tokens = tokens.clone()
    passes = dense_ranks(steps)
    for number in range(1, int(passes.max()) + 1 if passes.numel() else 1):
        where = passes == number
        rows = where.any(dim=1).nonzero()[:, 0]
        now = torch.where(where[rows], steps[rows], 0).amax(dim=1)
        for group in row_groups(where[rows].sum(dim=1).tolist()):
            chosen, here = rows[group], torch.zeros_like(where)
            here[chosen] = where[chosen]
            log_probs = predict(chosen, tokens[chosen], where[chosen], now[group])
            names = keys.at("sampling tokens", here, first_position)
            tokens[here] = rule.choose(log_probs, names)
    return tokens, passes.amax(dim=1)


def row_groups(num_positions: Sequence[int]) -> Iterator[slice]:
    """Consecutive rows with at most ``POSITIONS_AT_A_TIME`` positions in all; at least one row."""
    start, total = 0, 0
    for row, count in enumerate(num_positions):
        total += count
        if total > POSITIONS_AT_A_TIME and row > start:
            yield slice(start, row)
            start, total = row, count
    yield slice(start, len(num_positions))


def dense_ranks(steps: Int[Tensor, "b l"]) -> Int[Tensor, "b l"]:
    """Each row's distinct positive values numbered 1, 2, ... in ascending order; 0 stays 0."""
    ordered, places = steps.sort(dim=1)
    rises = torch.cat((ordered[:, :1] > 0, ordered.diff(dim=1) > 0), dim=1)
    return torch.empty_like(steps).scatter_(1, places, rises.cumsum(dim=1))


@contextmanager
def inference(student: torch.nn.Module) -> Iterator[None]:
    """No gradients and no dropout; the student is left in the mode it was in."""
    was_training = student.training
    student.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        student.train(was_training)
