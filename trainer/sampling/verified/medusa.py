"""Medusa decoding: the backbone verifies what the heads proposed from its own hidden states.

One pass of the backbone reads the tokens proposed last and says at each of them what it would have
taken; what agrees stays, with the backbone's own token behind it, and the hidden state in front of
that token is what the heads propose from next. Three rules say what agrees:

- ``coupled``: the draft is argmax(l + tau xi), with the noise that the heads were shown. The output
  is the backbone's own sequential decode of that noise (:mod:`~trainer.sampling.verified.coupled`).
- ``greedy``: the draft is argmax l. The output is the backbone's own greedy continuation.
- ``typical``: p(draft) > min(epsilon, delta exp(-H(p))), p the backbone at temperature tau (Cai et
  al., arXiv 2401.10774, section 2.3.1). Fast, and no sample of the backbone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from trainer.sampling.noise import NoiseUse
from trainer.sampling.token_rule import check_positive
from trainer.sampling.verified.coupled import Drafter, VerifiedRows
from trainer.sampling.verified.slots import OwnBackboneSampler
from trainer.sampling.verified.verifier import CausalReader, Verifier
from trainer.students.backbone import BackboneStudent
from trainer.students.registry import Medusa


@dataclass(frozen=True, kw_only=True)
class MedusaConfig(OwnBackboneSampler):
    """The backbone's tokens, several per pass, proposed by the heads on it.

    Attributes:
        acceptance: Which proposals stay: ``coupled``, ``greedy`` or ``typical``.
        epsilon: Of typical acceptance.
        delta: Of typical acceptance.

    Further settings as in :class:`OwnBackboneSampler`; ``draft`` left to itself is ``race`` under
    ``coupled`` acceptance for heads that have not seen their token's own noise, else ``map``.
    """

    acceptance: Literal["coupled", "greedy", "typical"] = "coupled"
    epsilon: float = 0.1
    delta: float = 1.0

    label: ClassVar[str] = "medusa"
    student_class: ClassVar[type[BackboneStudent]] = Medusa
    student_in_words: ClassVar[str] = "heads on a backbone"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(epsilon=self.epsilon, delta=self.delta)

    @property
    def seen_tau(self) -> float:
        """Greedy decoding is the limit of small noise: no token is preferred by it."""
        return 0.0 if self.acceptance == "greedy" else self.tau

    def best_draft(self, student: BackboneStudent) -> Literal["map", "race"]:
        """See :class:`OwnBackboneSampler`; only coupled decoding meets the noise itself."""
        return super().best_draft(student) if self.acceptance == "coupled" else "map"

    @property
    def rows(self) -> type[VerifiedRows]:
        """See :class:`VerifiedSampler`."""
        return MedusaRows


class HeadDrafter:
    """Proposals from the hidden states that the last pass of the backbone left.

    Args:
        student: The heads.
        condition: Noise embeddings of the positions to fill; None without noise.

    Attributes:
        hidden: [m, D] behind the last token but one of each row; None before the first pass.
    """

    def __init__(self, student: Medusa, condition: Float[Tensor, "b l e"] | None) -> None:
        self.student, self.num_heads = student, student.settings.backbone.num_proposed
        self.condition = None if condition is None else pad(condition, (0, 0, 0, self.num_heads))
        self.hidden: Tensor | None = None

    def reach(self, first: Int[Tensor, "m"]) -> Int[Tensor, "m"]:
        """See :class:`Drafter`; nothing before the backbone has read a token."""
        return first if self.hidden is None else first + self.num_heads

    def log_probs(
        self, tokens: Int[Tensor, "m l"], where: Bool[Tensor, "m l"]
    ) -> Float[Tensor, "n v"]:
        """See :class:`Drafter`."""
        assert self.hidden is not None
        rows, places = where.nonzero(as_tuple=True)
        first = where.int().argmax(dim=1)  # of a row without places it is not used
        embedded = None
        if self.condition is not None:
            window = torch.arange(self.num_heads + 1, device=first.device)
            index = (first.clamp_min(1) - 1)[:, None] + window
            everyone = torch.arange(len(tokens), device=first.device)
            embedded = self.condition[everyone[:, None], index]
        proposed = self.student.propose(self.hidden, embedded)
        return proposed[rows, places - first[rows]]

    def select(self, rows: Int[Tensor, "m"]) -> None:
        """See :class:`Drafter`."""
        self.condition = None if self.condition is None else self.condition[rows]
        self.hidden = None if self.hidden is None else self.hidden[rows]


class MedusaRows(VerifiedRows):
    """Rows that heads draft and their backbone verifies, in one pass per round."""

    config: MedusaConfig
    student: Medusa
    drafter: HeadDrafter

    def _drafter(self, use: NoiseUse) -> Drafter:
        condition = use.embed(self.student, self.filled[self.active], self.active)
        return HeadDrafter(self.student, condition)

    def _reader(self, verifier: Verifier) -> CausalReader:
        reader = super()._reader(verifier)
        reader.keeps_hidden = True
        return reader

    def _decide(
        self, logits: Float[Tensor, "n v"], rows: Int[Tensor, "n"], places: Int[Tensor, "n"]
    ) -> Int[Tensor, "n"]:
        """See :class:`VerifiedRows`."""
        if self.config.acceptance == "greedy":
            return logits.argmax(dim=-1)
        return super()._decide(logits, rows, places)

    def _agrees(
        self,
        logits: Float[Tensor, "m width v"],
        drafts: Int[Tensor, "m width"],
        verdict: Int[Tensor, "m width"],
    ) -> Bool[Tensor, "m width"]:
        """See :class:`VerifiedRows`."""
        if self.config.acceptance != "typical":
            return super()._agrees(logits, drafts, verdict)
        config, size = self.config, logits.shape[-1]
        drafted = drafts.clamp(max=size - 1)
        agrees = is_typical(logits / config.tau, drafted, config.epsilon, config.delta)
        return agrees & (drafts < size)  # behind the last draft stands the mask

    def _tell_drafter(self, taken: Bool[Tensor, "m width"]) -> None:
        """See :class:`VerifiedRows`; the heads go on from where the last taken token was told."""
        hidden = self.reader.hidden
        assert hidden is not None
        columns = torch.arange(taken.shape[1], device=taken.device)
        last = torch.where(taken, columns, -1).amax(dim=1)
        self.drafter.hidden = hidden[torch.arange(len(last), device=last.device), last]


def is_typical(
    logits: Float[Tensor, "*n v"], tokens: Int[Tensor, "*n"], epsilon: float, delta: float
) -> Bool[Tensor, "*n"]:
    """p(token) > min(epsilon, delta exp(-H(p))): unlikely only where the model is sure."""
    log_probs = logits.float().log_softmax(dim=-1)
    entropy = -(log_probs.exp() * log_probs).nansum(dim=-1)
    least = (delta * torch.exp(-entropy)).clamp_max(epsilon)
    return log_probs.gather(-1, tokens[..., None])[..., 0].exp() > least
