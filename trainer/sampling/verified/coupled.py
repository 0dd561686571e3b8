"""Rows on their way from left to right: draft, verify, keep what agrees and one token more."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shards.errors import UsageError
from shards.noise.kinds import Noise
from trainer.sampling.noise import NoiseUse, require_times, sampling_noise
from trainer.sampling.revealing import inference
from trainer.sampling.sampler import check_rows
from trainer.sampling.stopping import SampleResult, StopRule
from trainer.sampling.token_rule import check_positive, position_chunks
from trainer.sampling.verified.verifier import (
    CausalReader,
    SecondModelSampler,
    Verifier,
    VerifyingSampler,
)
from trainer.students.registry import BD3LM, MDLM, Student


@dataclass(frozen=True, kw_only=True)
class VerifiedSampler(VerifyingSampler):
    """Base of the samplers that draft ahead and let a causal language model verify.

    Attributes:
        max_lookahead: Most tokens drafted at a time; 0 is the verifier alone.
        tau: Temperature of the verifier, which is the scale of the noise that the student sees.
        draft: ``map`` takes the student's most probable tokens; ``race`` adds tau xi to its
            log-probabilities first. None is ``map`` for a student that reads noise, else ``race``.
        stop: Early ends and redraws.
    """

    max_lookahead: int = 8
    tau: float = 1.0
    draft: Literal["map", "race"] | None = None
    stop: StopRule = StopRule()

    def __post_init__(self) -> None:
        check_positive(tau=self.tau)
        if (self.max_lookahead or 0) < 0:  # None where a subclass allows it
            raise UsageError("a count below 0", where="max_lookahead", got=self.max_lookahead)

    def settled(self, student: Student) -> VerifiedSampler:
        """The same sampler with ``draft`` written out."""
        if self.draft is not None:
            return self
        return replace(self, draft="map" if student.is_conditioned else "race")

    @property
    @abstractmethod
    def rows(self) -> type[VerifiedRows]:
        """What fills the rows."""

    @property
    def seen_tau(self) -> float:
        """Scale of the noise that the student is shown."""
        return self.tau

    def sample(
        self,
        student: Student,
        tokens: Int[Tensor, "b l"],
        sample_ids: Int[Tensor, "b"],
        noise: Noise | None,
        seed: int,
    ) -> SampleResult:
        """See :class:`Sampler`.

        ``nfe`` counts the student's passes. ``details`` hold the verifier's, ``verifier_nfe``, and
        by distance from the accepted prefix (0 is the token right behind it) how many tokens were
        ``drafted``, how many of them ``agreed`` with the token that the row has there in the end,
        how many were ``reached`` (all before them agreed) and how many of those ``accepted``.
        """
        self.check(student, tokens)
        size = student.config.vocab_size
        if noise is None:
            noise = sampling_noise(seed, sample_ids, tokens.shape[1], size)
        require_whole_noise(noise.select(slice(0, 1)))
        settled: Any = self.settled(student)
        seen = NoiseUse(noise, self.seen_tau).checked(student, tokens)
        xi = NoiseUse(noise, self.tau, length=tokens.shape[1])

        def draw(rows: Int[Tensor, "m"], attempt: int) -> SampleResult:
            use, same = seen.of(rows, attempt), xi.of(rows, attempt).noise
            assert same is not None
            return settled.rows(settled, student, tokens[rows], use, same).run()

        with inference(student):
            return self.stop.draw(draw, len(tokens), tokens.device)


class VerifiedRows(ABC):
    """Rows on their way; ``first`` is each one's first position that is not settled.

    Args:
        config: The sampler, settled.
        student: Drafts.
        tokens: [B, L] rows as given: a prefix, then the mask id.
        use: The noise as the student sees it.
        xi: The same noise of B * L positions, as the verifier's logits meet it.
    """

    def __init__(
        self,
        config: VerifiedSampler,
        student: Student,
        tokens: Int[Tensor, "b l"],
        use: NoiseUse,
        xi: Noise,
    ) -> None:
        self.config, self.student, self.xi = config, student, xi
        self.tokens, masked = tokens.clone(), tokens == student.mask_id
        self.filled = masked
        self.first = (~masked).sum(dim=1)
        self.active = masked.any(dim=1).nonzero()[:, 0]
        self.reader = self._reader(config.load(student))
        self.drafter = self._drafter(use)
        self.lengths = torch.full_like(self.first, tokens.shape[1])
        self.nfe, self.verifier_nfe = torch.zeros(
            2, len(tokens), dtype=torch.int64, device=tokens.device
        )
        self.agreement = Agreement(len(tokens), config.max_lookahead, tokens.device)

    def _reader(self, verifier: Verifier) -> CausalReader:
        """What reads the active rows."""
        size, device = verifier.vocab_size, self.tokens.device
        return CausalReader(verifier.model, size, len(self.active), device)

    @abstractmethod
    def _drafter(self, use: NoiseUse) -> Drafter:
        """What drafts the active rows."""

    def run(self) -> SampleResult:
        """Fill the rows."""
        while len(self.active):
            self._advance()
        lengths, stop = self.lengths, self.config.stop
        details = {
            "verifier_nfe": self.verifier_nfe,
            **self.agreement.counts(self.tokens),
            **stop.details(self.tokens, lengths),
        }
        return SampleResult(self.tokens, self.nfe, lengths, details)

    def _advance(self) -> None:
        """One round: draft, verify, keep what agrees and the first token that does not."""
        first, length = self.first[self.active], self.tokens.shape[1]
        stops = torch.minimum(self.drafter.reach(first), first + self.config.max_lookahead)
        stops = stops.clamp_max(length - 1)  # the last token is never drafted: y comes as well
        drafted = self._draft(first, stops)
        width = int((stops - first).max()) + 1
        logits = self._verifier_logits(drafted, stops, width)
        places = stops[:, None] - width + 1 + torch.arange(width, device=stops.device)
        unsettled = places >= first[:, None]
        drafts = drafted.gather(1, places.clamp_min(0))
        verdict = self._verdict(logits, places, unsettled)
        agrees = self._agrees(logits, drafts, verdict)
        verdict = torch.where(agrees, drafts, verdict)
        agrees = (agrees | ~unsettled) & (places < stops[:, None])
        kept = agrees.cumprod(dim=1).bool()
        taken = torch.cat((torch.ones_like(kept[:, :1]), kept[:, :-1]), dim=1) & unsettled
        self.agreement.add(self.active, first, drafted, stops, (kept & unsettled).sum(dim=1))
        self._tell_drafter(taken)
        self._settle(verdict, places, taken)

    def _draft(self, first: Int[Tensor, "m"], stops: Int[Tensor, "m"]) -> Int[Tensor, "m l"]:
        """The active rows with the student's tokens at ``first`` .. ``stops`` - 1."""
        tokens = self.tokens[self.active]
        place = torch.arange(tokens.shape[1], device=tokens.device)
        where = (place >= first[:, None]) & (place < stops[:, None])
        if bool(where.any()):
            log_probs = self.drafter.log_probs(tokens, where)
            if self.config.draft == "race":
                rows, columns = where.nonzero(as_tuple=True)
                tokens[where] = self._race(log_probs, self.active[rows], columns)
            else:
                tokens[where] = log_probs.argmax(dim=-1)
            self.nfe[self.active] += where.any(dim=1)
        return tokens

    def _verifier_logits(
        self, drafted: Int[Tensor, "m l"], stops: Int[Tensor, "m"], width: int
    ) -> Float[Tensor, "m width v"]:
        self.verifier_nfe[self.active] += 1
        with torch.autocast(drafted.device.type, enabled=False):
            return self.reader.next_logits(drafted, stops, width)

    def _verdict(
        self,
        logits: Float[Tensor, "m width v"],
        places: Int[Tensor, "m width"],
        unsettled: Bool[Tensor, "m width"],
    ) -> Int[Tensor, "m width"]:
        """y where a position is unsettled, 0 elsewhere."""
        verdict = torch.zeros_like(places)
        rows = self.active[unsettled.nonzero()[:, 0]]
        verdict[unsettled] = self._decide(logits[unsettled], rows, places[unsettled])
        return verdict

    def _decide(
        self, logits: Float[Tensor, "n v"], rows: Int[Tensor, "n"], places: Int[Tensor, "n"]
    ) -> Int[Tensor, "n"]:
        """The verifier's tokens at some positions."""
        return self._race(logits, rows, places)

    def _agrees(
        self,
        logits: Float[Tensor, "m width v"],
        drafts: Int[Tensor, "m width"],
        verdict: Int[Tensor, "m width"],
    ) -> Bool[Tensor, "m width"]:
        """Where a draft may stay."""
        return verdict == drafts

    def _tell_drafter(self, taken: Bool[Tensor, "m width"]) -> None:
        """Let the drafter know which of the verifier's tokens are taken."""
        return  # who reads the rows sees them there

    def _race(
        self, logits: Float[Tensor, "n v"], rows: Int[Tensor, "n"], places: Int[Tensor, "n"]
    ) -> Int[Tensor, "n"]:
        """argmax(l + tau xi) at some positions."""
        index = (rows * self.tokens.shape[1] + places).to(self.xi.device)
        parts = [
            gumbel_scores(logits[chunk], self.xi.select(index[chunk]), self.config.tau).argmax(-1)
            for chunk in position_chunks(len(logits), logits.shape[1], logits.device)
        ]
        return torch.cat(parts)

    def _settle(
        self,
        verdict: Int[Tensor, "m width"],
        places: Int[Tensor, "m width"],
        taken: Bool[Tensor, "m width"],
    ) -> None:
        """Write the taken tokens; rows that are full or have ended leave."""
        eos, rows = self.student.config.eos_token_id, taken.nonzero()[:, 0]
        self.tokens[self.active[rows], places[taken]] = verdict[taken]
        first = self.first[self.active] + taken.sum(dim=1)
        self.first[self.active] = first
        is_done = first >= self.tokens.shape[1]
        if self.config.stop.at_eos and eos is not None:
            lengths = self.config.stop.ends(self.tokens[self.active], self.filled[self.active], eos)
            has_ended = lengths < self.tokens.shape[1]
            self.lengths[self.active] = lengths
            self.tokens[self.active] = _eos_behind(
                self.tokens[self.active], lengths, has_ended, eos
            )
            is_done |= has_ended
        self.reader.keep(first - 1)
        left = (~is_done).nonzero()[:, 0]
        if len(left) < len(self.active):
            self.active = self.active[left]
            self.reader.select(left)
            self.drafter.select(left)


class Agreement:
    """Counts of drafted tokens by their distance from the accepted prefix."""

    def __init__(self, num_rows: int, max_lookahead: int, device: torch.device) -> None:
        shape = (num_rows, max_lookahead)
        self.reached, self.accepted = torch.zeros(2, *shape, dtype=torch.int64, device=device)
        self.rounds: list[tuple[Tensor, Tensor, Tensor]] = []
        self.distances = torch.arange(max_lookahead, device=device)

    def add(
        self,
        rows: Int[Tensor, "m"],
        first: Int[Tensor, "m"],
        drafted: Int[Tensor, "m l"],
        stops: Int[Tensor, "m"],
        num_accepted: Int[Tensor, "m"],
    ) -> None:
        """One round's drafts at ``first`` .. ``stops`` - 1, of which a prefix was accepted."""
        is_drafted = self.distances < (stops - first)[:, None]
        self.accepted[rows] += self.distances < num_accepted[:, None]
        self.reached[rows] += (self.distances <= num_accepted[:, None]) & is_drafted
        places = torch.where(is_drafted, first[:, None] + self.distances, -1)
        drafts = drafted.gather(1, places.clamp_min(0))
        self.rounds.append((rows, places, drafts))

    def counts(self, tokens: Int[Tensor, "b l"]) -> dict[str, Tensor]:
        """[B, K] counts, now that the rows' tokens are known."""
        drafted, agreed = torch.zeros_like(self.reached), torch.zeros_like(self.reached)
        for rows, places, drafts in self.rounds:
            final = tokens[rows].gather(1, places.clamp_min(0))
            drafted[rows] += places >= 0
            agreed[rows] += (places >= 0) & (drafts == final)
        return {
            "drafted": drafted,
            "agreed": agreed,
            "reached": self.reached,
            "accepted": self.accepted,
        }


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


def _eos_behind(
    tokens: Int[Tensor, "m l"],
    lengths: Int[Tensor, "m"],
    has_ended: Bool[Tensor, "m"],
    eos: int,
) -> Int[Tensor, "m l"]:
    """Rows that have ended hold eos behind their end."""
    place = torch.arange(tokens.shape[1], device=tokens.device)
    behind = has_ended[:, None] & (place >= lengths[:, None])
    return tokens.masked_fill(behind, eos)


# Drafts of the next tokens of rows of different lengths, each kind of student in its own way.


@runtime_checkable
class Drafter(Protocol):
    """A student as coupled verification sees it."""

    def reach(self, first: Int[Tensor, "m"]) -> Int[Tensor, "m"]:
        """Where the positions end that one pass predicts when the tokens before ``first`` stand."""
        ...

    def log_probs(
        self, tokens: Int[Tensor, "m l"], where: Bool[Tensor, "m l"]
    ) -> Float[Tensor, "n v"]:
        """Log-probabilities at the n masked positions of ``where``, row-major.

        Args:
            tokens: The rows: known tokens, then the mask id.
            where: Positions from each row's first masked one, within its reach.
        """
        ...

    def select(self, rows: Int[Tensor, "m"]) -> None:
        """Go on with some of the rows."""
        ...


class WholeRowDrafter:
    """An MDLM reads the whole row, masks and all, as it did in training.

    Args:
        student: The model.
        condition: Noise embeddings of the positions to fill; None without noise.
    """

    def __init__(self, student: MDLM, condition: Float[Tensor, "b l d"] | None) -> None:
        self.student, self.condition = student, condition

    def reach(self, first: Int[Tensor, "m"]) -> Int[Tensor, "m"]:
        """The row's end."""
        return torch.full_like(first, self.student.config.row_length)

    def log_probs(
        self, tokens: Int[Tensor, "m l"], where: Bool[Tensor, "m l"]
    ) -> Float[Tensor, "n v"]:
        """See :class:`Drafter`."""
        return self.student.predict_at(tokens, where, self.condition)[:, :-1]

    def select(self, rows: Int[Tensor, "m"]) -> None:
        """See :class:`Drafter`."""
        self.condition = None if self.condition is None else self.condition[rows]


class BlockDrafter:
    """A BD3-LM drafts the rest of a row's current block; finished blocks are kept in its cache.

    Rows may be in different blocks. The cache holds the blocks that are finished in all of them; a
    row that is ahead reads its further ones again, and a row that is behind sees nothing of them.

    Args:
        student: The model.
        condition: Noise embeddings of the positions to fill; None without noise.
        num_rows: B.
    """

    def __init__(
        self, student: BD3LM, condition: Float[Tensor, "b l d"] | None, num_rows: int
    ) -> None:
        self.student, self.condition = student, condition
        self.cache = student.start_cache(num_rows)

    def reach(self, first: Int[Tensor, "m"]) -> Int[Tensor, "m"]:
        """The end of the block that ``first`` lies in."""
        size = self.student.block_size
        return (first // size + 1) * size

    def log_probs(
        self, tokens: Int[Tensor, "m l"], where: Bool[Tensor, "m l"]
    ) -> Float[Tensor, "n v"]:
        """See :class:`Drafter`; rows without a position in ``where`` hold the others up."""
        size = self.student.block_size
        masked = tokens == self.student.mask_id
        block = masked.int().argmax(dim=1) // size
        known, start, stop = self.cache.length, int(block.min()) * size, int(block.max() + 1) * size
        return self.student.predict_after(
            tokens[:, known:start],
            tokens[:, start:stop],
            where[:, start:stop],
            None if self.condition is None else self.condition[:, start:stop],
            self.cache,
        )[:, :-1]

    def select(self, rows: Int[Tensor, "m"]) -> None:
        """See :class:`Drafter`."""
        self.cache = self.cache.select(rows)
        self.condition = None if self.condition is None else self.condition[rows]


def require_drafter(student: Student) -> MDLM:
    """The student, if it can draft.

    Raises:
        UsageError: For an autoregressive student, or one that must be told the time.
    """
    if not isinstance(student, MDLM):
        raise UsageError(
            "this student drafts no rows for another model",
            where="sampler",
            got=type(student).__name__,
            expected="an MDLM or BD3-LM student",
            remedy="use --sampler sequential, or medusa for heads on a backbone",
        )
    return student


def drafter_of(student: MDLM, condition: Float[Tensor, "b l d"] | None, num_rows: int) -> Drafter:
    """The student's way of drafting ``num_rows`` rows."""
    if isinstance(student, BD3LM) and student.num_blocks > 1:
        return BlockDrafter(student, condition, num_rows)
    return WholeRowDrafter(student, condition)


# Coupled verification: exact samples of the verifier, several tokens per pass.
#
# A token of a language model is argmax(l + tau xi): with the noise xi given, decoding is a
# deterministic map. The student, which has learnt that map, drafts the next tokens from the noise
# in one pass. The verifier reads the draft in one pass and says, at each position, which token *it*
# would have taken with the same noise::
#
#     y_i = argmax(l_i + tau xi_i),   l_i its logits behind the tokens before i, drafted or not
#
# The prefix on which draft and y agree is kept, and so is the first y that differs: the tokens
# before it are right, so it is right. What comes out is the verifier's own sequential decode of xi,
# whatever the student is, and thus an exact sample of the verifier at temperature tau. (Predictive
# sampling, Wiggers and Hoogeboom, ICML 2020, with the student in the place of their forecaster.)
#
# Unlike APD there is nothing to trade: a bad student costs passes and changes no token.


@dataclass(frozen=True, kw_only=True)
class CoupledConfig(SecondModelSampler, VerifiedSampler):
    """The verifier's own samples, drafted by a student.

    Settings as in :class:`SecondModelSampler` and :class:`VerifiedSampler`.
    """

    label: ClassVar[str] = "coupled"

    def check(self, student: Student, tokens: Int[Tensor, "b l"]) -> Student:
        """See :class:`Sampler`; a verifier that does not fit is refused too."""
        require_times(student, False, "use --sampler ancestral")
        check_rows(student, tokens)
        self.stop.check(student, tokens)
        require_drafter(student)
        check_open_end(student, tokens)
        self.load(student).require_context(tokens.shape[1])
        return student

    @property
    def rows(self) -> type[VerifiedRows]:
        """See :class:`VerifiedSampler`."""
        return CoupledRows


class CoupledRows(VerifiedRows):
    """Rows that a student drafts and another model verifies."""

    def _drafter(self, use: NoiseUse) -> Drafter:
        condition = use.embed(self.student, self.filled[self.active], self.active)
        return drafter_of(require_drafter(self.student), condition, len(self.active))


def check_open_end(student: Student, tokens: Int[Tensor, "b l"]) -> None:
    """Refuse rows that are not a prefix and open positions, and noise that was cut off.

    Raises:
        UsageError: Naming what cannot be verified.
    """
    masked = tokens == student.mask_id
    if bool((masked[:, :-1] & ~masked[:, 1:]).any()):
        raise UsageError(
            "given tokens stand behind positions to fill",
            where="--infill",
            remedy="a verifier reads from left to right: give a prompt, or infill with ancestral",
        )
    one, size = tokens.new_zeros(1), student.config.vocab_size
    require_whole_noise(sampling_noise(0, one, 1, size, codec=student.codec))
