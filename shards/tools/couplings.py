"""What each way of coupling noise to tokens would cost and keep, measured on a store, untrained.

From the stored distributions: bytes per token, how often the coding loses the token, and the
chance that two contexts pick the same token from the same noise, over pairs of positions drawn at
random and pairs behind the same token, in classes of their total variation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import zstandard
from jaxtyping import Float, Int
from torch import Tensor

from shards.codec.posterior import PosteriorCodec
from shards.codec.protocol import TeacherOutput
from shards.console import aligned
from shards.errors import UsageError
from shards.noise.couplings import (
    TokenTree,
    along_widest,
    balanced_tree,
    gumbel_same_token,
    huffman_tree,
    intervals,
    total_variation,
    uniform_same_token,
)
from shards.noise.probabilities import Probabilities
from shards.provenance import derive_seed
from shards.store.layout import ZSTD_LEVEL
from shards.store.store import ShardStore

NUM_ROWS = 256
CLASSES = (0.0, 0.1, 0.3, 0.6, 1.0)
"""Bounds of the classes of total variation."""
CHUNK_ENTRIES = 1 << 22
BRANCH_LEVELS = 255


@dataclass(frozen=True)
class Coupling:
    """One way to make a token from noise and a distribution.

    Attributes:
        name: For tables.
        same_token: (p [n, V], q [n, V]) -> chance of the same token under the same noise.
        kept: (p [n, V], tokens [n]) -> chance that decoding the stored form gives the token.
        bytes_of: tokens [n] -> bytes of each.
    """

    name: str
    same_token: Callable[[Tensor, Tensor], Tensor]
    kept: Callable[[Tensor, Tensor], Tensor]
    bytes_of: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class CouplingFigures:
    """One line of the table.

    Attributes:
        name: The coupling.
        bytes_per_token: What a store would keep for it, beside the tokens; None of a bound.
        agreement: Chance that the coded form still decodes to the token; None of a bound.
        random_pairs: Chance of the same token in two random positions, mean.
        same_last_token: The same for positions behind the same token.
        by_variation: The same by class of total variation; None where no pair fell into it.
    """

    name: str
    bytes_per_token: float | None
    agreement: float | None
    random_pairs: float
    same_last_token: float
    by_variation: tuple[float | None, ...]


@dataclass(frozen=True)
class CouplingReport:
    """The table, and what it was computed from.

    Attributes:
        figures: A line per coupling; the last two are the bounds of any and of the Gumbel one.
        num_positions: Positions whose distributions were read.
        num_pairs: Pairs of each kind.
        pairs_by_variation: Pairs of both kinds in each class.
    """

    figures: tuple[CouplingFigures, ...]
    num_positions: int
    num_pairs: int
    pairs_by_variation: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """Figures by name."""
        return {"classes_of_total_variation": list(CLASSES), **asdict(self)}

    def to_text(self) -> str:
        """An aligned table."""
        classes = [f"TV<{bound:g}" for bound in CLASSES[1:]]
        head = ("coupling", "B/token", "agreement", "random", "same last", *classes)
        rows = [head, *(_cells(line) for line in self.figures)]
        counts = (*2 * (self.num_pairs,), *self.pairs_by_variation)
        rows.append(("pairs", "", "", *map(str, counts)))
        return "\n".join(aligned(rows))


def _cells(line: CouplingFigures) -> tuple[str, ...]:
    numbers = (line.agreement, line.random_pairs, line.same_last_token, *line.by_variation)
    size = "" if line.bytes_per_token is None else f"{line.bytes_per_token:.1f}"
    shown = ("" if x is None else f"{x:.3f}" for x in numbers)
    return line.name, size, *shown


def measure_couplings(
    store: ShardStore, *, split: str = "train", num_pairs: int = 1000, seed: int = 0
) -> CouplingReport:
    """Compute the table of a store whose codec keeps probabilities.

    Args:
        store: A finished store.
        split: Where the positions come from.
        num_pairs: Pairs of each kind.
        seed: Chooses rows and pairs.

    Raises:
        UsageError: For a store of frozen draws, an unknown split, or fewer than two positions.
    """
    if num_pairs < 1:
        raise UsageError("too few pairs", where="--pairs", got=num_pairs, expected="at least 1")
    positions = _Positions.read(store, split, np.random.default_rng(derive_seed(seed, split)))
    random = np.random.default_rng(derive_seed(seed, "pairs", split))
    pairs = (positions.random_pairs(num_pairs, random), positions.alike_pairs(num_pairs, random))
    couplings = _couplings(store, positions)
    variation, same = _chances(positions, np.concatenate(pairs), couplings)
    kept = _kept(positions, couplings)
    classes = np.clip(np.searchsorted(CLASSES, variation, side="right") - 1, 0, len(CLASSES) - 2)
    names = [coupling.name for coupling in couplings]
    sizes = [float(one.bytes_of(positions.tokens).double().mean()) for one in couplings]
    names += ["any: at most 1 - TV", "gumbel: at least (1 - TV) / (1 + TV)"]
    figures = (
        CouplingFigures(
            name,
            size,
            agreement,
            float(chance[:num_pairs].mean()),
            float(chance[num_pairs:].mean()),
            tuple(_mean(chance[classes == index]) for index in range(len(CLASSES) - 1)),
        )
        for name, size, agreement, chance in zip(
            names, [*sizes, None, None], [*kept, None, None], same, strict=True
        )
    )
    counts = np.bincount(classes, minlength=len(CLASSES) - 1)
    return CouplingReport(tuple(figures), len(positions.tokens), num_pairs, tuple(counts.tolist()))


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


@dataclass(frozen=True)
class _Positions:
    """Scored positions of some rows: tokens, those before them, the teacher's probabilities."""

    tokens: Int[Tensor, "n"]
    before: Int[Tensor, "n"]
    probabilities: Probabilities

    @classmethod
    def read(cls, store: ShardStore, split: str, random: np.random.Generator) -> _Positions:
        reader = store.split(split)
        chosen = np.sort(random.permutation(reader.num_rows)[:NUM_ROWS])
        parts = [reader.read_rows(int(row), int(row) + 1) for row in chosen]
        arrays = {
            name: torch.from_numpy(np.concatenate([part[name] for part in parts]))
            for name in parts[0]
        }
        tokens, log_probs = arrays.pop("tokens").long(), arrays.pop("token_log_probs")
        given = {name: array[:, 1:].flatten(0, 1) for name, array in arrays.items()}
        own, before = tokens[:, 1:].flatten(), tokens[:, :-1].flatten()
        if len(own) < 2:
            raise UsageError("too few positions for a pair", where=f"split {split}", got=len(own))
        flat = log_probs[:, 1:].flatten()
        return cls(own, before, store.codec.distribution(given, own, flat, store.resources))

    def p(self, index: np.ndarray) -> Float[Tensor, "n v"]:
        """Normalised, float64."""
        part = self.probabilities.select(torch.from_numpy(index))
        dense = part.tile(0, part.vocab_size).double()
        return dense / dense.sum(1, keepdim=True)

    def chunks(self, count: int) -> list[np.ndarray]:
        """0..count-1 in parts whose distributions fit into memory."""
        width = max(1, CHUNK_ENTRIES // self.probabilities.vocab_size)
        return [np.arange(start, min(start + width, count)) for start in range(0, count, width)]

    def random_pairs(self, count: int, random: np.random.Generator) -> Int[np.ndarray, "n two"]:
        """Two different positions each."""
        first = random.integers(len(self.tokens), size=count)
        step = random.integers(1, len(self.tokens), size=count)
        return np.stack([first, (first + step) % len(self.tokens)], axis=1)

    def alike_pairs(self, count: int, random: np.random.Generator) -> Int[np.ndarray, "n two"]:
        """Two different positions behind the same token each.

        Raises:
            UsageError: When no token is met twice.
        """
        order = np.argsort(self.before.numpy(), kind="stable")
        _, start, size = np.unique(
            self.before.numpy()[order], return_index=True, return_counts=True
        )
        group = np.repeat(np.arange(len(size)), size)
        places = np.flatnonzero(size[group] > 1)
        if not len(places):
            raise UsageError("no token is met twice", where="split", got=f"{len(order)} positions")
        first = random.choice(places, size=count)
        begin, width = start[group[first]], size[group[first]]
        step = 1 + (random.random(count) * (width - 1)).astype(np.int64)
        return np.stack([order[first], order[begin + (first - begin + step) % width]], axis=1)


def _couplings(store: ShardStore, positions: _Positions) -> list[Coupling]:
    weights = _unigram(store, positions)
    by_id, by_weight = torch.arange(len(weights)), weights.argsort(descending=True, stable=True)
    trees = {"huffman": huffman_tree(weights), "balanced": balanced_tree(weights)}
    if "lm_head" in store.resources:
        trees["embedding"] = balanced_tree(weights, along_widest(store.resources["lm_head"]))
    codec = PosteriorCodec()
    return [
        Coupling(
            f"gumbel, {codec.num_entries} entries",
            gumbel_same_token,
            lambda p, tokens: _posterior_kept(codec, p, tokens, weights),
            lambda tokens: _posterior_bytes(codec, positions, weights),
        ),
        _uniform("uniform, by id", lambda p: by_id),
        _uniform("uniform, by unigram", lambda p: by_weight),
        _uniform("uniform, by own p", lambda p: p.argsort(dim=1, descending=True, stable=True)),
        *(_path(f"path, {name}", tree) for name, tree in trees.items()),
    ]


def _uniform(name: str, order: Callable[[Tensor], Tensor]) -> Coupling:
    """One uniform a token; stored are F(x-1) and p_x in float32."""

    def kept(p: Tensor, tokens: Tensor) -> Tensor:
        low, high = (bound.gather(1, tokens[:, None])[:, 0] for bound in intervals(p, order(p)))
        from_, width = low.float().double(), (high - low).float().double()
        common = torch.minimum(high, from_ + width) - torch.maximum(low, from_)
        return common.clamp(min=0) / width.clamp(min=1e-300)

    return Coupling(
        name,
        lambda p, q: uniform_same_token(p, q, order(p), order(q)),
        kept,
        lambda tokens: torch.full(tokens.shape, 8.0),
    )


def _path(name: str, tree: TokenTree) -> Coupling:
    """A uniform per node; stored is the probability of each branch taken, in one byte."""

    def kept(p: Tensor, tokens: Tensor) -> Tensor:
        result = torch.ones(len(p), dtype=p.dtype)
        for share in tree.branch_probs(p):
            exact = share.gather(1, tokens[:, None])[:, 0]
            coded = (exact * BRANCH_LEVELS).round().clamp(min=1) / BRANCH_LEVELS
            result *= (exact / coded).clamp(max=1)
        return result

    return Coupling(name, tree.same_token, kept, lambda tokens: tree.lengths[tokens])


def _unigram(store: ShardStore, positions: _Positions) -> Float[Tensor, "v"]:
    """The store's unigram; where it keeps none, the mean of the distributions that were read."""
    if "unigram_log_probs" in store.resources:
        return store.resources["unigram_log_probs"].double().exp()
    chunks = positions.chunks(len(positions.tokens))
    return sum(positions.p(chunk).sum(0) for chunk in chunks) / len(positions.tokens)  # type: ignore[return-value]


def _encoded(
    codec: PosteriorCodec,
    p: Float[Tensor, "n v"],
    tokens: Int[Tensor, "n"],
    unigram: Float[Tensor, "v"],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(arrays of n positions, the resources to decode them with)."""
    resources = {"unigram_log_probs": unigram.float().log()}
    output = TeacherOutput(p.float().log()[None], tokens[None], torch.zeros(1, dtype=torch.int64))
    arrays = codec.encode(output, 0, resources)
    return {name: array[0] for name, array in arrays.items()}, resources


def _posterior_kept(
    codec: PosteriorCodec,
    p: Float[Tensor, "n v"],
    tokens: Int[Tensor, "n"],
    unigram: Float[Tensor, "v"],
) -> Float[Tensor, "n"]:
    """1 / (1 + sum_{j != x} max(0, p_j - q_j)), q what the codec keeps of p."""
    arrays, resources = _encoded(codec, p, tokens, unigram)
    own = p.gather(1, tokens[:, None])[:, 0].float().log()
    q = codec.distribution(arrays, tokens, own, resources).tile(0, p.shape[1]).double()
    lost = (p - q).clamp(min=0).scatter(1, tokens[:, None], 0.0)
    return 1 / (1 + lost.sum(1))


def _posterior_bytes(
    codec: PosteriorCodec, positions: _Positions, unigram: Float[Tensor, "v"]
) -> Float[Tensor, "n"]:
    """Compressed bytes of the codec's arrays, and four of p_x, the same for every position."""
    total, count = 0, len(positions.tokens)
    for chunk in positions.chunks(count):
        arrays, _ = _encoded(codec, positions.p(chunk), positions.tokens[chunk], unigram)
        total += sum(
            len(zstandard.compress(array.numpy().tobytes(), ZSTD_LEVEL))
            for array in arrays.values()
        )
    return torch.full((count,), total / count + 4)


def _chances(
    positions: _Positions, pairs: Int[np.ndarray, "n two"], couplings: list[Coupling]
) -> tuple[np.ndarray, np.ndarray]:
    """(total variation [n], chance of the same token [couplings + 2, n])."""
    variations, chances = [], []
    for chunk in positions.chunks(len(pairs)):
        p, q = (positions.p(pairs[chunk, side]) for side in (0, 1))
        variation = total_variation(p, q)
        same = [coupling.same_token(p, q) for coupling in couplings]
        bounds = [1 - variation, (1 - variation) / (1 + variation)]
        variations.append(variation.numpy())
        chances.append(torch.stack([*same, *bounds]).numpy())
    return np.concatenate(variations), np.concatenate(chances, axis=1)


def _kept(positions: _Positions, couplings: list[Coupling]) -> list[float]:
    """Mean chance over all positions that the stored form decodes to the token."""
    totals = [0.0] * len(couplings)
    for chunk in positions.chunks(len(positions.tokens)):
        p, tokens = positions.p(chunk), positions.tokens[chunk]
        for index, coupling in enumerate(couplings):
            totals[index] += float(coupling.kept(p, tokens).sum())
    return [total / len(positions.tokens) for total in totals]
