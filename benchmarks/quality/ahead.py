"""How far ahead of known text one pass sees: fills of the m tokens behind a prefix.

A row's first tokens are known, everything behind them is masked, and one forward pass fills the
next tokens. Each fill is compared with what the teacher itself would have written from the same
noise, scored by the teacher, and compared with a second fill of the same prefix under other noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from shards.noise.kinds import Noise
from trainer.sampling.noise import sampling_noise
from trainer.students.registry import BD3LM, MDLM


@dataclass(frozen=True)
class Prefixes:
    """Known beginnings of rows.

    Attributes:
        rows: Clean rows; only their first ``start`` tokens are shown.
        start: Known tokens of each row.
        width: Tokens to fill behind them.
    """

    rows: Int[Tensor, "n l"]
    start: int
    width: int

    def noise(self, seed: int, vocab_size: int, stop: int) -> Noise:
        """xi of row positions start..stop-1, row by row."""
        num_rows, length = self.rows.shape
        noise = sampling_noise(seed, torch.arange(num_rows), length, vocab_size)
        ahead = torch.arange(self.start, stop)
        return noise.select((torch.arange(num_rows)[:, None] * length + ahead).flatten())

    def gumbels(self, seed: int, vocab_size: int) -> Float[Tensor, "n m v"]:
        """The same as numbers, of the positions to fill."""
        noise = self.noise(seed, vocab_size, self.start + self.width)
        gumbels = -noise.tile(0, vocab_size).log()
        return gumbels.unflatten(0, (len(self.rows), self.width))


@dataclass(frozen=True)
class Fills:
    """What one way of decoding wrote, beside the teacher.

    Attributes:
        nll: Teacher's -log p of each filled token, given the prefix and the fill before it, nats.
        equal: Where the fill equals the teacher's decode of the same noise.
        repeated: Where two fills of one prefix, under two seeds, have the same token.
    """

    nll: Float[Tensor, "n m"]
    equal: Bool[Tensor, "n m"]
    repeated: Bool[Tensor, "n m"]

    def nll_of_first(self, count: int, rows: np.ndarray | slice = slice(None)) -> float:
        """Mean over the first ``count`` tokens, nats per token."""
        return float(self.nll[rows, :count].mean())

    def entropy_of_first(self, count: int, rows: np.ndarray | slice = slice(None)) -> float:
        """-log of the chance that two fills of a prefix agree at a position: Renyi-2, nats."""
        return -float(np.log(max(float(self.repeated[rows, :count].float().mean()), 1e-9)))

    def accepted(self) -> Float[Tensor, "n"]:
        """Tokens before the first difference from the teacher's decode."""
        return self.equal.long().cumprod(dim=1).sum(dim=1)


@torch.no_grad()
def teacher_continuations(
    teacher: Any, prefixes: Prefixes, gumbels: Float[Tensor, "n m v"]
) -> Int[Tensor, "n m"]:
    """argmax(log p + xi), one token after the other behind each prefix."""
    read, cache, written = prefixes.rows[:, : prefixes.start], None, []
    for column in range(prefixes.width):
        output = teacher(input_ids=read, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        log_probs = output.logits[:, -1, : gumbels.shape[-1]].float().log_softmax(-1)
        read = (log_probs + gumbels[:, column]).argmax(-1)[:, None]
        written.append(read)
    return torch.cat(written, dim=1)


@torch.no_grad()
def continuation_nll(
    teacher: Any, prefixes: Prefixes, written: Int[Tensor, "n m"]
) -> Float[Tensor, "n m"]:
    """-log p of each written token, nats."""
    rows = torch.cat((prefixes.rows[:, : prefixes.start], written), dim=1)
    logits = teacher(input_ids=rows).logits[:, prefixes.start - 1 : -1].float()
    return -logits.log_softmax(-1).gather(-1, written[..., None])[..., 0]


@torch.no_grad()
def one_pass(
    student: MDLM, prefixes: Prefixes, seed: int, tau: float = 1.0
) -> Float[Tensor, "n m v"]:
    """Log-probabilities of the tokens behind the prefixes, from a single pass.

    An MDLM has the whole rest of the row masked, a BD3-LM sees nothing behind its block.
    """
    rows, start, stop = prefixes.rows.clone(), prefixes.start, prefixes.start + prefixes.width
    rows[:, start:] = student.mask_id
    if isinstance(student, BD3LM) and student.num_blocks > 1:
        rows = rows[:, :stop]
    vocab_size, embedded = student.config.vocab_size, None
    if student.is_conditioned:
        noise = prefixes.noise(seed, vocab_size, rows.shape[1])
        behind = student.embed_noise(noise, tau).unflatten(0, (len(rows), -1))
        embedded = pad(behind, (0, 0, start, 0))
    where = torch.zeros_like(rows, dtype=torch.bool)
    where[:, start:stop] = True
    log_probs = student.predict_at(rows, where, embedded)[:, :vocab_size]
    return log_probs.unflatten(0, (len(rows), prefixes.width))


def truncated(log_probs: Float[Tensor, "*s v"], nucleus_p: float) -> Float[Tensor, "*s v"]:
    """-inf outside the nucleus; the most probable token always stays."""
    ordered, ids = log_probs.sort(dim=-1, descending=True)
    kept = ordered.double().exp().cumsum(-1) <= nucleus_p
    kept[..., 0] = True
    inside = torch.zeros_like(kept).scatter(-1, ids, kept)
    return log_probs.masked_fill(~inside, -torch.inf)


def fills(
    student: MDLM,
    teacher: Any,
    prefixes: Prefixes,
    seeds: tuple[int, int],
    nucleus_ps: tuple[float, ...],
    own_draws: bool,
) -> dict[float, Fills]:
    """Nucleus p -> fills of one student; 0 is argmax.

    Args:
        seeds: Of the two fills of every prefix.
        own_draws: Draw by the very xi that the teacher decodes (right for a student that has not
            seen it: the best coupling there is); otherwise by further noise.
    """
    vocab_size = student.config.vocab_size
    result: dict[float, list[tuple[Tensor, Tensor]]] = {p: [] for p in nucleus_ps}
    for seed in seeds:
        gumbels = prefixes.gumbels(seed, vocab_size)
        decoded = teacher_continuations(teacher, prefixes, gumbels)
        log_probs = one_pass(student, prefixes, seed)
        chooser = gumbels if own_draws else prefixes.gumbels(seed + 1_000, vocab_size)
        for p in nucleus_ps:
            written = (truncated(log_probs, p) + chooser).argmax(-1)
            result[p].append((written, written == decoded))
    return {
        p: Fills(continuation_nll(teacher, prefixes, first[0]), first[1], first[0] == second[0])
        for p, (first, second) in result.items()
    }
