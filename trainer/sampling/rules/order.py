"""When each masked position is revealed: a forward pass number per position, drawn beforehand.

The order of a masked diffusion sampler does not depend on the model. In ancestral sampling a token
stays masked from t to s with probability p(s) / p(t), independently; over all steps that is one
uniform U per position, the token being revealed in the step where p(s) / p(1) falls below U. The
first-hitting sampler is the limit of many steps, where only the order of the U matters. So one
uniform per position says, for every sampler and NFE, in which step the position is revealed, and
steps that reveal nothing need no forward pass.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trainer.objective import Schedule, placed
from trainer.sampling.rules.draws import SampleKeys, position_uniforms

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
