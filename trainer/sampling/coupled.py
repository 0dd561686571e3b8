"""Coupled verification: exact samples of a language model, several tokens per pass.

A token of a language model is argmax(l + tau xi): with the noise xi given, decoding is a
deterministic map. The student, which has learnt that map, drafts the next tokens from the noise in
one pass. The verifier reads the draft in one pass and says, at each position, which token *it*
would have taken with the same noise::

    y_i = argmax(l_i + tau xi_i),   l_i its logits behind the tokens before i, drafted or not

The prefix on which draft and y agree is kept, and so is the first y that differs: the tokens before
it are right, so it is right. What comes out is the verifier's own sequential decode of xi, whatever
the student is, and thus an exact sample of the verifier at temperature tau, with top-k and nucleus
where these are set: then the argmax is over the tokens that they keep. (Predictive sampling,
Wiggers and Hoogeboom, ICML 2020, with the student in the place of their forecaster.) Unlike APD
there is nothing to trade: a bad student costs passes and changes no token. From Python::

    sampler = make_sampler("coupled", verifier="path/or/hub-id", nucleus_p=0.9)
    result = sampler.sample(student, tokens, sample_ids, None, seed)  # draws the noise itself
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shards.errors import UsageError
from shards.noise.embedding import Noise
from shards.settings import setting
from trainer.objective.batch import Places
from trainer.sampling.fill import Pass, Rows, Sampler, check_length, check_times, check_tokens
from trainer.sampling.noise import RowNoise, SampleKeys, TokenRule, position_chunks, sampling_noise
from trainer.sampling.stopping import has_gaps
from trainer.sampling.verifier import CausalReader, SecondModel, Verifier
from trainer.students.conditioning import EmbeddedNoise
from trainer.students.registry import BD3LM, MDLM, Student

Draft = Literal["greedy", "gumbel"]


class VerifiedRows(Rows):
    """Rows on their way; subclasses say how their tokens are drafted.

    Args:
        sampler: Settled.
        student: Drafts.
        tokens: [B, L] rows as given: a prefix, then the mask id.
        noise: xi, all of it.
        keys: Names of the draws.

    Attributes:
        active: [m] rows that are not full.
        first: [B] each row's first position that is not settled.
        condition: [m, L, e] the noise as the student sees it; None without noise.
        num_drafts: [B] the student's passes.
    """

    def __init__(
        self, sampler: VerifiedSampler, student: Any, tokens: Int[Tensor, "b l"], noise: RowNoise, keys: SampleKeys
    ) -> None:
        self.sampler = sampler
        super().__init__(student, tokens, noise, keys)

    def start(self) -> None:
        """See :class:`Rows`."""
        sampler, student, everyone = self.sampler, self.student, self.everyone
        self.first = (~self.masked).sum(dim=1)
        self.active = self.masked.any(dim=1).nonzero()[:, 0]
        self.reader = self.make_reader(sampler.load(student))
        seen = replace(self.noise, tau=sampler.seen_tau)
        if not student.is_conditioned:
            seen = replace(seen, noise=None)
        self.condition = seen.embed(student, self.masked[self.active], self.active)
        self.num_drafts = torch.zeros_like(self.nfe)
        shape = len(everyone), int(sampler.max_lookahead or 0)
        names = ("drafted", "agreed", "reached", "accepted")
        self.counts = {name: self.nfe.new_zeros(shape) for name in names}
        self.rounds: list[tuple[Tensor, Tensor, Tensor]] = []

    def make_reader(self, verifier: Verifier) -> CausalReader:
        """What reads the active rows."""
        return verifier.reader(len(self.active), self.tokens.device)

    @abstractmethod
    def reach(self, first: Int[Tensor, "m"]) -> Int[Tensor, "m"]:
        """Where the positions end that one draft predicts; the tokens before ``first`` stand."""

    @abstractmethod
    def draft(self, tokens: Int[Tensor, "m l"], where: Bool[Tensor, "m l"]) -> Float[Tensor, "n v"]:
        """The student's log-probabilities, up to a constant a position.

        Args:
            tokens: The active rows: known tokens, then the mask id.
            where: Positions from each row's first masked one, within its reach.
        """

    def read(self) -> Float[Tensor, "m width v"]:
        """The verifier's logits about the last ``width`` positions up to ``stops``."""
        return self.reader.next_logits(self.drafted, self.stops, self.places.shape[1])

    def learn(self, taken: Bool[Tensor, "m width"]) -> None:
        """Which of the verifier's tokens are taken."""
        return  # who reads the rows sees them there

    def select(self, left: Int[Tensor, "k"]) -> None:
        """Go on with some of the active rows."""
        self.active = self.active[left]
        self.reader.select(left)
        self.condition = None if self.condition is None else self.condition[left]

    def propose(self) -> Pass:
        """Draft; the pass of the verifier that reads the drafts."""
        first, length = self.first[self.active], self.tokens.shape[1]
        ahead = first + int(self.sampler.max_lookahead or 0)
        # The last token is never drafted: the verifier's own comes as well.
        self.stops = torch.minimum(self.reach(first), ahead).clamp_max(length - 1)
        tokens = self.tokens[self.active]
        place = torch.arange(length, device=tokens.device)
        where = (place >= first[:, None]) & (place < self.stops[:, None])
        if bool(where.any()):
            rows, columns = where.nonzero(as_tuple=True)
            logits = self.draft(tokens, where)
            if self.sampler.draft == "gumbel":
                tokens[where] = self.race(logits, self.active[rows], columns)
            else:
                tokens[where] = logits.argmax(dim=-1)
            self.num_drafts[self.active] += where.any(dim=1)
        self.drafted = tokens
        width = int((self.stops - first).max()) + 1
        columns = torch.arange(width, device=first.device)
        self.places = self.stops[:, None] - width + 1 + columns
        self.unsettled = self.places >= first[:, None]
        row, column = self.unsettled.nonzero(as_tuple=True)
        where_ = Places(row, self.places[row, column])
        return Pass(self.active, Places(self.active[row], where_.positions), where_)

    def predict(self, part: Pass) -> Float[Tensor, "n v"]:
        """See :class:`Rows`: the verifier's logits at the positions that are not settled."""
        with torch.autocast(self.tokens.device.type, enabled=False):
            return self.read()[self.unsettled]

    def race(
        self, logits: Float[Tensor, "n v"], rows: Int[Tensor, "n"], positions: Int[Tensor, "n"]
    ) -> Int[Tensor, "n"]:
        """argmax(l + tau xi) at some positions, over the tokens that the rule keeps."""
        parts = [
            self.winners(logits[chunk], self.noise.at(Places(rows[chunk], positions[chunk])))
            for chunk in position_chunks(len(logits), logits.shape[1], logits.device)
        ]
        return torch.cat(parts)

    def winners(self, logits: Float[Tensor, "n v"], noise: Noise) -> Int[Tensor, "n"]:
        """The same for a few positions."""
        rule = self.sampler.rule
        scores = gumbel_scores(logits, noise, rule.temperature)
        if rule.truncates:
            scores = scores.masked_fill(rule.probabilities(logits) == 0, -torch.inf)
        return scores.argmax(dim=-1)

    def accept(self, logits: Float[Tensor, "n v"], part: Pass) -> tuple[Places, Tensor]:
        """Each row's drafts up to the first that may not stay, and the verifier's token there."""
        drafts = self.drafted.gather(1, self.places.clamp_min(0))
        verdict = torch.zeros_like(drafts)
        verdict[self.unsettled] = self.sampler.decide(self, logits, part)
        agrees = verdict == drafts
        if (stays := self.sampler.stays(logits, drafts[self.unsettled])) is not None:
            agrees[self.unsettled] = stays
        verdict = torch.where(agrees, drafts, verdict)
        kept = (agrees | ~self.unsettled) & (self.places < self.stops[:, None])
        kept = kept.cumprod(dim=1).bool()
        taken = torch.cat((torch.ones_like(kept[:, :1]), kept[:, :-1]), dim=1) & self.unsettled
        self._count((kept & self.unsettled).sum(dim=1))
        self.learn(taken)
        self.first[self.active] += taken.sum(dim=1)
        row = taken.nonzero()[:, 0]
        return Places(self.active[row], self.places[taken]), verdict[taken]

    def retire(self) -> None:
        """Rows that are full or have ended leave; behind its end a row holds eos."""
        eos, active, stop = self.student.config.eos_token_id, self.active, self.sampler.stop
        first = self.first[active]
        is_done = first >= self.tokens.shape[1]
        if stop.at_eos and eos is not None:
            tokens = self.tokens[active]
            lengths = stop.ends(tokens, self.masked[active], eos)
            has_ended = lengths < tokens.shape[1]
            place = torch.arange(tokens.shape[1], device=tokens.device)
            behind = has_ended[:, None] & (place >= lengths[:, None])
            self.tokens[active] = tokens.masked_fill(behind, eos)
            is_done |= has_ended
        self.reader.keep(first - 1)
        left = (~is_done).nonzero()[:, 0]
        if len(left) < len(active):
            self.select(left)

    def _count(self, num_accepted: Int[Tensor, "m"]) -> None:
        """Note a round's drafts, by their distance from the settled prefix."""
        first, counts = self.first[self.active], self.counts
        distance = torch.arange(counts["drafted"].shape[1], device=first.device)
        is_drafted = distance < (self.stops - first)[:, None]
        counts["accepted"][self.active] += distance < num_accepted[:, None]
        counts["reached"][self.active] += (distance <= num_accepted[:, None]) & is_drafted
        counts["drafted"][self.active] += is_drafted
        places = torch.where(is_drafted, first[:, None] + distance, -1)
        self.rounds.append((self.active, places, self.drafted.gather(1, places.clamp_min(0))))

    def finish(self) -> None:
        """Results beside the tokens, now that these are known."""
        for rows, places, drafts in self.rounds:
            final = self.tokens[rows].gather(1, places.clamp_min(0))
            self.counts["agreed"][rows] += (places >= 0) & (drafts == final)
        self.details = {"verifier_nfe": self.nfe, **self.counts}
        self.nfe = self.num_drafts


@dataclass(frozen=True, kw_only=True)
class VerifiedSampler(Sampler):
    """Base of the samplers that draft ahead and let a causal language model verify.

    ``nfe`` of their results counts the student's passes. ``details`` hold the verifier's,
    ``verifier_nfe``, and by distance from the accepted prefix (0 is the token right behind it) how
    many tokens were ``drafted``, how many of them ``agreed`` with the token that the row has there
    in the end, how many were ``reached`` (all before them agreed) and how many of those
    ``accepted``.

    Attributes:
        max_lookahead: Most tokens drafted at a time; 0 is the verifier alone, None drafts to the row's end.
        tau: Temperature of the verifier, which is the scale of the noise that the student sees.
        draft: ``greedy`` takes the student's most probable tokens; ``gumbel`` adds tau xi to its
            log-probabilities first. None is ``greedy`` for a student that reads noise, else
            ``gumbel``.

    Further settings as in :class:`Sampler`; ``nucleus_p`` and ``top_k`` are the verifier's.
    """

    max_lookahead: int | None = 8
    tau: float = setting(1.0, within="(0, inf)")  # type: ignore[assignment]
    draft: Draft | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.max_lookahead or 0) < 0:
            raise UsageError("a count below 0", where="max_lookahead", got=self.max_lookahead)
        if self.max_lookahead == 0 and self.draft is not None:
            what, remedy = "nothing is drafted", "leave one of the two out"
            raise UsageError(what, where="draft, max_lookahead", got=self.draft, remedy=remedy)

    @property
    def rule(self) -> TokenRule:
        """How the verifier's tokens are chosen."""
        nucleus = self.nucleus_p, self.nucleus_rule
        return TokenRule("categorical", *nucleus, self.tau, self.top_k)

    @property
    def seen_tau(self) -> float:
        """Scale of the noise that the student is shown."""
        return self.tau

    @abstractmethod
    def load(self, student: Student) -> Verifier:
        """The verifier on the student's device."""

    def verifier_sha256(self, student: Student) -> str:
        """See :class:`Sampler`."""
        return self.load(student).weights_sha256

    def settled(self, student: Student) -> VerifiedSampler:
        """The same sampler with look-ahead and ``draft`` written out."""
        ahead = student.config.row_length if self.max_lookahead is None else self.max_lookahead
        draft: Draft = self.draft or ("greedy" if student.is_conditioned else "gumbel")
        return replace(self, draft=draft if ahead else None, max_lookahead=ahead)

    def check(self, student: Student, tokens: Int[Tensor, "b l"]) -> None:
        """See :class:`Sampler`; also a verifier that does not fit, and noise that was cut off."""
        verifier = self.load(student)
        check_tokens(student, tokens)
        self.stop.check(student, tokens)
        if has_gaps(student, tokens):
            what = "given tokens stand behind positions to fill"
            remedy = "a verifier reads from left to right: give a prompt, or infill with ancestral"
            raise UsageError(what, where="--infill", remedy=remedy)
        one, size = tokens.new_zeros(1), student.config.vocab_size
        require_whole_noise(sampling_noise(0, one, 1, size, codec=student.codec))
        verifier.require_context(tokens.shape[1])

    def read_noise(
        self, student: Student, noise: Noise | None, tokens: Int[Tensor, "b l"], ids: Int[Tensor, "b"], seed: int
    ) -> RowNoise:
        """See :class:`Sampler`; the verifier needs noise whatever the student reads."""
        length, size = tokens.shape[1], student.config.vocab_size
        noise = sampling_noise(seed, ids, length, size) if noise is None else noise
        require_whole_noise(noise.select(slice(0, 1)))
        return RowNoise(noise, length, self.tau)

    def order(self, rows: VerifiedRows) -> Iterator[Pass]:  # type: ignore[override]
        """See :class:`Sampler`: draft, verify, keep what agrees and the first that does not."""
        while len(rows.active):
            yield rows.propose()
            rows.retire()
        rows.finish()

    def choose(
        self, rows: VerifiedRows, part: Pass, log_probs: Float[Tensor, "*n v"]
    ) -> tuple[Places, Int[Tensor, "k"]]:
        """See :class:`Sampler`."""
        return rows.accept(log_probs, part)

    def decide(self, rows: VerifiedRows, logits: Float[Tensor, "n v"], part: Pass) -> Int[Tensor, "n"]:
        """The verifier's tokens."""
        return rows.race(logits, *part.places.index)

    def stays(self, logits: Float[Tensor, "n v"], drafts: Int[Tensor, "n"]) -> Bool[Tensor, "n"] | None:
        """Where a draft may stay; None: where it is the verifier's token."""
        return None


def gumbel_scores(logits: Float[Tensor, "n v"], noise: Noise, tau: float) -> Float[Tensor, "n v"]:
    """l + tau xi in float64, with xi = -log F; the largest is a draw at temperature tau."""
    arrivals = noise.tile(0, noise.vocab_size).to(logits.device)
    return logits.double() - tau * arrivals.double().log()


def require_whole_noise(noise: Noise) -> None:
    """Refuse noise that a codec has cut off: what it left out cannot be found again.

    Raises:
        UsageError: If it is.
    """
    if bool(noise.tile(0, noise.vocab_size).isinf().any()):
        raise UsageError(
            "the student reads noise that its codec cuts off, and the verifier needs all of it",
            where="codec",
            remedy="train on a store of a codec that keeps fresh noise whole: posterior, seeded",
        )


def drafter_of(student: MDLM, condition: EmbeddedNoise | None, num_rows: int) -> WholeRowDrafter:
    """What a student drafts ``num_rows`` rows by.

    Args:
        student: An MDLM or BD3-LM.
        condition: Noise embeddings of the positions to fill; None without noise.
        num_rows: B.
    """
    if isinstance(student, BD3LM) and student.num_blocks > 1:
        return BlockDrafter(student, condition, num_rows)
    return WholeRowDrafter(student, condition)


class WholeRowDrafter:
    """A student as coupled verification, here and in an engine, sees it: an MDLM, which reads the
    whole row, masks and all, as it did in training.
    """

    def __init__(self, student: Any, condition: EmbeddedNoise | None) -> None:
        self.student, self.condition = student, condition

    def reach(self, first: Int[Tensor, "m"]) -> Int[Tensor, "m"]:
        """Where the positions end that one pass predicts; the tokens before ``first`` stand.

        Here the row's end.
        """
        return torch.full_like(first, self.student.config.row_length)

    def log_probs(self, tokens: Int[Tensor, "m l"], where: Bool[Tensor, "m l"]) -> Float[Tensor, "n v"]:
        """Log-probabilities at the n masked positions of ``where``, row-major.

        Args:
            tokens: The rows: known tokens, then the mask id.
            where: Positions from each row's first masked one, within its reach.
        """
        return self.student.predict_at(tokens, where, self.condition)[:, :-1]

    def select(self, rows: Int[Tensor, "m"]) -> None:
        """Go on with some of the rows."""
        self.condition = None if self.condition is None else self.condition[rows]


class BlockDrafter(WholeRowDrafter):
    """A BD3-LM drafts the rest of a row's current block; finished blocks are kept in its cache.

    Rows may be in different blocks. The cache holds the blocks that are finished in all of them; a
    row that is ahead reads its further ones again, and a row that is behind sees nothing of them.
    """

    def __init__(self, student: BD3LM, condition: EmbeddedNoise | None, num_rows: int) -> None:
        super().__init__(student, condition)
        self.cache = student.start_cache(num_rows)

    def reach(self, first: Int[Tensor, "m"]) -> Int[Tensor, "m"]:
        """See :class:`WholeRowDrafter`: the end of the block that ``first`` lies in."""
        size = self.student.block_size
        return (first // size + 1) * size

    def log_probs(self, tokens: Int[Tensor, "m l"], where: Bool[Tensor, "m l"]) -> Float[Tensor, "n v"]:
        """See :class:`WholeRowDrafter`; rows without a position in ``where`` hold the others up."""
        size = self.student.block_size
        block = (tokens == self.student.mask_id).int().argmax(dim=1) // size
        here = slice(int(block.min()) * size, int(block.max() + 1) * size)
        return self.student.predict_after(
            tokens[:, self.cache.length : here.start],
            tokens[:, here],
            where[:, here],
            None if self.condition is None else self.condition[:, here],
            self.cache,
        )[:, :-1]

    def select(self, rows: Int[Tensor, "m"]) -> None:
        """See :class:`WholeRowDrafter`."""
        super().select(rows)
        self.cache = self.cache.select(rows)


class CoupledRows(VerifiedRows):
    """Rows that a student drafts and another model verifies."""

    def start(self) -> None:
        """See :class:`Rows`."""
        super().start()
        self.drafter = drafter_of(self.student, self.condition, len(self.active))

    def reach(self, first: Int[Tensor, "m"]) -> Int[Tensor, "m"]:
        """See :class:`VerifiedRows`."""
        return self.drafter.reach(first)

    def draft(self, tokens: Int[Tensor, "m l"], where: Bool[Tensor, "m l"]) -> Float[Tensor, "n v"]:
        """See :class:`VerifiedRows`."""
        return self.drafter.log_probs(tokens, where)

    def select(self, left: Int[Tensor, "k"]) -> None:
        """See :class:`VerifiedRows`."""
        super().select(left)
        self.drafter.select(left)


@dataclass(frozen=True, kw_only=True)
class CoupledSampler(SecondModel, VerifiedSampler):
    """The verifier's own samples, drafted by a student.

    Settings as in :class:`SecondModel` and :class:`VerifiedSampler`.
    """

    label: ClassVar[str] = "coupled"

    def check(self, student: Student, tokens: Int[Tensor, "b l"]) -> None:
        """See :class:`VerifiedSampler`."""
        check_times(student, False, "use --sampler ancestral")
        check_length(student, tokens)
        if not isinstance(student, MDLM):
            raise UsageError(
                "this student drafts no rows for another model",
                where="sampler",
                got=type(student).__name__,
                expected="an MDLM or BD3-LM student",
                remedy="use --sampler sequential, or medusa for heads on a backbone",
            )
        super().check(student, tokens)

    def start(self, student: Student, tokens: Int[Tensor, "b l"], noise: RowNoise, keys: SampleKeys) -> VerifiedRows:
        """See :class:`Sampler`."""
        return CoupledRows(self, student, tokens, noise, keys)
