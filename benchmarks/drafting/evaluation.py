"""Drafting as it is served: draft, one pass of the target, keep what it keeps; and what that costs.

Two rules keep the law of the target's text. *Coupled*: the target's token at a position is
argmax(l + xi) with the drafter's own noise, drafts are kept while they are that token; the text is
the target's sequential decode of the noise, token for token. *Standard* (Leviathan et al., 2023;
Chen et al., 2023): a draft d ~ q is kept with probability min(1, p(d) / q(d)), else a token of
(p - q)+ takes its place; the noise is then the drafter's own matter.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from benchmarks.drafting.drafters import Drafter, Prefix
from benchmarks.drafting.target import Cache, Target, row_noise


@dataclass(frozen=True)
class Drafts:
    """Tokens [b, k] and their logits [b, k, v] over ``ids`` (None: the draft was no draw)."""

    tokens: Int[Tensor, "b k"]
    logits: Float[Tensor, "b k v"] | None
    ids: Int[Tensor, "v"] | None


Propose = Callable[[Prefix, Tensor, Tensor, Tensor], Drafts]
"""Of what the target knows, xi [b, k, vocabulary], uniforms [b, k] and the text [b, l]."""


def proposer(drafter: Drafter, *, loops: int | None = None, greedy: bool = False) -> Propose:
    """Drafts argmax(l + xi), or argmax(l), or with uniforms F^-1(u)."""
    ids = drafter.ids

    def propose(prefix: Prefix, xi: Tensor, uniforms: Tensor, text: Tensor) -> Drafts:
        by_uniform = drafter.form.noise == "uniform"
        noise = uniforms if by_uniform else xi[..., ids]
        reads = drafter.form.kind == "steps" or drafter.form.noise != "none"
        logits = drafter(prefix, noise[:, None] if reads else None, loops=loops)[-1][:, 0].float()
        if greedy:
            return Drafts(ids[logits.argmax(-1)], None, None)
        if by_uniform:
            places = (logits.softmax(-1).cumsum(-1) < uniforms[..., None]).sum(-1)
            return Drafts(ids[places.clamp(max=len(ids) - 1)], logits, ids)
        return Drafts(ids[(logits + noise).argmax(-1)], logits, ids)

    return propose


def ngram_proposer(text: Int[Tensor, "n l"], slots: int, order: int = 4) -> Propose:
    """The most frequent next token behind the last 3, 2 or 1, ``slots`` times over."""
    counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for row in text.tolist():
        for size in range(1, order):
            for i in range(size, len(row)):
                counts[tuple(row[i - size : i])][row[i]] += 1
    best = {key: most.most_common(1)[0][0] for key, most in counts.items()}

    def propose(prefix: Prefix, xi: Tensor, uniforms: Tensor, text: Tensor) -> Drafts:
        drafts = []
        for row, end in zip(text.tolist(), prefix.positions[:, 0].tolist(), strict=True):
            known = row[max(0, end - order + 2) : end + 1]
            for _ in range(slots):
                tails = (tuple(known[-size:]) for size in range(order - 1, 0, -1))
                known.append(next((best[tail] for tail in tails if tail in best), 1))
            drafts.append(known[-slots:])
        return Drafts(torch.tensor(drafts), None, None)

    return propose


@dataclass(frozen=True)
class Decoded:
    """What a decode wrote, the passes of each row, and drafts reached and kept, by slot."""

    text: Int[Tensor, "n l"]
    tokens: Int[Tensor, "n"]
    passes: Int[Tensor, "n"]
    reached: Float[Tensor, "k"]
    kept: Float[Tensor, "k"]


@torch.no_grad()
def decode(
    target: Target,
    propose: Propose,
    prompts: Int[Tensor, "n p"],
    tokens: int,
    slots: int,
    rule: str,
    seed: int,
    *,
    by_uniform: Tensor | None = None,
    first_row: int = 0,
) -> Decoded:
    """``tokens`` new tokens for each prompt, at temperature 1; a row's last block may go beyond.

    Args:
        rule: ``coupled`` or ``standard``.
        by_uniform: The order of ids in which one uniform a token is inverted: the coupled rule
            with the target's F^-1(u) in the place of argmax(l + xi).
    """
    n, p = prompts.shape
    last = p + tokens + 2 * slots + 2
    xi = torch.stack([row_noise(seed, first_row + i, (last, target.vocab_size)) for i in range(n)])
    keys = [np.random.Philox(key=[seed, 2**40 + first_row + i]) for i in range(n)]
    draws = torch.tensor(
        np.stack([np.random.Generator(key).random((last, 3), dtype=np.float32) for key in keys])
    )
    text = torch.zeros(n, last, dtype=torch.long)
    text[:, :p] = prompts
    cache = Cache.empty(len(target.layers), target.shape, n, last)
    states = target.read(prompts[:, :-1], cache)[1][:, -1]
    cache.lengths += p - 1
    passes, written = torch.zeros(n, dtype=torch.long), torch.zeros(n, dtype=torch.long)
    reached, kept = torch.zeros(slots), torch.zeros(slots)
    alive = torch.arange(n)
    slot = torch.arange(slots + 1)
    while len(alive):
        start = cache.lengths
        here = (alive[:, None], start[:, None] + 1 + slot)
        noise, draw, rows = xi[here], draws[here], text[alive]
        token = rows.gather(1, start[:, None])
        prefix = Prefix(states[:, None], token, start[:, None], cache.keys, cache.seen())
        drafts = propose(prefix, noise[:, :slots], draw[:, :slots, 0], rows)
        logits, read = target.read(torch.cat([token, drafts.tokens], 1), cache)
        if rule == "coupled":
            if by_uniform is None:
                own = (logits + noise).argmax(-1)
            else:
                sums = logits[..., by_uniform].softmax(-1).cumsum(-1)
                places = (sums < draw[..., :1]).sum(-1).clamp(max=target.vocab_size - 1)
                own = by_uniform[places]
            same = own[:, :-1] == drafts.tokens
        else:
            own, same = _standard(logits, drafts, draw[..., 1], draw[..., 2])
        count = same.long().cumprod(1).sum(1)
        new = torch.where(slot < count[:, None], torch.cat([drafts.tokens, token], 1), own)
        text[here] = torch.where(slot <= count[:, None], new, 0)
        reached += (slot[:-1] <= count[:, None]).sum(0)
        kept += (slot[:-1] < count[:, None]).sum(0)
        passes[alive] += 1
        written[alive] += count + 1
        on = written[alive] < tokens
        states = read[torch.arange(len(alive)), count][on]
        cache.lengths = (start + count + 1)[on]
        if not on.all():
            cache.keys = [(k[on], v[on]) for k, v in cache.keys]
            alive = alive[on]
    return Decoded(text, written, passes, reached, kept)


def _standard(
    logits: Float[Tensor, "b k1 v"],
    drafts: Drafts,
    accept: Float[Tensor, "b k1"],
    again: Float[Tensor, "b k1"],
) -> tuple[Int[Tensor, "b k1"], Tensor]:
    """The token that replaces each draft if it is refused, and which drafts are kept."""
    p = logits.softmax(-1)
    q = torch.zeros_like(p)
    if drafts.logits is None:
        q[:, :-1].scatter_(-1, drafts.tokens[..., None], 1.0)
    else:
        q[:, :-1, drafts.ids] = drafts.logits.softmax(-1)
    chosen = drafts.tokens[..., None]
    same = (
        accept[:, :-1] * q[:, :-1].gather(-1, chosen)[..., 0] < p[:, :-1].gather(-1, chosen)[..., 0]
    )
    # Behind the last slot q is 0, and what is left of p is p.
    rest = (p - q).clamp_(min=0).cumsum(-1)
    places = (rest < again[..., None] * rest[..., -1:]).sum(-1)
    return places.clamp_(max=p.shape[-1] - 1), same


def pooled(parts: list[Decoded]) -> Decoded:
    """Batches of rows as one."""
    columns = [
        torch.cat([getattr(part, name) for part in parts]) for name in ("text", "tokens", "passes")
    ]
    return Decoded(
        *columns, *(sum(getattr(part, name) for part in parts) for name in ("reached", "kept"))
    )


def tokens_per_pass(parts: list[Decoded], draws: int = 2000) -> list[float]:
    """Tokens per target pass and its 95% interval, by bootstrap over prompts and over seeds."""
    tokens = np.stack([part.tokens.numpy() for part in parts]).astype(float)
    passes = np.stack([part.passes.numpy() for part in parts]).astype(float)
    generator, values = np.random.default_rng(0), []
    for _ in range(draws):
        seeds = generator.integers(len(parts), size=len(parts))
        rows = generator.integers(tokens.shape[1], size=tokens.shape[1])
        at = np.ix_(seeds, rows)
        values.append(tokens[at].sum() / passes[at].sum())
    return [float(tokens.sum() / passes.sum()), *np.quantile(values, [0.025, 0.975]).tolist()]


def ratio(over: list[Decoded], under: list[Decoded], draws: int = 2000) -> list[float]:
    """Tokens per pass of one drafter over another's, with its interval; prompts are paired."""
    generator, values = np.random.default_rng(0), []

    def value(seeds: list[np.ndarray], rows: np.ndarray) -> float:
        rates = [
            sum(parts[s].tokens.numpy()[rows].sum() for s in chosen)
            / sum(parts[s].passes.numpy()[rows].sum() for s in chosen)
            for parts, chosen in zip((over, under), seeds, strict=True)
        ]
        return float(rates[0] / rates[1])

    size = len(over[0].tokens)
    for _ in range(draws):
        seeds = [generator.integers(len(parts), size=len(parts)) for parts in (over, under)]
        values.append(value(seeds, generator.integers(size, size=size)))
    whole = value([np.arange(len(over)), np.arange(len(under))], np.arange(size))
    return [whole, *np.quantile(values, [0.025, 0.975]).tolist()]


@torch.no_grad()
def seconds(
    target: Target,
    work: dict[str, tuple[Propose | None, int]],
    prompt: Int[Tensor, "p"],
    batch: int,
    repeats: int,
) -> dict[str, float]:
    """Least seconds of a draft, or of a target's pass (no proposer) over so many rows, in turns."""
    tokens = prompt.expand(batch, -1)
    cache = Cache.empty(len(target.layers), target.shape, batch, 128)
    states = target.read(tokens[:, :-1], cache)[1][:, -1:]
    cache.lengths += len(prompt) - 1
    least = dict.fromkeys(work, float("inf"))
    for _ in range(repeats):
        for name, (propose, rows) in work.items():
            xi, uniforms = torch.zeros(batch, rows, target.vocab_size), torch.rand(batch, rows)
            token = tokens[:, -1:]
            at = cache.lengths[:, None]
            begin = time.perf_counter()
            if propose is None:
                target.read(token.expand(-1, rows), cache)
            else:
                propose(Prefix(states, token, at, cache.keys, cache.seen()), xi, uniforms, tokens)
            least[name] = min(least[name], time.perf_counter() - begin)
    return least
