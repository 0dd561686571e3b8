"""The loop that all samplers share: forward pass, choose this step's tokens, repeat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from trainer.objective import Places, placed
from trainer.sampling.rules.draws import SampleKeys
from trainer.sampling.rules.token_rule import TokenRule

POSITIONS_AT_A_TIME = 8000
"""Most positions whose log-probabilities are held: 1.6 GB at V = 50,257. With few passes a whole
batch would be revealed at once, and its logits would outgrow the student. Below 2^31 elements up
to V = 268,000, which is as far as kernels count in 32 bits."""


@runtime_checkable
class Predict(Protocol):
    """A student as the loop sees it; the forward pass of one step."""

    def __call__(
        self,
        rows: Int[Tensor, "m"],
        tokens: Int[Tensor, "m l"],
        where: Places,
        steps: Int[Tensor, "m"],
    ) -> Float[Tensor, "n v1"]:
        """Log-probabilities of x_0 at the n places of ``where``.

        Args:
            rows: Batch rows that take part.
            tokens: Their tokens so far, the mask id where unknown.
            where: Places among those rows to predict, all of them masked.
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
    ranks = dense_ranks(steps)
    for part in plan_passes(ranks, steps):
        log_probs = predict(part.rows, tokens[part.rows], part.where, part.steps)
        names = keys.at("sampling tokens", part.places, first_position)
        tokens[part.places.index] = rule.choose(log_probs, names)
    return tokens, ranks.amax(dim=1)


@dataclass(frozen=True)
class Pass:
    """A forward pass: m rows, and the n places that it reveals in them.

    Attributes:
        rows: [m] int64.
        steps: [m] int64, the step each of them is in.
        places: Places of the batch.
        where: The same places among the m rows.
    """

    rows: Int[Tensor, "m"]
    steps: Int[Tensor, "m"]
    places: Places
    where: Places


def plan_passes(ranks: Int[Tensor, "b l"], steps: Int[Tensor, "b l"]) -> Iterator[Pass]:
    """All forward passes, from the pass (1, 2, ...; 0 is none) and the step of each position.

    Planned on the host, which waits for a GPU here and in no pass.
    """
    device, length = ranks.device, ranks.shape[1]
    pass_of, step_of = torch.stack((ranks, steps)).to("cpu").flatten(1)
    open_places = pass_of.nonzero()[:, 0]
    order = open_places[pass_of[open_places].argsort(stable=True)]
    rows = order // length
    first = pass_of[order] * len(ranks) + rows  # ascending: pass by pass, row by row
    groups, group_of, sizes = first.unique_consecutive(return_inverse=True, return_counts=True)
    ends = sizes.cumsum(0)
    starts = ends - sizes
    group_rows, group_steps = groups % max(1, len(ranks)), step_of[order[starts]]
    group_data = placed(torch.stack((group_rows, group_steps)), device)
    place_data = placed(torch.stack((rows, order % length, group_of)), device)
    counts = (groups // max(1, len(ranks))).unique_consecutive(return_counts=True)[1].tolist()
    begin, lengths, stops = 0, sizes.tolist(), ends.tolist()
    for count in counts:
        for part in row_groups(lengths[begin : begin + count]):
            low, high = begin + part.start, begin + part.stop
            inside = slice(stops[low] - lengths[low], stops[high - 1])
            batch_rows, positions, group = place_data[:, inside]
            rows_of_pass, steps_of_pass = group_data[:, low:high]
            yield Pass(
                rows_of_pass,
                steps_of_pass,
                Places(batch_rows, positions),
                Places(group - low, positions),
            )
        begin += count


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
