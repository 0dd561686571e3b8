"""Drafting as it is served: draft, one pass of the target, keep what it keeps; and what that costs.

Three rules keep the law of the target's text. *Coupled*: the target's token at a position is argmax(l + xi) with the
drafter's own noise, drafts are kept while they are that token; the text is the target's sequential decode of the noise.
*Quantile*: the same with one uniform a token; the target's own is that at quantile u of softmax(l). *Standard*
(Leviathan et al., 2023; Chen et al., 2023): a draft d ~ q is kept with probability min(1, p(d) / q(d)), else a token of
(p - q)+ takes its place; the noise is then the drafter's own matter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from benchmarks.drafting.drafters import Drafter, Grown, Prefix
from benchmarks.drafting.target import Cache, Target, at_quantile, own_text, row_noise, uniform
from trainer.sampling.ngrams import ORDER, NGrams
from trainer.sampling.trees import Tree


@dataclass(frozen=True)
class Drafts:
    """Tokens [b, k] and their logits [b, k, v] over ``ids`` (None: the draft was no draw).

    Of a tree, ``behind`` says which tokens each one follows, itself included; number 0 is the
    text's last token, i the draft i - 1. ``logits`` are then those behind the tokens, of as many
    as have drafts of their own. ``steps`` [b] says how many the drafter took, where it may stop.
    """

    tokens: Int[Tensor, "b k"]
    logits: Float[Tensor, "b k v"] | None = None
    ids: Int[Tensor, "v"] | None = None
    behind: Bool[Tensor, "b k1 k1"] | None = None
    steps: Int[Tensor, "b"] | None = None


Propose = Callable[[Prefix, Tensor, Tensor], Drafts]
"""Of what the target knows, xi [b, k, vocabulary] and the text [b, l]."""


def proposer(drafter: Drafter) -> Propose:
    """Drafts argmax(l + xi), or the token at quantile u of softmax(l)."""
    ids = drafter.ids

    def propose(prefix: Prefix, xi: Tensor, text: Tensor) -> Drafts:
        noise, prefix = drafter.hears(xi), drafter.knows(prefix, text)
        logits = drafter(prefix, noise[:, None])[:, 0].float()
        if drafter.form.noise != "uniform":
            return Drafts(ids[(logits + noise).argmax(-1)], logits, ids)
        law = torch.zeros_like(xi)
        law[..., ids] = logits.softmax(-1)
        return Drafts(at_quantile(law, noise[..., 0]), logits, ids)

    return propose


def tree_proposer(drafter: Drafter, nodes: int, width: int, *, blind: bool = False, reach: float = 0.0) -> Propose:
    """A tree of the ``nodes`` drafts that the noise makes most probable, for the coupled rule.

    With the noise known, softmax(l + xi) is how probable it is that each token wins the race of its slot. The tree is
    grown slot by slot, the ``width`` most probable paths at each (EAGLE-2's search); of a drafter that does not step, a
    slot's logits are the same behind every path. Not for one that reads uniforms. ``blind``: chosen without a look at
    the noise, by softmax(l). ``reach``: a text takes another step only where a path of it is right with this chance.
    """

    def propose(prefix: Prefix, xi: Tensor, text: Tensor) -> Drafts:
        noise, b, prefix = xi[..., drafter.ids], len(xi), drafter.knows(prefix, text)
        tokens, scores = [], []
        # Who is behind whom among all tokens so far, and the scores of the last ones' paths.
        grown, behind, last = None, torch.ones(b, 1, 1, dtype=torch.bool), prefix.tokens
        pasts, score, taken = [behind], torch.zeros(b, 1), torch.zeros(b, dtype=torch.long)
        at_once = None if drafter.steps else drafter(prefix, noise[:, None])
        for slot in range(drafter.slots):
            if at_once is None:
                found, grown = drafter.grow(prefix, last[:, None], slot, behind[:, None], grown)
                logits = found[:, 0]
            else:
                logits = at_once[:, :, slot].expand(-1, last.shape[1], -1)
            race = (logits.float() + noise[:, slot, None] * (not blind)).log_softmax(-1)
            best, ids = race.topk(width)
            score, at = (score[..., None] + best).flatten(1).topk(width)
            taken += score[:, 0] > -torch.inf
            parent = at // width
            last = drafter.ids[ids.flatten(1).gather(1, at)]
            grown = None if grown is None else grown.of(parent)
            past = behind.gather(1, parent[..., None].expand(-1, -1, behind.shape[-1]))
            behind = torch.cat([past, torch.eye(width, dtype=torch.bool).expand(b, -1, -1)], -1)
            tokens.append(last), scores.append(score), pasts.append(behind)
            score = score.masked_fill(score.exp().sum(1, keepdim=True) < reach, -torch.inf)
        # A parent is at least as probable as its children and stands before them: stable sorting
        # keeps it.
        found = torch.cat(scores, 1)
        kept = found.argsort(dim=1, descending=True, stable=True)[:, :nodes].sort(1).values
        total, index = behind.shape[-1], pad(kept + 1, (1, 0))
        whole = torch.cat([pad(past, (0, total - past.shape[-1])) for past in pasts], 1)
        whole = whole.gather(1, index[..., None].expand(-1, -1, total))
        whole = whole.gather(2, index[:, None].expand(-1, index.shape[1], -1))
        # A step of other texts alone leaves no draft: it is behind nothing.
        never = pad(found.gather(1, kept).isinf(), (1, 0))[..., None]
        whole = torch.where(never, torch.eye(index.shape[1], dtype=torch.bool), whole)
        return Drafts(torch.cat(tokens, 1).gather(1, kept), behind=whole, steps=taken)

    return propose


def sampled_tree_proposer(drafter: Drafter | Counts, nodes: int, ranks: Sequence[Sequence[float]]) -> Propose:
    """A tree of draws without replacement, for the recursive rejection rule.

    Its shape is fixed: the ``nodes`` places that are most probable to be reached when the r-th draw of a slot is kept
    with probability ``ranks[slot][r]`` (Sequoia, Chen et al., 2024). The first draws of softmax(l) without replacement
    are the largest l + xi. A drafter that does not step must not read the noise: its draws are alike behind all paths.
    """
    width = max(map(len, ranks))
    assert width < 8, "a slot has seven uniforms to try draws with"
    assert isinstance(drafter, Counts) or drafter.steps or drafter.form.noise == "none"
    places: dict[tuple[int, ...], float] = {(): 1.0}  # a place is the ranks on the way to it
    for _ in range(nodes):
        inner = [(place, p) for place, p in places.items() if len(place) < drafter.slots]
        free = {
            (*place, r): p * rank for place, p in inner for r, rank in enumerate(ranks[min(len(place), len(ranks) - 1)])
        }
        best = max(free.keys() - places, key=free.__getitem__)
        places[best] = free[best]
    depths = range(max(map(len, places)) + 1)
    levels = [sorted(place for place in places if len(place) == depth) for depth in depths]

    def propose(prefix: Prefix, xi: Tensor, text: Tensor) -> Drafts:
        noise, b, prefix = xi[..., drafter.ids], len(xi), drafter.knows(prefix, text)
        grown, behind, last = None, torch.ones(b, 1, 1, dtype=torch.bool), prefix.tokens
        tokens, pasts, logits = [], [behind], []
        at_once = None if isinstance(drafter, Counts) or drafter.steps else drafter(prefix, None)
        for slot, (before, level) in enumerate(pairwise(levels)):
            if at_once is None:
                found, grown = drafter.grow(prefix, last[:, None], slot, behind[:, None], grown)
            else:
                found = at_once[:, :, slot, None].expand(-1, -1, len(before), -1)
            logits.append(found[:, 0].float())
            drawn = drafter.ids[(logits[-1] + noise[:, slot, None]).topk(width).indices]
            parent = torch.tensor([before.index(place[:-1]) for place in level])
            last = drawn[:, parent, torch.tensor([place[-1] for place in level])]
            grown = None if grown is None else grown.of(parent.expand(b, -1))
            itself = torch.eye(len(level), dtype=torch.bool).expand(b, -1, -1)
            behind = torch.cat([behind[:, parent], itself], -1)
            tokens.append(last), pasts.append(behind)
        total = behind.shape[-1]
        whole = torch.cat([pad(past, (0, total - past.shape[-1])) for past in pasts], 1)
        return Drafts(torch.cat(tokens, 1), torch.cat(logits, 1), drafter.ids, whole)

    return propose


class Counts:
    """N-grams as a drafter that steps: what is known of a text are its last tokens."""

    def __init__(self, model: NGrams, slots: int) -> None:
        self.model, self.slots, self.ids = model, slots, torch.arange(len(model.unigram))

    def knows(self, prefix: Prefix, text: Int[Tensor, "b l"]) -> Prefix:
        """The tokens before the last one as its ``states``."""
        places = (prefix.positions + torch.arange(1 - ORDER, 0)).clamp_min(0)
        return replace(prefix, states=text.gather(1, places)[:, None])

    def grow(
        self, prefix: Prefix, tokens: Int[Tensor, "b 1 s"], slot: int, own: Tensor, grown: Grown | None
    ) -> tuple[Float[Tensor, "b 1 s v"], Grown]:
        """See :meth:`Drafter.grow`; the rows are the last tokens of each path."""
        before = prefix.states[:, :, None] if grown is None else grown.rows
        lines = torch.cat([before, tokens[..., None]], -1)[..., 1:]
        laws = np.stack([self.model.probabilities(line) for line in lines.flatten(0, -2).tolist()])
        return torch.from_numpy(laws).log().view(*tokens.shape, -1), Grown(lines, [])


def ngram_tree_proposer(model: NGrams, slots: int, nodes: int, *, blind: bool = False) -> Propose:
    """A tree of the ``nodes`` drafts that are most probable by counts, and by the noise."""

    def propose(prefix: Prefix, xi: Tensor, text: Tensor) -> Drafts:
        weights = torch.ones(len(xi), slots, 1) if blind else xi[:, :slots].exp()
        tokens, behind = torch.zeros(len(xi), nodes, dtype=torch.long), torch.eye(nodes + 1, dtype=torch.bool)
        behind = behind.repeat(len(xi), 1, 1)
        for row, end in enumerate(prefix.positions[:, 0].tolist()):
            known = text[row, max(0, end + 1 - ORDER) : end + 1].tolist()
            tree = model.grow(Tree(known[-1]), known, weights[row].numpy(), 1.0, nodes, 8, -inf)
            tokens[row, : len(tree.tokens) - 1] = torch.tensor(tree.tokens[1:])
            for number, line in enumerate(tree.lines):
                behind[row, number, line] = True
        return Drafts(tokens, behind=behind)

    return propose


@dataclass(frozen=True)
class Decoded:
    """What a decode wrote, passes and drafter's steps of each row, and drafts reached and kept, by slot."""

    text: Int[Tensor, "n l"]
    tokens: Int[Tensor, "n"]
    passes: Int[Tensor, "n"]
    steps: Int[Tensor, "n"]
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
        rule: ``coupled``, ``quantile`` or ``standard``.
        room: Places of the cache behind a text; a tree's tokens need one each.
    """
    n, p = prompts.shape
    last = p + tokens + 2 * slots + room
    xi = torch.stack([row_noise(seed, first_row + i, (last, target.vocab_size)) for i in range(n)])
    keys = [np.random.Philox(key=[seed, 2**40 + first_row + i]) for i in range(n)]
    draws = torch.tensor(np.stack([np.random.Generator(key).random((last, 8), dtype=np.float32) for key in keys]))
    text = torch.zeros(n, last, dtype=torch.long)
    text[:, :p] = prompts
    cache = Cache.empty(len(target.layers), target.shape, n, last)
    states = target.read(prompts[:, :-1], cache)[1][:, -1]
    cache.lengths += p - 1
    passes, written, steps = torch.zeros(3, n, dtype=torch.long)
    reached, kept = torch.zeros(slots), torch.zeros(slots)
    alive, slot = torch.arange(n), torch.arange(slots + 1)
    while len(alive):
        start, everyone = cache.lengths, torch.arange(len(alive))[:, None]
        here = (alive[:, None], start[:, None] + 1 + slot)
        noise, draw, rows = xi[here], draws[here], text[alive]
        token = rows.gather(1, start[:, None])
        prefix = Prefix(states[:, None], token, start[:, None], cache.keys, cache.seen())
        drafts = propose(prefix, noise[:, :slots], rows)
        steps[alive] += slots if drafts.steps is None else drafts.steps
        known = torch.cat([token, drafts.tokens], 1)
        logits, read = target.read(known, cache, drafts.behind)
        if drafts.behind is not None:
            if rule == "coupled":
                path, count = _walk(logits, noise, known, drafts.behind)
                own = (logits[everyone, path] + noise).argmax(-1)
            else:
                path, count, own = _walk_rejecting(logits, drafts, known, draw)
            read = read[everyone, path]
            cache.follow(path[:, 1:])
            drafts = Drafts(known.gather(1, path[:, 1:]))
            same = slot[:-1] < count[:, None]
        elif rule == "standard":
            own, same = _standard(logits, drafts, draw[..., 1], draw[..., 0])
        else:
            u, race = uniform(noise), rule == "coupled"
            own = (logits + noise).argmax(-1) if race else at_quantile(logits.softmax(-1), u)
            same = own[:, :-1] == drafts.tokens
        count = same.long().cumprod(1).sum(1)
        new = torch.where(slot < count[:, None], torch.cat([drafts.tokens, token], 1), own)
        text[here] = torch.where(slot <= count[:, None], new, 0)
        reached += (slot[:-1] <= count[:, None]).sum(0)
        kept += (slot[:-1] < count[:, None]).sum(0)
        passes[alive] += 1
        written[alive] += count + 1
        on = written[alive] < tokens
        states = read[everyone[:, 0], count][on]
        cache.lengths = (start + count + 1)[on]
        if not on.all():
            cache.keys = [(k[on], v[on]) for k, v in cache.keys]
            alive = alive[on]
    return Decoded(text, written, passes, steps, reached, kept)


def _walk(
    logits: Float[Tensor, "b n1 v"],
    noise: Float[Tensor, "b k1 v"],
    known: Int[Tensor, "b n1"],
    behind: Bool[Tensor, "b n1 n1"],
) -> tuple[Int[Tensor, "b k1"], Int[Tensor, "b"]]:
    """The path of the target's own tokens from the root of a tree, and how many it meets."""
    depth, texts = behind.sum(-1) - 1, torch.arange(len(known))
    own = (logits + noise[texts[:, None], depth]).argmax(-1)
    now, count = torch.zeros(len(known), dtype=torch.long), torch.zeros(len(known)).long()
    path, going = [now], torch.ones(len(known), dtype=torch.bool)
    for slot in range(noise.shape[1] - 1):
        child = behind[texts, :, now] & (depth == slot + 1) & (known == own[texts, now][:, None])
        going = going & child.any(1)
        now = torch.where(going, child.long().argmax(1), now)
        count += going
        path.append(now)
    return torch.stack(path, 1), count


def _walk_rejecting(
    logits: Float[Tensor, "b n1 v"], drafts: Drafts, known: Int[Tensor, "b n1"], draw: Tensor
) -> tuple[Int[Tensor, "b k1"], Int[Tensor, "b"], Int[Tensor, "b k1"]]:
    """The path of the drafts that are kept, how many, and what takes the place of the next.

    Recursive rejection (SpecInfer, Miao et al., 2024; without replacement, Jeon et al., 2024): draws are tried in turn,
    each against what those before it left of p, and drawn from what they left of q. ``draw`` [b, k1, 8]: uniforms.
    """
    assert drafts.behind is not None and drafts.logits is not None and drafts.ids is not None
    depth, texts = drafts.behind.sum(-1) - 1, torch.arange(len(known))
    now, going = torch.zeros(len(known), dtype=torch.long), torch.ones(len(known), dtype=torch.bool)
    path, own, count = [now], [], torch.zeros(len(known), dtype=torch.long)
    for slot in range(draw.shape[1]):
        p, q = logits[texts, now].softmax(-1), torch.zeros_like(logits[:, 0])
        inner = now < drafts.logits.shape[1]
        law = drafts.logits[texts, now.clamp(max=drafts.logits.shape[1] - 1)].softmax(-1)
        q[:, drafts.ids] = law * inner[:, None]
        follows = drafts.behind[texts, :, now] & (depth == slot + 1) & going[:, None]
        chosen, met = now, torch.zeros_like(going)
        for number in range(int(follows.sum(1).max())):
            place = follows & (follows.cumsum(1) == number + 1)
            child = place.long().argmax(1)
            token = known[texts, child]
            tried = place.any(1) & ~met
            keep = tried & (draw[:, slot, 1 + number] * q[texts, token] < p[texts, token])
            chosen, met = torch.where(keep, child, chosen), met | keep
            lost = (tried & ~keep)[:, None]
            left = (p - q).clamp(min=0)
            p = torch.where(lost, left / left.sum(-1, keepdim=True), p)
            spent = q.scatter(1, token[:, None], 0.0)
            q = torch.where(lost, spent / spent.sum(-1, keepdim=True).clamp(min=1e-30), q)
        own.append(at_quantile(p, draw[:, slot, 0]))
        going = going & met
        count += going
        now = torch.where(going, chosen, now)
        path.append(now)
    return torch.stack(path[: draw.shape[1]], 1), count, torch.stack(own, 1)


def _standard(
    logits: Float[Tensor, "b k1 v"], drafts: Drafts, accept: Float[Tensor, "b k1"], again: Float[Tensor, "b k1"]
) -> tuple[Int[Tensor, "b k1"], Tensor]:
    """The token that replaces each draft if it is refused, and which drafts are kept."""
    p = logits.softmax(-1)
    q = torch.zeros_like(p)
    chosen = drafts.tokens[..., None]
    if drafts.logits is None:
        q[:, :-1].scatter_(-1, chosen, 1.0)
    else:
        q[:, :-1, drafts.ids] = drafts.logits.softmax(-1)
    theirs, ours = (law[:, :-1].gather(-1, chosen)[..., 0] for law in (p, q))
    same = accept[:, :-1] * ours < theirs
    # Behind the last slot q is 0, and what is left of p is p.
    return at_quantile((p - q).clamp_(min=0), again), same


def pooled(parts: list[Decoded]) -> Decoded:
    """Batches of rows as one."""
    rows = [torch.cat([getattr(p, name) for p in parts]) for name in ("text", "tokens", "passes", "steps")]
    return Decoded(*rows, sum(p.reached for p in parts), sum(p.kept for p in parts))  # type: ignore[arg-type]


def tokens_per_pass(parts: list[Decoded], under: list[Decoded] | None = None, draws: int = 2000) -> list[float]:
    """Tokens per target pass (over those of ``under``) and the 95% interval.

    A bootstrap over prompts, the same for both, and over the seeds of each.
    """
    generator, values = np.random.default_rng(0), []
    sides = [parts] if under is None else [parts, under]
    counts = [[np.stack([p.tokens.numpy(), p.passes.numpy()]) for p in side] for side in sides]
    size = counts[0][0].shape[1]
    for draw in range(draws + 1):
        rows, rates = generator.integers(size, size=size) if draw else np.arange(size), []
        for side in counts:
            seeds = generator.integers(len(side), size=len(side)) if draw else range(len(side))
            tokens, passes = sum(side[seed][:, rows].sum(1) for seed in seeds)
            rates.append(tokens / passes)
        values.append(rates[0] / (1 if under is None else rates[1]))
    return [float(values[0]), *np.quantile(values[1:], [0.025, 0.975]).tolist()]


@torch.no_grad()
def agreement(target: Target, drafter: Drafter, prompts: Int[Tensor, "n p"], seed: int) -> dict[str, float]:
    """How often a drafter that is given the true earlier tokens meets the target's token.

    Mean over slots and texts of the target: 1 - TV, what rejection keeps; (1 - TV) / (1 + TV), the least that argmax(l
    + xi) keeps; what it keeps; how often the token is among the first 2 and 4 of the race, and of softmax(l).
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
    own = drafter(prefix, None, text[:, after]).float()
    theirs = logits.softmax(-1)[:, after - 1][..., drafter.ids]
    shared = torch.minimum(theirs, own.softmax(-1)).sum(-1)
    race = own + torch.stack([rows[after][..., drafter.ids] for rows in noise])
    found = {"1 - TV": shared, "(1 - TV) / (1 + TV)": shared / (2 - shared)}
    for name, values in (("race", race), ("probability", own)):
        hits = drafter.ids[values.topk(4).indices] == text[:, after][..., None]
        found |= {f"{name}, first {n}": hits[..., :n].any(-1).float() for n in (1, 2, 4)}
    return {name: round(float(value.mean()), 4) for name, value in found.items()}


@torch.no_grad()
def seconds(
    target: Target, work: dict[str, tuple[Propose | None, int]], prompt: Int[Tensor, "p"], batch: int, repeats: int
) -> dict[str, float]:
    """Least seconds of a draft, or of a target's pass (no proposer) over so many rows, in turns.

    Of processor time of the one thread that runs: other work, which takes the processor away for longer, counts little.
    """
    tokens = prompt.expand(batch, -1)
    cache = Cache.empty(len(target.layers), target.shape, batch, 128)
    states = target.read(tokens[:, :-1], cache)[1][:, -1:]
    cache.lengths += len(prompt) - 1
    least, token = dict.fromkeys(work, float("inf")), tokens[:, -1:]
    for _ in range(repeats):
        for name, (propose, rows) in work.items():
            xi = torch.zeros(batch, rows, target.vocab_size)
            begin = time.thread_time()
            if propose is None:
                target.read(token.expand(-1, rows), cache)
            else:
                at = cache.lengths[:, None]
                propose(Prefix(states, token, at, cache.keys, cache.seen()), xi, tokens)
            least[name] = min(least[name], time.thread_time() - begin)
    return least
