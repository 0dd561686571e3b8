"""By how much each token wins argmax(l + tau xi): one clean pass of the teacher per row."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from evaluation.certificate.drawn import DrawnFile, DrawnRow
from shards.base import UsageError, progress_bar
from trainer.sampling.verified import Verifier, gumbel_scores, require_whole_noise

TIE_ROUNDINGS = {torch.float32: 64, torch.bfloat16: 6}
"""A margin is a tie within this many roundings (eps of the weights' precision) of the largest
logit: two ways to compute one pass (with a cache and without, alone or in a batch) differ by a few.
In bfloat16 a rounding is what 65,536 are in float32, so there are as few as will do: of 21,760
tokens drawn with a cache from four small models a clean pass preferred another one 109 times, by at
most 1.5 roundings."""
MOST_LISTED = 20
ROWS_AT_A_TIME = 32


@dataclass(frozen=True)
class Position:
    """A token that is not the clear winner.

    Attributes:
        index: The sample's.
        position: In its row.
        token: What stands there.
        winner: The best of the other tokens.
        margin: Score of the token minus that of ``winner``, nats.
    """

    index: int
    position: int
    token: int
    winner: int
    margin: float


@dataclass
class Certificate:
    """What was found.

    Attributes:
        num_positions: Filled positions looked at.
        num_agreeing: Where the token wins; ties that it wins are among them.
        smallest_margin: Of those, nats; infinite when there is none.
        mismatches: Where another token wins by more than rounding can explain.
        num_mismatches: Their number; ``mismatches`` lists the first.
        ties: Where rounding decides.
        dtype: Precision of the teacher.
        tie_roundings: Within how many of its roundings a margin is a tie.
    """

    num_positions: int = 0
    num_agreeing: int = 0
    smallest_margin: float = float("inf")
    mismatches: list[Position] = field(default_factory=list)
    num_mismatches: int = 0
    ties: list[Position] = field(default_factory=list)
    dtype: str = "float32"
    tie_roundings: int = TIE_ROUNDINGS[torch.float32]

    @property
    def agreement(self) -> float:
        """Share of positions where the token wins."""
        return self.num_agreeing / max(1, self.num_positions)

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {**asdict(self), "agreement": self.agreement}


def certify_file(drawn: DrawnFile, teacher: Verifier) -> Certificate:
    """Compare every filled token of a file with the teacher's own.

    Raises:
        UsageError: When the teacher cannot read the rows or is not the one that verified them, or
            the samples' noise was cut off.
    """
    ours = teacher.weights_sha256
    if drawn.verifier_sha256 not in (None, ours):
        raise UsageError(
            "these samples were verified by another model",
            where="--teacher",
            got=f"weights {ours[:12]}",
            expected=f"weights {str(drawn.verifier_sha256)[:12]}",
        )
    require_whole_noise(drawn.noise(drawn.rows[0]).select(slice(0, 1)))
    teacher.require_context(max(len(row.tokens) for row in drawn.rows))
    dtype = next(teacher.model.parameters()).dtype
    found = Certificate(dtype=str(dtype).removeprefix("torch."), tie_roundings=TIE_ROUNDINGS[dtype])
    rows = sorted(drawn.rows, key=lambda row: len(row.tokens))
    with progress_bar("certify", len(rows)) as bar:
        for first in range(0, len(rows), ROWS_AT_A_TIME):
            group = rows[first : first + ROWS_AT_A_TIME]
            for row, logits in zip(group, _read(group, teacher), strict=True):
                _judge(found, row, logits, drawn)
            bar.advance(len(group))
    return found


@torch.no_grad()
def _read(rows: list[DrawnRow], teacher: Verifier) -> Float[Tensor, "b l v"]:
    """Logits of the token behind each position; what stands behind a row is seen by none of it."""
    longest = max(len(row.tokens) for row in rows)
    tokens = torch.tensor([row.tokens + [0] * (longest - len(row.tokens)) for row in rows])
    device = next(teacher.model.parameters()).device
    return teacher.model(input_ids=tokens.to(device)).logits[..., : teacher.vocab_size].float()


def _judge(
    found: Certificate, row: DrawnRow, logits: Float[Tensor, "l v"], drawn: DrawnFile
) -> None:
    places = torch.tensor(row.filled, dtype=torch.int64)
    tokens = torch.tensor(row.tokens)[places].to(logits.device)
    here = logits[(places - 1).to(logits.device)]
    scores = gumbel_scores(here, drawn.noise(row).select(places), drawn.tau)
    margins, winners = token_margins(scores, tokens)
    rounding = torch.finfo(getattr(torch, found.dtype)).eps * here.abs().amax(dim=-1).clamp_min(1.0)
    within = found.tie_roundings * rounding
    found.num_positions += len(places)
    found.num_agreeing += int((margins > 0).sum())
    if bool((margins > 0).any()):
        found.smallest_margin = min(found.smallest_margin, float(margins[margins > 0].min()))
    for slot in (margins <= within).nonzero()[:, 0].tolist():
        position = Position(
            row.index,
            int(places[slot]),
            int(tokens[slot]),
            int(winners[slot]),
            float(margins[slot]),
        )
        if abs(position.margin) <= float(within[slot]):
            found.ties.append(position)
            continue
        found.num_mismatches += 1
        if len(found.mismatches) < MOST_LISTED:
            found.mismatches.append(position)


def token_margins(
    scores: Float[Tensor, "n v"], tokens: Int[Tensor, "n"]
) -> tuple[Float[Tensor, "n"], Int[Tensor, "n"]]:
    """Score of each token minus the best other score, and whose that is."""
    own = scores.gather(1, tokens[:, None])
    others = scores.scatter(1, tokens[:, None], -torch.inf)
    best, winners = others.max(dim=1)
    return own[:, 0] - best, winners
