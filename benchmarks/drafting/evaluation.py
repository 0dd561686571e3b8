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
from benchmarks.drafting.target import Cache, Target, own_text, row_noise


@dataclass(frozen=True)
class Drafts:
    """Tokens [b, k] and their logits [b, k, v] over ``ids`` (None: the draft was no draw).

    Of a tree, ``parents`` says which token each one follows: 0 the text's last, i the draft i - 1.
    """

    tokens: Int[Tensor, "b k"]
    logits: Float[Tensor, "b k v"] | None = None
    ids: Int[Tensor, "v"] | None = None
    parents: Int[Tensor, "b k"] | None = None


Propose = Callable[[Prefix, Tensor, Tensor], Drafts]
"""Of what the target knows, xi [b, k, vocabulary] and the text [b, l]."""


def proposer(drafter: Drafter, *, loops: int = 1, greedy: bool = False) -> Propose:
    """Drafts argmax(l + xi), or argmax(l)."""
    ids = drafter.ids
    reads = drafter.form.kind == "steps" or drafter.form.noise

    def propose(prefix: Prefix, xi: Tensor, text: Tensor) -> Drafts:
        noise = xi[..., ids]
        logits = drafter(prefix, noise[:, None] if reads else None, loops=loops)[-1][:, 0].float()
        if greedy:
            return Drafts(ids[logits.argmax(-1)])
        return Drafts(ids[(logits + noise).argmax(-1)], logits, ids)

    return propose


def tree_proposer(
    drafter: Drafter, nodes: int, width: int, *, loops: int = 1, blind: bool = False
) -> Propose:
    """A tree of the ``nodes`` drafts that the noise makes most probable, for the coupled rule.

    With the noise known, softmax(l + xi) says how probable it is that each token wins the race of
    its slot: next to 1 where the race is decided, near 1/2 for each of two where it is close. The
    tree is grown slot by slot, the ``width`` most probable paths at each (EAGLE-2's search).
    Of a drafter that does not step, a slot's logits are the same behind every path.
    ``blind``: the tree is chosen without a look at the noise, by softmax(l).
    """
    steps = drafter.form.kind == "steps"
    reads = drafter.form.noise

    def propose(prefix: Prefix, xi: Tensor, text: Tensor) -> Drafts:
        noise, b = xi[..., drafter.ids], len(xi)
        tokens, parents, scores = [], [], []
        # The rows of a level, who is behind whom among all rows so far, and their scores.
        grown, behind = None, torch.ones(b, 1, 1, dtype=torch.bool)
        at_once = None if steps else drafter(prefix, noise[:, None] if reads else None, loops=loops)
        last, score, own = prefix.tokens, torch.zeros(b, 1), torch.zeros(b, 1, dtype=torch.long)
        for slot in range(drafter.slots):
            if at_once is None:
                logits, grown = drafter.grow(prefix, last, slot, behind[:, None], grown)
            else:
                logits = at_once[-1][:, :, slot].expand(-1, last.shape[1], -1)
            race = (logits.float() + noise[:, slot, None] * (not blind)).log_softmax(-1)
            best, ids = race.topk(width)
            best, at = (score[..., None] + best).flatten(1).topk(width)
            from_row = at // width
            last = drafter.ids[ids.flatten(1).gather(1, at)]
            parents.append(own.gather(1, from_row))
            tokens.append(last), scores.append(best)
            grown = None if grown is None else grown.of(from_row)
            seen = behind.gather(1, from_row[..., None].expand(-1, -1, behind.shape[-1]))
            behind = torch.cat([seen, torch.eye(width, dtype=torch.bool).expand(b, -1, -1)], -1)
            own = 1 + slot * width + torch.arange(width).expand(b, -1)
            score = best
        # A parent is at least as probable as its children and stands before them: stable sorting
        # keeps it. What is kept is numbered anew, in order of depth.
        every, parent = torch.cat(scores, 1), torch.cat(parents, 1)
        kept = every.argsort(dim=1, descending=True, stable=True)[:, :nodes].sort(1).values
        number = torch.zeros(b, every.shape[1] + 1, dtype=torch.long)
        number.scatter_(1, kept + 1, torch.arange(1, kept.shape[1] + 1).expand(b, -1))
        parent = number.gather(1, parent.gather(1, kept))
        return Drafts(torch.cat(tokens, 1).gather(1, kept), parents=parent)

    return propose


def ngram_proposer(text: Int[Tensor, "n l"], slots: int, order: int = 4) -> Propose:
    """The most frequent next token behind the last 3, 2 or 1, ``slots`` times over."""
    counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for row in text.tolist():
        for size in range(1, order):
            for i in range(size, len(row)):
                counts[tuple(row[i - size : i])][row[i]] += 1
    best = {key: most.most_common(1)[0][0] for key, most in counts.items()}

    def propose(prefix: Prefix, xi: Tensor, text: Tensor) -> Drafts:
        drafts = []
        for row, end in zip(text.tolist(), prefix.positions[:, 0].tolist(), strict=True):
            known = row[max(0, end - order + 2) : end + 1]
            for _ in range(slots):
                tails = (tuple(known[-size:]) for size in range(order - 1, 0, -1))
                known.append(next((best[tail] for tail in tails if tail in best), 1))
            drafts.append(known[-slots:])
        return Drafts(torch.tensor(drafts))

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
    first_row: int = 0,
    room: int = 2,
) -> Decoded:
    """``tokens`` new tokens for each prompt, at temperature 1; a row's last block may go beyond.

    Args:
        rule: ``coupled`` or ``standard``.
        room: Places of the cache behind a text; a tree's tokens need one each.
    """
    n, p = prompts.shape
    last = p + tokens + 2 * slots + room
    xi = torch.stack([row_noise(seed, first_row + i, (last, target.vocab_size)) for i in range(n)])
    keys = [np.random.Philox(key=[seed, 2**40 + first_row + i]) for i in range(n)]
    draws = torch.tensor(
        np.stack([np.random.Generator(key).random((last, 3), dtype=np.float32) for key in keys])
    )
    # Of three uniforms a position, the first is left for drafters that read one (PTP).
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
        drafts = propose(prefix, noise[:, :slots], rows)
        tree = None if drafts.parents is None else _ancestors(drafts.parents)
        logits, read = target.read(torch.cat([token, drafts.tokens], 1), cache, tree)
        if tree is not None:
            here_too = torch.arange(len(alive))[:, None]
            path, count = _walk((logits + noise[here_too, tree[0]]).argmax(-1), drafts, slots)
            own = (logits[here_too, path] + noise).argmax(-1)
            read = read[here_too, path]
            cache.follow(path[:, 1:])
            drafts = Drafts(torch.cat([token, drafts.tokens], 1).gather(1, path[:, 1:]))
            same = slot[:-1] < count[:, None]
        elif rule == "coupled":
            own = (logits + noise).argmax(-1)
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


def _ancestors(parents: Int[Tensor, "b n"]) -> tuple[Int[Tensor, "b n1"], Tensor]:
    """Depth of every token of a tree, its root included, and which tokens it is behind."""
    b, n = parents.shape
    depth = torch.zeros(b, n + 1, dtype=torch.long)
    behind = torch.eye(n + 1, dtype=torch.bool).repeat(b, 1, 1)
    texts = torch.arange(b)
    for node in range(n):
        parent = parents[:, node]
        depth[:, node + 1] = depth[texts, parent] + 1
        behind[:, node + 1] |= behind[texts, parent]
    return depth, behind


def _walk(
    own: Int[Tensor, "b n1"], drafts: Drafts, slots: int
) -> tuple[Int[Tensor, "b k1"], Int[Tensor, "b"]]:
    """The path of the target's own tokens from the root of a tree, and how many it meets."""
    assert drafts.parents is not None
    now = torch.zeros(len(own), 1, dtype=torch.long)
    path, going = [now], torch.ones(len(own), dtype=torch.bool)
    count = torch.zeros(len(own), dtype=torch.long)
    for _ in range(slots):
        child = (drafts.parents == now) & (drafts.tokens == own.gather(1, now))
        going = going & child.any(1)
        now = torch.where(going[:, None], child.long().argmax(1, keepdim=True) + 1, now)
        count += going
        path.append(now)
    return torch.cat(path, 1), count


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


def tokens_per_pass(
    parts: list[Decoded], under: list[Decoded] | None = None, draws: int = 2000
) -> list[float]:
    """Tokens per target pass (over those of ``under``) and the 95% interval.

    A bootstrap over prompts, the same for both, and over the seeds of each.
    """
    generator, values = np.random.default_rng(0), []
    sides = [parts] if under is None else [parts, under]
    counts = [[np.stack([p.tokens.numpy(), p.passes.numpy()]) for p in side] for side in sides]
    size = counts[0][0].shape[1]
    for draw in range(draws + 1):
        rows = generator.integers(size, size=size) if draw else np.arange(size)
        rates = []
        for side in counts:
            seeds = generator.integers(len(side), size=len(side)) if draw else range(len(side))
            tokens, passes = sum(side[seed][:, rows].sum(1) for seed in seeds)
            rates.append(tokens / passes)
        values.append(rates[0] / (1 if under is None else rates[1]))
    return [float(values[0]), *np.quantile(values[1:], [0.025, 0.975]).tolist()]


@torch.no_grad()
def agreement(
    target: Target, drafter: Drafter, prompts: Int[Tensor, "n p"], seed: int
) -> dict[str, float]:
    """How often a drafter that is given the true earlier tokens meets the target's token.

    Mean over slots and texts of the target: 1 - TV, what rejection keeps; (1 - TV) / (1 + TV), the
    least that argmax(l + xi) keeps; what it keeps; and how often the token is among the first
    2 and 4 of the race, and of softmax(l) without a look at the noise.
    """
    p, k = prompts.shape[1], drafter.slots
    text = own_text(target, prompts, p + 32 + k, seed, 0)
    noise = [row_noise(seed, i, (text.shape[1], target.vocab_size)) for i in range(len(text))]
    cache = Cache.empty(len(target.layers), target.shape, *text.shape)
    logits, states = target.read(text, cache)
    starts = torch.arange(p - 1, p + 31, 4)
    after = starts[:, None] + torch.arange(1, k + 1)
    seen = (torch.arange(text.shape[1]) < starts[:, None]).expand(len(text), -1, -1)
    at = starts.expand(len(text), -1)
    prefix = Prefix(states[:, starts - 1], text[:, starts], at, cache.keys, seen)
    own = drafter(prefix, None, text[:, after])[-1].float()
    shared = torch.minimum(logits.softmax(-1)[:, after - 1][..., drafter.ids], own.softmax(-1)).sum(
        -1
    )
    race = own + torch.stack([rows[after][..., drafter.ids] for rows in noise])
    found = {"1 - TV": shared, "(1 - TV) / (1 + TV)": shared / (2 - shared)}
    for name, values in (("race", race), ("probability", own)):
        hits = drafter.ids[values.topk(4).indices] == text[:, after][..., None]
        found |= {f"{name}, first {n}": hits[..., :n].any(-1).float() for n in (1, 2, 4)}
    return {name: round(float(value.mean()), 4) for name, value in found.items()}


@torch.no_grad()
def seconds(
    target: Target,
    work: dict[str, tuple[Propose | None, int]],
    prompt: Int[Tensor, "p"],
    batch: int,
    repeats: int,
) -> dict[str, float]:
    """Least seconds of a draft, or of a target's pass (no proposer) over so many rows, in turns.

    Of processor time of the one thread that runs, so that other work on the machine, which takes
    the processor away for longer than any of these last, counts little.
    """
    tokens = prompt.expand(batch, -1)
    cache = Cache.empty(len(target.layers), target.shape, batch, 128)
    states = target.read(tokens[:, :-1], cache)[1][:, -1:]
    cache.lengths += len(prompt) - 1
    least = dict.fromkeys(work, float("inf"))
    for _ in range(repeats):
        for name, (propose, rows) in work.items():
            xi = torch.zeros(batch, rows, target.vocab_size)
            token = tokens[:, -1:]
            at = cache.lengths[:, None]
            begin = time.thread_time()
            if propose is None:
                target.read(token.expand(-1, rows), cache)
            else:
                propose(Prefix(states, token, at, cache.keys, cache.seen()), xi, tokens)
            least[name] = min(least[name], time.thread_time() - begin)
    return least
