"""The best any unconditioned masked diffusion model can do on a small language, exactly.

At a step the model knows the revealed tokens and draws every token it reveals from that token's
own conditional distribution, independently of the others revealed in the same step. The optimum
predicts those conditionals exactly. Its chance of producing a sequence x is

    P(x) = E_order [ product over steps, over i revealed in it, of p(x_i | x_revealed before) ]

where each position is revealed in step 1..T with the probability the schedule gives, independently
of the others. Sums run over subsets of positions, so this is for rows of at most about 12 tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from evaluation.maze.success import EOS


def step_probabilities(num_steps: int, time_end: float = 1e-5) -> Float[np.ndarray, "t"]:
    """P(a token is revealed in step k) for ancestral sampling on linspace(1, time_end, T + 1).

    The remainder ``time_end``, left to the final fill, is added to the last step.
    """
    times = np.linspace(1.0, time_end, num_steps + 1)
    shares = times[:-1] - times[1:]
    shares[-1] += time_end
    return shares


def conditional_table(
    language: Int[np.ndarray, "p l"], weights: Float[np.ndarray, "p"], target: Int[np.ndarray, "l"]
) -> Float[np.ndarray, "s l"]:
    """p(x_i | x_S) of ``target`` for every subset S of positions (bit mask) and every position i.

    Args:
        language: All sequences of the language.
        weights: Their probabilities.
        target: The sequence x; each x_S must occur in the language.
    """
    length = language.shape[1]
    agree = language == target[None]
    table = np.empty((2**length, length))
    for subset in range(2**length):
        members = [i for i in range(length) if subset >> i & 1]
        consistent = weights * agree[:, members].all(1)
        table[subset] = (consistent[:, None] * agree).sum(0) / consistent.sum()
    return table


def sequence_probabilities(
    tables: Float[np.ndarray, "p s l"], shares: Float[np.ndarray, "t"]
) -> Float[np.ndarray, "p"]:
    """P(x) of the module docstring for p sequences, by dynamic programming over subsets."""
    num_sequences, num_subsets, _ = tables.shape
    state = np.zeros((num_sequences, num_subsets))
    state[:, 0] = 1.0
    remaining = 1.0
    for share in shares:
        rate = min(1.0, share / remaining)
        remaining -= share
        state = _one_step(state, tables, rate)
    return state[:, -1]


def _one_step(
    state: Float[np.ndarray, "p s"], tables: Float[np.ndarray, "p s l"], rate: float
) -> Float[np.ndarray, "p s"]:
    result = np.zeros_like(state)
    for subset in np.flatnonzero(state.any(0)):
        # All supersets, grown one hidden position at a time: it stays masked or is revealed.
        targets, values = np.array([subset]), state[:, [subset]]
        for position in range(tables.shape[2]):
            if not subset >> position & 1:
                revealed = values * rate * tables[:, subset, position, None]
                targets = np.concatenate([targets, targets | (1 << position)])
                values = np.concatenate([values * (1 - rate), revealed], axis=1)
        result[:, targets] += values
    return result


def optimal_success(
    language: Int[np.ndarray, "p l"], weights: Float[np.ndarray, "p"], num_steps: int
) -> tuple[float, Float[np.ndarray, "p"]]:
    """The factorised optimum's chance to produce a sequence of the language, and of each one.

    Args:
        language: All sequences, one a row, without the position that is given.
        weights: Their probabilities.
        num_steps: T, the NFE budget of ancestral sampling.

    Raises:
        ValueError: For rows of more than 14 tokens (the sums are exponential in the length).
    """
    if language.shape[1] > 14:
        raise ValueError(f"rows of {language.shape[1]} tokens are too long to enumerate (max 14)")
    varying = [i for i in range(language.shape[1]) if len(set(language[:, i])) > 1]
    reduced = language[:, varying]
    shares = step_probabilities(num_steps)
    tables = np.stack([conditional_table(reduced, weights, target) for target in reduced])
    each = sequence_probabilities(tables, shares)
    return float(each.sum()), each


def rows_of_paths(
    paths: Sequence[Sequence[str]], length: int, ids: dict[str, int]
) -> Int[np.ndarray, "p l"]:
    """Paths as token rows of ``length``, padded with the end marker."""
    padded = [list(itertools.chain(path, [EOS] * (length - len(path)))) for path in paths]
    return np.array([[ids[word] for word in row] for row in padded])
