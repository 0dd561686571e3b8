"""When each masked position is revealed: a forward pass number per position, drawn beforehand.

The order of a masked diffusion sampler does not depend on the model. In ancestral sampling a token
stays masked from t to s with probability p(s) / p(t), independently; over all steps that is one
uniform U per position, the token being revealed in the step where p(s) / p(1) falls below U. The
first-hitting sampler is the limit of many steps, where only the order of the U matters. So one
uniform per position says, for every sampler and NFE, in which step the position is revealed, and
steps that reveal nothing need no forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trainer.objective.batch import Places, placed
from trainer.objective.schedules import Schedule
from trainer.sampling.token_rule import SampleKeys, TokenRule, position_uniforms

NOT_REVEALED = 0
"""Step of a position that is given."""
LAST_TIME = 1e-5


def ancestral_times(num_steps: int, last_time: float = LAST_TIME) -> Float[Tensor, "steps1"]:
    """t_0 = 1 > ... > t_T = last_time, float64, evenly spaced."""
    return torch.linspace(1, last_time, num_steps + 1, dtype=torch.float64)


def ancestral_steps(
    uniform: Float[Tensor, "b l"],
    masked: Bool[Tensor, "b l"],
    survival: Float[Tensor, "steps"],
) -> Int[Tensor, "b l"]:
    """The step, 1..T, that reveals each masked position; T + 1 where none does.

    Args:
        uniform: [B, L] float64 uniforms.
        masked: Positions to reveal; others get 0.
        survival: [T] float64, descending: the probability that a token is still masked after step
            1..T, that is p(t_k) / p(1).
    """
    num_survived = len(survival) - torch.searchsorted(survival.flip(0), uniform)
    steps = 1 + num_survived
    return torch.where(masked, steps, NOT_REVEALED)


def random_ranks(uniform: Float[Tensor, "b l"], masked: Bool[Tensor, "b l"]) -> Int[Tensor, "b l"]:
    """Ranks 0, 1, ... of the masked positions of each row in a uniformly random order.

    The largest uniform comes first, as in ancestral sampling. Positions that are not masked get
    ranks behind all masked ones.
    """
    keyed = torch.where(masked, uniform, -1.0)
    order = keyed.argsort(dim=-1, descending=True, stable=True)
    return order.argsort(dim=-1)


def fixed_count_steps(
    uniform: Float[Tensor, "b l"], masked: Bool[Tensor, "b l"], num_per_step: Int[Tensor, "b 1"]
) -> Int[Tensor, "b l"]:
    """The step that reveals each masked position when each step reveals ``num_per_step`` of them.

    One per step is the first-hitting sampler.
    """
    steps = 1 + random_ranks(uniform, masked) // num_per_step
    return torch.where(masked, steps, NOT_REVEALED)


def ancestral_order(
    schedule: Schedule,
    masked: Bool[Tensor, "b l"],
    keys: SampleKeys,
    first: int,
    times: Float[Tensor, "steps1"],
) -> tuple[Int[Tensor, "b l"], Int[Tensor, "b l"]]:
    """Ancestral steps of the masked positions, and apart from them those of the final fill.

    Args:
        schedule: p(t).
        masked: Positions to reveal.
        keys: Names of the draws.
        first: Row position of column 0.
        times: Times of the steps.
    """
    uniform = position_uniforms(keys, "sampling order", masked.shape[1], first)
    survival = placed(survival_probability(schedule, times), uniform.device)
    steps = ancestral_steps(uniform, masked, survival)
    is_left = steps >= len(times)
    return steps.masked_fill(is_left, 0), torch.where(is_left, steps, 0)


def survival_probability(
    schedule: Schedule, times: Float[Tensor, "steps1"]
) -> Float[Tensor, "steps"]:
    """Probability that a token is still masked after step 1..T: p(t_k) / p(1), and 0 at t = 0."""
    p = schedule.masking_probability(times)
    return torch.where(times > 0, p / p[0], 0.0)[1:]


def uniform_order(
    masked: Bool[Tensor, "b l"],
    keys: SampleKeys,
    first: int,
    num_per_step: Int[Tensor, "b 1"] | None = None,
) -> tuple[Int[Tensor, "b l"], Int[Tensor, "b l"]]:
    """Steps of the masked positions in a uniformly random order, one per step unless given.

    Nothing is left for a final fill, whose steps are 0. Arguments as in :func:`ancestral_order`.
    """
    uniform = position_uniforms(keys, "sampling order", masked.shape[1], first)
    one = torch.ones_like(masked[:, :1], dtype=torch.int64)
    steps = fixed_count_steps(uniform, masked, one if num_per_step is None else num_per_step)
    return steps, torch.zeros_like(steps)


# The loop that all samplers share: forward pass, choose this step's tokens, repeat.


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
