"""The loop that all samplers share: forward pass, choose this step's tokens, repeat."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trainer.sampling.draws import SampleKeys
from trainer.sampling.token_rule import TokenRule


@runtime_checkable
class Predict(Protocol):
    """A student as the loop sees it; the forward pass of one step."""

    def __call__(
        self,
        rows: Int[Tensor, "m"],
        tokens: Int[Tensor, "m l"],
        where: Bool[Tensor, "m l"],
        step: int,
    ) -> Float[Tensor, "n v1"]:
        """Log-probabilities of x_0 at the n positions of ``where``, row-major.

        Args:
            rows: Batch rows that take part.
            tokens: Their tokens so far, the mask id where unknown.
            where: Positions to predict, all of them masked.
            step: Number of the step, from 1.
        """
        ...


def reveal(
    predict: Predict,
    tokens: Int[Tensor, "b l"],
    steps: Int[Tensor, "b l"],
    rule: TokenRule,
    keys: SampleKeys,
    *,
    last_step: int | None = None,
    first_position: int = 0,
) -> tuple[Int[Tensor, "b l"], Int[Tensor, "b"]]:
    """Reveal every position in its step.

    A row takes part in a forward pass only when it has a token to reveal: between two passes its
    input always changes, so this is what caching p(x_0) while x stays the same comes to.

    Args:
        predict: The student.
        tokens: The mask id where a token is to be filled in; other tokens are never changed.
        steps: Step that reveals each position; 0 where the token is given.
        rule: How tokens are chosen.
        keys: Names of the draws.
        last_step: Stop after this step; positions of later steps stay masked.
        first_position: Row position of column 0, for the names of the draws.

    Returns:
        Tokens, and the forward passes each row took part in.
    """
    tokens = tokens.clone()
    nfe = torch.zeros_like(tokens[:, 0])
    for step in steps.unique().tolist():
        if step < 1 or (last_step is not None and step > last_step):
            continue
        where = steps == step
        rows = where.any(dim=1).nonzero()[:, 0]
        log_probs = predict(rows, tokens[rows], where[rows], step)
        tokens[where] = rule.choose(log_probs, keys.at("sampling tokens", where, first_position))
        nfe[rows] += 1
    return tokens, nfe


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
