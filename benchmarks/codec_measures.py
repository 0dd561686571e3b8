"""Bytes, fidelity and speed of one codec setting on one teacher."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from shards.codec.frozen import frozen_posterior
from shards.codec.protocol import Arrays, Codec, TeacherOutput
from shards.noise.gumbel import arrivals_from_gumbel
from shards.noise.kinds import KeyedPosterior, Noise, SparseNoise

SEED = 20_260
TILE = 8192
EMBEDDING_WIDTH = 64


@dataclass(frozen=True)
class Exact:
    """What decoded noise is compared with: the exact posterior draw of the same keys."""

    output: TeacherOutput
    noise: KeyedPosterior
    gumbels: Float[Tensor, "n v"]
    embedding: Float[Tensor, "n d"]
    weight: Float[Tensor, "v d"]

    @classmethod
    def of(cls, output: TeacherOutput, weight: Float[Tensor, "v d"]) -> Exact:
        """The draw and its embedding softmax(xi) W."""
        noise = frozen_posterior(output, SEED)
        arrivals = noise.tile(0, noise.vocab_size)
        return cls(output, noise, -arrivals.log(), embed(arrivals, 0.0, weight), weight)

    @property
    def log_probs(self) -> Float[Tensor, "n v"]:
        """The teacher's, exact."""
        return self.output.log_probs.flatten(0, 1)


def embed(
    arrivals: Float[Tensor, "n v"], rest: Tensor | float, weight: Float[Tensor, "v d"]
) -> Float[Tensor, "n d"]:
    """softmax(xi) W, with the rate of entries that were cut off in the denominator."""
    rates = arrivals.reciprocal()
    return (rates @ weight) / (rates.sum(1) + rest)[:, None]


def embedding_weight(vocab_size: int) -> Float[Tensor, "v d"]:
    """A fixed Gaussian projection."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(vocab_size, EMBEDDING_WIDTH, generator=generator)


@dataclass
class Measurement:
    """Running totals of one setting; :meth:`result` when all batches have been added."""

    label: str
    codec: Codec
    peer: bool = False
    arrays: list[dict[str, Tensor]] = field(default_factory=list)
    sums: dict[str, float] = field(default_factory=dict)
    max_error: float = 0.0

    def add(self, exact: Exact, resources: Arrays) -> None:
        """Encode, decode and compare one batch."""
        start = time.perf_counter()
        arrays = self.codec.encode(exact.output, SEED, resources)
        encoded = time.perf_counter()
        flat = {name: array.flatten(0, 1) for name, array in arrays.items()}
        draw = exact.noise
        noise = self.codec.decode(flat, draw.tokens, draw.token_log_probs, draw.keys, resources)
        arrivals = torch.cat(list(_tiles(noise)), dim=1)
        decoded = time.perf_counter()
        self.arrays.append(arrays)
        num = exact.output.tokens.numel()
        if len(self.arrays) == 2:  # the first batch warms up, and counts only if it is the only one
            self.sums |= {"encode_seconds": 0.0, "decode_seconds": 0.0, "timed": 0.0}
        self._count(encode_seconds=encoded - start, decode_seconds=decoded - encoded, timed=num)
        self._compare(arrivals, noise, exact)
        if "token_gumbels" in flat:  # also where the token is cut off from what students see
            own = arrivals_from_gumbel(flat["token_gumbels"])
            arrivals.scatter_(1, draw.tokens[:, None], own[:, None])
        self._count(tokens=num, agreed=float(_agrees(arrivals, exact).sum()))
        if isinstance(noise, KeyedPosterior):
            self._count(expected=float(expected_agreement(noise, exact).sum()))

    def _compare(self, arrivals: Float[Tensor, "n v"], noise: Noise, exact: Exact) -> None:
        rest = noise.rest_rate if isinstance(noise, SparseNoise) else 0.0
        embedding = embed(arrivals, rest, exact.weight)
        distance = (embedding - exact.embedding).norm(dim=1) / exact.embedding.norm(dim=1)
        errors = (-arrivals.log() - exact.gumbels).abs()
        finite = torch.isfinite(errors)
        self.max_error = max(self.max_error, float(errors[finite].max()))
        self._count(
            relative_l2=float(distance.sum()),
            error=float(errors[finite].sum()),
            entries=float(finite.sum()),
            shown=float(_agrees(arrivals, exact).sum()),
        )

    def _count(self, **amounts: float) -> None:
        for name, amount in amounts.items():
            self.sums[name] = self.sums.get(name, 0.0) + amount

    def result(self, sizes: dict[str, float]) -> dict[str, object]:
        """JSON-ready figures; ``sizes`` is bytes per token by array."""
        tokens, timed = self.sums["tokens"], max(1.0, self.sums.get("timed", 0.0))
        sampled = self.sums["agreed"] / tokens
        exact_rate = self.sums.get("expected")
        return {
            "label": self.label,
            "codec": self.codec.name,
            "peer": self.peer,
            "fresh_draws": self.codec.is_fresh,
            "bytes_per_token": sum(sizes.values()),
            "bytes_per_token_by_array": sizes,
            "coupling_agreement": sampled if exact_rate is None else exact_rate / tokens,
            "coupling_agreement_sampled": sampled,
            "coupling_agreement_shown": self.sums["shown"] / tokens,
            "max_abs_error_nats": self.max_error,
            "mean_abs_error_nats": self.sums["error"] / self.sums["entries"],
            "relative_l2_error": self.sums["relative_l2"] / tokens,
            "encode_tokens_per_second": timed / self.sums.get("encode_seconds", float("nan")),
            "decode_tokens_per_second": timed / self.sums.get("decode_seconds", float("nan")),
            "num_tokens": int(tokens),
        }


def _tiles(noise: Noise) -> Iterator[Tensor]:
    for start in range(0, noise.vocab_size, TILE):
        yield noise.tile(start, min(start + TILE, noise.vocab_size))


def _agrees(arrivals: Float[Tensor, "n v"], exact: Exact) -> Tensor:
    """Where argmax(logits + decoded noise) is the token."""
    score = exact.log_probs - arrivals.log()
    best = score.argmax(1)
    tied = torch.isneginf(score.gather(1, best[:, None]).squeeze(1))
    close = score.topk(2, dim=1).values.diff(dim=1).squeeze(1).abs() < 1e-4
    if bool(close.any()):  # float32 cannot tell these apart
        rows = close.nonzero().squeeze(1)
        precise = exact.log_probs[rows].double() - arrivals[rows].double().log()
        best[rows] = precise.argmax(1)
    return (best == exact.noise.tokens) & ~tied


def expected_agreement(noise: KeyedPosterior, exact: Exact) -> Tensor:
    """The probability over the draw that the token wins, in closed form.

    Entry j beats the token when E_j < E_0 (p_j q_x / p_x - q_j), q being the decoded distribution,
    so it is 1 / (1 + sum_j max(0, p_j q_x / p_x - q_j)): for exact q_x and a normalised q, one over
    one plus the total variation.
    """
    ratio = (noise.token_log_probs - exact.noise.token_log_probs).exp()[:, None]
    excess = torch.zeros(noise.num_positions, dtype=torch.float64)
    own = noise.tokens[:, None]
    for start in range(0, noise.vocab_size, TILE):
        stop = min(start + TILE, noise.vocab_size)
        more = exact.log_probs[:, start:stop].exp() * ratio - noise.probabilities.tile(start, stop)
        inside = ((own >= start) & (own < stop)).float()
        columns = (own - start).clamp(0, stop - start - 1)
        more.scatter_(1, columns, more.gather(1, columns) * (1 - inside))
        excess += more.clamp(min=0).sum(1, dtype=torch.float64)
    return 1 / (1 + excess)
