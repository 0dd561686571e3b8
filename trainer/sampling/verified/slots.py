"""The drafter's decoding: one language model proposes on slots and verifies what it proposed.

Tokens are read without adapters, so what they say is the backbone's own verdict (see
:mod:`~trainer.sampling.verified.coupled`), and their keys and values serve the slots as they are.
A round either takes one call or two::

    one    tokens of the last draft, and slots behind each of them, as many as the call may accept:
           K tokens and K K slots give a + 1 tokens, a of K - 1 drafts accepted
    two    the last token and its K slots; then the draft. 2 K + 1 positions give a + 2 tokens

So a token costs 1 / (a + 1) calls against 2 / (a + 2). One call is better, by up to two times,
where a call takes as long as the weights take to be read (few rows on a GPU), and worse by about
K / 2 times where arithmetic decides (a CPU, many rows). The first slot of a point proposes what the
backbone says in the same call; it is there to carry that token's noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trainer.sampling.rules import NoiseUse, position_chunks
from trainer.sampling.verified.drafters import Drafter as Drafting
from trainer.sampling.verified.own_backbone import OwnBackboneSampler
from trainer.sampling.verified.rows import VerifiedRows
from trainer.sampling.verified.slot_reader import SlotReader
from trainer.sampling.verified.verifier import Verifier
from trainer.students import BackboneStudent, Drafter, token_uniforms


@dataclass(frozen=True, kw_only=True)
class DrafterSampler(OwnBackboneSampler):
    """The backbone's own samples, proposed on its slots.

    Attributes:
        calls_per_round: 1 reads slots behind every token that may be accepted; 2 reads them when
            it is known which were.

    Further settings as in :class:`OwnBackboneSampler`; ``draft`` left to itself is ``map`` where a
    slot is told its own noise, else ``race``.
    """

    calls_per_round: Literal[1, 2] = 1

    label: ClassVar[str] = "drafter"
    student_class: ClassVar[type[BackboneStudent]] = Drafter
    student_in_words: ClassVar[str] = "slots of a backbone"

    @property
    def rows(self) -> type[VerifiedRows]:
        """See :class:`VerifiedSampler`."""
        return SlotRows


class SlotProposals:
    """What the last call's slots propose.

    Args:
        condition: Noise embeddings of the positions to fill, by position; None without noise.

    Attributes:
        logits: [m, K - 1, V] of the tokens from each row's first open position on; None where the
            last call had no slots.
    """

    def __init__(self, condition: Float[Tensor, "b l e"] | None) -> None:
        self.condition = condition
        self.logits: Tensor | None = None

    def reach(self, first: Int[Tensor, "m"]) -> Int[Tensor, "m"]:
        """See :class:`~trainer.sampling.verified.drafters.Drafter`."""
        return first if self.logits is None else first + self.logits.shape[1]

    def log_probs(
        self, tokens: Int[Tensor, "m l"], where: Bool[Tensor, "m l"]
    ) -> Float[Tensor, "n v"]:
        """Up to a constant a position; see the protocol."""
        assert self.logits is not None
        rows, places = where.nonzero(as_tuple=True)
        first = where.int().argmax(dim=1)
        return self.logits[rows, places - first[rows]]

    def select(self, rows: Int[Tensor, "m"]) -> None:
        """See the protocol."""
        self.condition = None if self.condition is None else self.condition[rows]
        self.logits = None if self.logits is None else self.logits[rows]


class SlotRows(VerifiedRows):
    """Rows that one model proposes and verifies."""

    config: DrafterSampler
    student: Drafter
    drafter: SlotProposals
    reader: SlotReader
    slots: Float[Tensor, "m points k v"] | None = None

    def _reader(self, verifier: Verifier) -> SlotReader:
        return SlotReader(self.student, len(self.active))

    def _drafter(self, use: NoiseUse) -> Drafting:
        return SlotProposals(use.embed(self.student, self.filled[self.active], self.active))

    def _verifier_logits(
        self, drafted: Int[Tensor, "m l"], stops: Int[Tensor, "m"], width: int
    ) -> Float[Tensor, "m width v"]:
        """See :class:`VerifiedRows`; slots behind each token that this call may accept."""
        first = self.first[self.active]
        self.verifier_nfe[self.active] += 1
        points = torch.arange(width, device=first.device)
        if self.config.max_lookahead == 0 or self._only_verifies:
            points = points[:0]
        starts = torch.minimum(first[:, None] + points, stops[:, None])
        self.nfe[self.active] += len(points) > 0
        with torch.autocast(drafted.device.type, enabled=False):
            read = self.reader.read(drafted, stops, width, starts, self.drafter.condition)
        logits, slots = read
        self.slots = slots if len(points) else None
        return logits

    @property
    def _only_verifies(self) -> bool:
        """Whether this is the second call of a round."""
        return self.config.calls_per_round == 2 and self.drafter.logits is not None

    def _draft(self, first: Int[Tensor, "m"], stops: Int[Tensor, "m"]) -> Int[Tensor, "m l"]:
        """See :class:`VerifiedRows`; proposing took no pass of its own."""
        before = self.nfe.clone()
        tokens = super()._draft(first, stops)
        self.nfe = before
        return tokens

    def _race(
        self, logits: Float[Tensor, "n v"], rows: Int[Tensor, "n"], places: Int[Tensor, "n"]
    ) -> Int[Tensor, "n"]:
        """See :class:`VerifiedRows`; F^-1(u) where the noise is one uniform per token."""
        if self.student.settings.conditioning != "uniform":
            return super()._race(logits, rows, places)
        index = (rows * self.tokens.shape[1] + places).to(self.xi.device)
        parts = [
            inverse_cdf(
                logits[chunk], token_uniforms(self.xi.select(index[chunk])), self.config.tau
            )
            for chunk in position_chunks(len(logits), logits.shape[1], logits.device)
        ]
        return torch.cat(parts)

    def _tell_drafter(self, taken: Bool[Tensor, "m width"]) -> None:
        """See :class:`VerifiedRows`; the slots behind the last accepted draft propose next."""
        if self.slots is None:
            self.drafter.logits = None
        else:
            point = taken.sum(dim=1) - 1
            everyone = torch.arange(len(point), device=point.device)
            self.drafter.logits = self.slots[everyone, point, 1:]


def inverse_cdf(
    logits: Float[Tensor, "n v"], uniforms: Float[Tensor, "n"], tau: float
) -> Int[Tensor, "n"]:
    """F^-1(u) by id at temperature tau, in float64: the first id with F > u."""
    cumulative = (logits.double() / tau).softmax(dim=-1).cumsum(dim=-1)
    found = torch.searchsorted(cumulative, uniforms.to(logits.device)[:, None], right=True)
    return found[:, 0].clamp(max=logits.shape[-1] - 1)
