"""One training loop for every drafter: the target's own text and its probabilities."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import log_softmax

from benchmarks.drafting.drafters import Drafter, Form, Prefix
from benchmarks.drafting.target import Cache, Target
from shards.noise.gumbel import MIN_ARRIVAL, add_wait_, token_gumbels


@dataclass(frozen=True, kw_only=True)
class Training:
    """How drafters are trained; the compute is the same for all of them.

    Args:
        flops: Floating point operations of a whole training; the steps follow from it.
        rows: Rows of text per step. anchors: Positions per row behind which a block is drafted.
        kl: Weight of KL(p || q) beside total variation, which rejection loses.
        decay: Weight of a slot over that of the slot before it.
        vocabulary: Most frequent ids that a drafter can name.
    """

    flops: float
    rows: int = 8
    anchors: int = 32
    slots: int = 8
    kl: float = 0.5
    decay: float = 0.85
    rate: float = 2e-3
    vocabulary: int = 1536
    save_every: int = 100


def draft_vocabulary(
    tokens: Int[Tensor, "n l"], vocab_size: int, size: int
) -> tuple[Int[Tensor, "v"], Float[Tensor, "v"]]:
    """The most frequent ids of the text, and their log-frequencies."""
    counts = torch.bincount(tokens.flatten(), minlength=vocab_size).float() + 0.5
    ids = counts.argsort(descending=True, stable=True)[:size]
    return ids, (counts / counts.sum()).log()[ids]


def posterior_noise(
    log_p: Float[Tensor, "*n v"], tokens: Int[Tensor, "*n"], generator: torch.Generator
) -> Float[Tensor, "*n v"]:
    """xi given that argmax(log p + xi) is the token (Algorithm 1 of Zhang et al., ICLR 2026)."""
    first = torch.empty(tokens.shape).exponential_(generator=generator).clamp_(min=MIN_ARRIVAL)
    waits = torch.empty(log_p.shape).exponential_(generator=generator)
    xi = -add_wait_(waits, log_p.exp() * first[..., None]).clamp_(min=MIN_ARRIVAL).log_()
    own = token_gumbels(log_p.gather(-1, tokens[..., None]), first[..., None])
    return xi.scatter_(-1, tokens[..., None], own)


def posterior_uniform(
    log_p: Float[Tensor, "*n v"], tokens: Int[Tensor, "*n"], generator: torch.Generator
) -> Float[Tensor, "*n"]:
    """u given that F^-1(u) is the token: uniform between the sums of p before it and with it."""
    p, share = log_p.exp(), torch.rand(tokens.shape, generator=generator)
    until, own = (v.gather(-1, tokens[..., None])[..., 0] for v in (p.cumsum(-1), p))
    return until - share * own


def losses(
    drafter: Drafter,
    target: Target,
    tokens: Int[Tensor, "b l"],
    starts: Int[Tensor, "a"],
    settings: Training,
    generator: torch.Generator,
) -> tuple[Tensor, Float[Tensor, "k"]]:
    """The loss of blocks behind the positions ``starts``, and 1 - TV by slot.

    A drafter that reads noise gets that of its own ids under which the text is the target's.
    ``small`` learns from every position of the text.
    """
    (b, length), k = tokens.shape, drafter.slots
    following = starts[:, None] + torch.arange(1, k + 1)
    with torch.no_grad():
        cache = Cache.empty(len(target.layers), target.shape, b, length)
        logits, states = target.read(tokens, cache)
        log_p, noise = log_softmax(logits, -1), None
        own = log_p[:, :-1], tokens[:, 1:], generator
        if drafter.form.kind == "small":
            following = torch.arange(1, length)[:, None]  # every position is the end of a text
        elif drafter.form.noise == "uniform":
            noise = posterior_uniform(*own)[:, following - 1, None]
        elif drafter.form.noise != "none":
            noise = posterior_noise(*own)[..., drafter.ids][:, following - 1]
        goal = log_p[..., drafter.ids][:, following - 1]
        p = goal.exp()
    with torch.autocast("cpu", torch.bfloat16):
        seen = (torch.arange(length) < starts[:, None]).expand(b, -1, -1)
        at = starts.expand(b, -1)
        prefix = Prefix(states[:, starts - 1], tokens[:, starts], at, cache.keys, seen)
        if drafter.form.kind == "small":
            drafted = drafter.read(tokens[:, :-1])[:, :, None]
        else:
            drafted = drafter(prefix, noise, tokens[:, following])
    weights = settings.decay ** torch.arange(drafted.shape[2])
    log_q = log_softmax(drafted.float(), -1)
    kl = (p * (goal - log_q)).sum(-1).mean((0, 1))
    same = torch.minimum(p, log_q.exp()).sum(-1).mean((0, 1))
    return (weights * (settings.kl * kl + 1 - same)).mean(), same.detach()


def step_flops(drafter: Drafter, target: Target, settings: Training, length: int) -> float:
    """Operations of one training step: forward, and twice that backward (what is frozen: once)."""
    every = settings.rows * target.flops(length, length / 2)
    share = 2.1 if drafter.form.kind == "lora" else 2.7
    anchors = length / drafter.slots if drafter.form.kind == "small" else settings.anchors
    return every + share * settings.rows * anchors * drafter.flops(length / 2)


def train(
    form: Form,
    target: Target,
    tokens: Int[Tensor, "n l"],
    settings: Training,
    seed: int,
    path: Path,
    say: Callable[[str], None] = print,
) -> Drafter:
    """A trained drafter; a training that was cut off goes on from ``path``, bit for bit."""
    torch.manual_seed(seed)
    vocabulary = draft_vocabulary(tokens, target.vocab_size, settings.vocabulary)
    drafter = Drafter(form, target, *vocabulary, settings.slots)
    steps = max(2, round(settings.flops / step_flops(drafter, target, settings, tokens.shape[1])))
    weights = {name: w for name, w in drafter.named_parameters() if w.requires_grad}
    matrices = [w for name, w in weights.items() if w.ndim == 2 and "places" not in name]
    others = [w for name, w in weights.items() if w.ndim != 2 or "places" in name]
    peak = form.rate or settings.rate
    plain = {"lr": peak, "weight_decay": 0.0}
    optimizers = [
        torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **plain),
        torch.optim.AdamW(others, betas=(0.9, 0.98), **plain),
    ]
    done, curve = 0, []
    if path.exists():
        saved = torch.load(path, weights_only=True)
        drafter.load_state_dict(saved["drafter"])
        done, curve = saved["done"], saved["curve"]
        if done < steps:
            for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
                optimizer.load_state_dict(state)
    recent = torch.zeros(settings.slots)
    for step in range(done, steps):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        chosen = torch.randint(len(tokens), (settings.rows,), generator=generator)
        places = tokens.shape[1] - settings.slots - 1
        starts = torch.randperm(places, generator=generator)[: settings.anchors].sort().values + 1
        rate = peak * min(1.0, (step + 1) / 40, 1.15 * (1 - step / steps) + 0.02)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
        loss, kept = losses(drafter, target, tokens[chosen], starts, settings, generator)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        recent, last = recent + kept, step + 1 == steps
        if (step + 1) % settings.save_every == 0 or last:
            curve.append([step + 1, *(recent / (step % settings.save_every + 1)).tolist()])
            recent = torch.zeros(settings.slots)
            saved = {"drafter": drafter.state_dict(), "done": step + 1, "curve": curve}
            saved["optimizers"] = [] if last else [o.state_dict() for o in optimizers]
            torch.save(saved, path.with_suffix(".part"))
            os.replace(path.with_suffix(".part"), path)
            shares = " ".join(f"{v:.3f}" for v in curve[-1][1:])
            say(f"{form.name} seed {seed} step {step + 1} of {steps}: 1 - TV by slot {shares}")
    return drafter.eval()
