"""What follows a few tokens in a store's rows: a language model that costs next to nothing.

Interpolated n-grams with absolute discounting (Ney, Essen, Kneser, 1994): of how often each token
followed a context d is taken, and what that leaves goes to the shorter context::

    p(w | context) = (c(w) - d) / sum c + d n / sum c p(w | context without its first token)

n is how many tokens have followed the context. (Kneser's and Ney's counts for the shorter contexts
are nearer to the text by 0.17 nats a token, and brought no more tokens per pass.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from math import exp, log

import numpy as np
from jaxtyping import Float32, Integer

from shards.errors import UsageError
from shards.store.store import ShardStore
from trainer.sampling.trees import Tree

DISCOUNT = 0.75
ORDER = 5
"""Tokens of the longest sequences that are counted."""
LEAST_CHANCE = 1e-40
"""A float32 that is less may be 0, which has no logarithm."""


@dataclass(frozen=True)
class Table:
    """What has followed contexts of one length.

    Attributes:
        contexts: [c] numbers of base V, ascending.
        starts: [c + 1] where the tokens behind each begin.
        tokens: [k] what has followed.
        shares: [k] discounted counts, as shares of their context's.
        rest: [c] the share that is left to the shorter context.
    """

    contexts: Integer[np.ndarray, "c"]
    starts: Integer[np.ndarray, "c1"]
    tokens: Integer[np.ndarray, "k"]
    shares: Float32[np.ndarray, "k"]
    rest: Float32[np.ndarray, "c"]


class NGrams:
    """Counts of the sequences of up to five tokens in rows (four where V is above 6,208, three above 55,108).

    Args:
        rows: The rows, of which no sequence crosses an end.
        vocab_size: V.
    """

    def __init__(self, rows: Integer[np.ndarray, "r t"], vocab_size: int) -> None:
        counts = np.bincount(rows.ravel(), minlength=vocab_size) + 0.5  # no token is impossible
        self.unigram = (counts / counts.sum()).astype(np.float32)
        self.tables: list[Table] = []
        numbers = rows.astype(np.int64)
        for size in range(2, ORDER + 1):
            if vocab_size**size >= 1 << 63:  # a sequence is a number of base V
                break
            numbers = numbers[:, :-1] * vocab_size + rows[:, size - 1 :]
            found, counts = np.unique(numbers, return_counts=True)
            contexts, starts = np.unique(found // vocab_size, return_index=True)
            totals, starts = np.add.reduceat(counts, starts), np.append(starts, len(found))
            kinds = np.diff(starts)
            shares = ((counts - DISCOUNT) / totals.repeat(kinds)).astype(np.float32)
            rest = (DISCOUNT * kinds / totals).astype(np.float32)
            self.tables.append(Table(contexts, starts, found % vocab_size, shares, rest))

    def probabilities(self, known: Sequence[int]) -> Float32[np.ndarray, "v"]:
        """Of the token behind some known ones, of which the last four count."""
        law, number, base = self.unigram, 0, 1
        for token, table in zip(reversed(known), self.tables, strict=False):
            number, base = number + token * base, base * len(law)
            place = int(table.contexts.searchsorted(number))
            if place == len(table.contexts) or table.contexts[place] != number:
                break
            behind = slice(table.starts[place], table.starts[place + 1])
            law = law * table.rest[place]
            law[table.tokens[behind]] += table.shares[behind]
        return law

    def grow(
        self,
        tree: Tree,
        known: Sequence[int],
        weights: Float32[np.ndarray, "d #v"],
        tau: float,
        size: int,
        width: int,
        floor: float,
    ) -> Tree:
        """The ``size`` most probable drafts behind a row.

        A step costs so little that the search takes one from the most probable draft at a time.

        Args:
            tree: The row's last token.
            known: The row's last tokens, that one included.
            weights: e^xi of the next d positions, of which the drafts are; ones are no look at it.
            tau: Temperature of the tokens.
            width: Most drafts behind one token.
            floor: Log-probability that a draft must exceed.
        """
        waiting, num_found = [(0.0, 0)], 0
        while waiting and num_found < size:
            cost, number = heappop(waiting)
            num_found += number > 0
            line = tree.lines[number]
            if num_found == size or len(line) > len(weights):
                continue
            law = self.probabilities([*known, *(tree.tokens[other] for other in line[1:])])
            race = (law if tau == 1 else law ** (1 / tau)) * weights[len(line) - 1]
            total = race.sum()
            ids = np.flatnonzero(race > max(exp(floor + cost), LEAST_CHANCE) * total)
            ids = ids[np.argsort(-race[ids], kind="stable")[:width]]
            for token, chance in zip(ids.tolist(), (race[ids] / total).tolist(), strict=True):
                tree.add(token, number, log(chance) - cost)
                heappush(waiting, (cost - log(chance), len(tree.tokens) - 1))
        return tree.cut(size, floor)


@lru_cache(maxsize=1)
def ngrams_of(place: str, vocab_size: int) -> NGrams:
    """Counts of a store's training rows; of 2 million tokens in two seconds.

    Raises:
        UsageError: Where there is no store, or one of another vocabulary.
    """
    store = ShardStore.find(place)
    if (got := store.manifest.vocab_size) != vocab_size:
        what, where = "these rows are of another vocabulary", f"ngrams, {place}"
        raise UsageError(what, where=where, got=f"{got} tokens", expected=vocab_size)
    split = store.split("train", ["tokens"])
    return NGrams(split.read_rows(0, split.num_rows)["tokens"], vocab_size)
