"""What follows a few tokens in a store's rows: a language model that costs next to nothing.

An interpolated n-gram model with absolute discounting (Ney, Essen, Kneser, 1994): of the c times
that a context was seen, d n(context) (n is how many tokens have followed it) are left to the shorter
context::

    p(w | context) = max(count(w, context) - d, 0) / c + d n(context) / c p(w | context without its first)

Beside a small language model whose own rows are counted it drafts faster than any network, and
nearly as well (benchmarks/results/drafting.md).
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
ORDER = 4
"""Tokens of the longest sequences that are counted."""


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
    """Counts of the sequences of up to four tokens in rows (three where V is above 55,108).

    Args:
        rows: The rows, of which no sequence crosses an end.
        vocab_size: V.
    """

    def __init__(self, rows: Integer[np.ndarray, "n l"], vocab_size: int) -> None:
        counts = np.bincount(rows.ravel(), minlength=vocab_size) + 0.5  # no token is impossible
        self.unigram = (counts / counts.sum()).astype(np.float32)
        self.tables: list[Table] = []
        numbers = rows.astype(np.int64)
        for size in range(1, ORDER):
            if vocab_size ** (size + 1) >= 1 << 63:  # a sequence is a number of base V
                break
            numbers = numbers[:, :-1] * vocab_size + rows[:, size:]
            found, counts = np.unique(numbers, return_counts=True)
            contexts, starts = np.unique(found // vocab_size, return_index=True)
            starts = np.append(starts, len(found))
            totals, kinds = np.add.reduceat(counts, starts[:-1]), np.diff(starts)
            shares = ((counts - DISCOUNT) / totals.repeat(kinds)).astype(np.float32)
            rest = (DISCOUNT * kinds / totals).astype(np.float32)
            self.tables.append(Table(contexts, starts, found % vocab_size, shares, rest))

    def probabilities(self, known: Sequence[int]) -> Float32[np.ndarray, "v"]:
        """Of the token behind some known ones, of which the last three count."""
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
        noise: Float32[np.ndarray, "d #v"],
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
            noise: xi of the next d positions, of which the drafts are; zeros are no look at it.
            tau: Temperature of the tokens.
            width: Most drafts behind one token.
            floor: Log-probability that a draft must exceed.
        """
        waiting, num_found = [(0.0, 0)], 0
        while waiting and num_found < size:
            cost, number = heappop(waiting)
            num_found += number > 0
            line = tree.lines[number]
            if len(line) > len(noise):
                continue
            law = self.probabilities([*known, *(tree.tokens[other] for other in line[1:])])
            race = np.log(law) / tau + noise[len(line) - 1]
            chances = np.exp(race - race.max())
            chances /= chances.sum()
            ids = np.flatnonzero(chances > exp(floor + cost))
            ids = ids[np.argsort(-chances[ids], kind="stable")[:width]]
            for token, chance in zip(ids.tolist(), chances[ids].tolist(), strict=True):
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
