"""The loop that all samplers share, and ancestral sampling.

A sampler says in which order positions are predicted (``order``) and how tokens are chosen
(``choose``); the student predicts (``Rows.predict``); ``fill`` is the loop. In ancestral sampling a
token stays masked from t to s with probability p(s) / p(t), independently: over all steps that is
one uniform U per position, which is revealed in the step where p(s) / p(1) falls below U. So the
order is known beforehand, and steps that reveal nothing need no forward pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shards.errors import UsageError
from shards.noise.embedding import Noise
from shards.settings import check_bounds, setting
from trainer.objective.batch import Places, placed
from trainer.objective.corruption import Schedule, law_of, masking_sigma
from trainer.sampling.noise import DEFAULT_TAU, Decision, NucleusRule, RowNoise, SampleKeys, TokenRule
from trainer.sampling.stopping import SampleResult, StopRule
from trainer.students.registry import BD3LM, MDLM, Student

LAST_TIME = 1e-5
MOST_STEPS = 1 << 20
"""More steps than any row has tokens; the times of so many still fit in memory."""
PASSES = f"[1, {MOST_STEPS}]"
POSITIONS_AT_A_TIME, LOG_PROBS_AT_A_TIME = 8000, 8000 * 50_258
"""Most positions that a pass predicts, and most log-probabilities that it holds: 1.6 GB, and their logits twice."""


@dataclass(frozen=True)
class Pass:
    """A forward pass: m rows, each once, and the n places that it predicts in them.

    Attributes:
        places: Places of the batch.
        where: The same places among the m rows.
        steps: The step each row is in, from 1; None where steps have no number.
        rule: How their tokens are chosen; None is the sampler's own.
    """

    rows: Int[Tensor, "m"]
    places: Places
    where: Places
    steps: Int[Tensor, "m"] | None = None
    rule: TokenRule | None = None


class Rows:
    """B rows on their way, and the student that sees them whole; subclasses read them otherwise.

    Attributes:
        tokens: [B, L], filled in place.
        masked: [B, L], what is to be filled.
        active: [m] rows that passes are made of; all, unless a subclass says otherwise.
        columns: Columns that are filled now; likewise.
        nfe: [B] forward passes so far.
        levels: [T + 1] noise level of each step, and of the final fill, for a time-conditioned student.
    """

    def __init__(self, student: Any, tokens: Int[Tensor, "b l"], noise: RowNoise, keys: SampleKeys) -> None:
        self.student, self.noise, self.keys = student, noise, keys
        self.tokens, self.masked = tokens.clone(), tokens == student.mask_id
        self.nfe = torch.zeros_like(tokens[:, 0])
        self.everyone = self.active = torch.arange(len(tokens), device=tokens.device)
        self.columns = slice(0, tokens.shape[1])
        self.details: dict[str, Tensor] = {}
        self.levels: Float[Tensor, "steps1"] | None = None
        self.start()

    @property
    def open(self) -> Bool[Tensor, "m w"]:
        """Where the active rows are masked, of the columns that are filled now."""
        return self.tokens[self.active, self.columns] == self.student.mask_id

    def start(self) -> None:
        """Read what is read once."""
        self.condition = self.noise.embed(self.student, self.masked, self.everyone)

    def set_times(self, times: Float[Tensor, "steps1"]) -> None:
        """Let a time-conditioned student know the times of the steps to come."""
        diffusion = self.student.settings.diffusion
        if diffusion.time_conditioning:
            p = law_of(diffusion).masking_probability(times.float())
            self.levels = masking_sigma(p).to(self.student.device)

    def predict(self, part: Pass) -> Float[Tensor, "n v1"]:
        """Log-probabilities of x_0 at the n places of a pass."""
        condition = None if self.condition is None else self.condition[part.rows]
        return self.student.predict_at(self.tokens[part.rows], part.where, condition, self.level(part))

    def level(self, part: Pass) -> Float[Tensor, "m"] | None:
        return None if self.levels is None or part.steps is None else self.levels[part.steps - 1]


@dataclass(frozen=True, kw_only=True)
class Sampler(ABC):
    """Base of the samplers: what they share and what they offer.

    Attributes:
        nucleus_p: Nucleus truncation of the prediction; 1 is off.
        nucleus_rule: ``strict`` (the authors') or ``crossing`` (transformers').
        top_k: Most probable tokens kept, before the nucleus is taken; None keeps all.
        tau: Scale of the noise; None is 0.85 for a conditioned student and nothing for another.
        stop: Early ends and redraws.
    """

    nucleus_p: float = 1.0
    nucleus_rule: NucleusRule = "strict"
    top_k: int | None = None
    tau: float | None = setting(None, within="(0, inf)")
    stop: StopRule = StopRule()

    label: ClassVar[str]
    rows_type: ClassVar[type[Rows]] = Rows

    def __post_init__(self) -> None:
        check_bounds(self)
        _ = self.rule  # which refuses what it cannot follow

    @property
    def rule(self) -> TokenRule:
        """How tokens are chosen, by those of the rule's settings that this sampler has."""
        names = [field.name for field in fields(TokenRule) if hasattr(self, field.name)]
        return TokenRule(**{name: getattr(self, name) for name in names})

    @property
    def can_stop(self) -> bool:
        """Whether samples may end early or be drawn anew."""
        return self.stop != StopRule()

    def settled(self, student: Student) -> Sampler:
        """The same sampler with what it left to the student written out."""
        return replace(self, tau=DEFAULT_TAU) if student.is_conditioned and self.tau is None else self

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Refuse a tokenizer (None where the student has none) that is not the verifier's."""
        return  # there is no second model

    def verifier_sha256(self, student: Student) -> str | None:
        """Hash of the verifier's weights; None for a sampler without one."""
        return None

    def check(self, student: Student, tokens: Int[Tensor, "b l"]) -> None:
        """Refuse (UsageError) a student that cannot fill these rows by this sampler, and rows that none can."""
        if self.tau and not student.is_conditioned:
            remedy = "leave tau out, or sample a student trained with conditioning"
            raise UsageError("this student takes no noise", where="tau", got=self.tau, remedy=remedy)
        check_tokens(student, tokens)
        if self.can_stop:
            self.stop.check(student, tokens)

    def start(self, student: Student, tokens: Int[Tensor, "b l"], noise: RowNoise, keys: SampleKeys) -> Rows:
        """The rows before the first pass."""
        return self.rows_type(student, tokens, noise, keys)

    @abstractmethod
    def order(self, rows: Rows) -> Iterator[Pass]:
        """The forward passes, each made from the rows as the passes before it left them."""

    def choose(self, rows: Any, part: Pass, log_probs: Float[Tensor, "n v1"]) -> tuple[Places, Int[Tensor, "k"]]:
        """The places that a pass fills, and their tokens; here all that it predicted."""
        keys = rows.keys.at("sampling tokens", part.places)
        return part.places, (part.rule or self.rule).choose(log_probs, keys)

    def read_noise(
        self, student: Student, noise: Noise | None, tokens: Int[Tensor, "b l"], ids: Int[Tensor, "b"], seed: int
    ) -> RowNoise:
        """The noise as the student reads it; one that takes none gets none."""
        if student.is_conditioned and noise is None:
            raise UsageError("a conditioned student needs noise", where="noise", got="none")
        return RowNoise(noise if student.is_conditioned else None, tokens.shape[1], self.tau or DEFAULT_TAU)

    @torch.no_grad()
    def sample(
        self, student: Student, tokens: Int[Tensor, "b l"], sample_ids: Int[Tensor, "b"], noise: Noise | None, seed: int
    ) -> SampleResult:
        """Fill the masked positions of B rows, without dropout.

        Args:
            student: Left in the mode it was in.
            tokens: The mask id where to fill; other tokens are kept. Position 0 is given.
            sample_ids: Index of each sample: with the seed it names all randomness.
            noise: Of B * L positions row by row; None for a student without conditioning.
            seed: The user's seed.

        Raises:
            UsageError: When student, rows, noise and settings do not fit each other.
        """
        self.check(student, tokens)
        use = self.read_noise(student, noise, tokens, sample_ids, seed)
        if use.noise is not None and (got := use.noise.num_positions) != tokens.numel():
            raise UsageError("the noise does not fit the rows", got=f"{got} positions", expected=tokens.numel())
        settled: Any = self.settled(student)

        def draw(rows: Int[Tensor, "m"], attempt: int) -> SampleResult:
            keys = SampleKeys(seed, sample_ids.to(rows.device)[rows], attempt)
            return fill(settled, settled.start(student, tokens[rows], use.of(rows, attempt), keys))

        was_training = student.training
        student.eval()
        try:
            first = draw(torch.arange(len(tokens), device=tokens.device), 0)
            return self.stop.redrawn(first, draw) if self.can_stop else first
        finally:
            student.train(was_training)


def fill(sampler: Sampler, rows: Rows) -> SampleResult:
    """Fill rows: pass by pass the student predicts, and the sampler chooses what to keep."""
    for part in sampler.order(rows):
        places, tokens = sampler.choose(rows, part, rows.predict(part))
        rows.tokens[places.index] = tokens
        rows.nfe[part.rows] += 1
    whole = torch.full_like(rows.nfe, rows.tokens.shape[1])
    result = SampleResult(rows.tokens, rows.nfe, whole, rows.details)
    if not sampler.can_stop:
        return result
    return sampler.stop.judged(result, rows.masked, rows.student.config.eos_token_id)


def check_tokens(student: Student, tokens: Int[Tensor, "b l"]) -> None:
    """Refuse (UsageError) rows whose position 0 is masked, and tokens out of the vocabulary."""
    if bool((tokens[:, 0] == student.mask_id).any()):
        remedy = "begin rows with the bos token or a prompt"
        raise UsageError("position 0 is always given", where="tokens[:, 0]", got="the mask id", remedy=remedy)
    outside = (tokens < 0) | (tokens > student.mask_id)
    if bool(outside.any()):
        row, position = outside.nonzero()[0].tolist()
        where, expected = f"row {row}, position {position}", f"0..{student.mask_id - 1}, or the mask {student.mask_id}"
        raise UsageError("not in the vocabulary", where=where, got=int(tokens[row, position]), expected=expected)


def check_length(student: Student, tokens: Int[Tensor, "b l"]) -> None:
    """Refuse (UsageError) rows longer than the student's."""
    if tokens.shape[1] > (most := student.config.row_length):
        got, remedy = tokens.shape[1], f"at most {most}; only the block sampler goes beyond the trained length"
        raise UsageError("rows longer than the student's", where="length", got=got, remedy=remedy)


def check_times(student: Student, has_times: bool, remedy: str) -> None:
    """Refuse (UsageError) a time-conditioned student where its steps have no time."""
    if student.settings.diffusion.time_conditioning and not has_times:
        raise UsageError("a time-conditioned student must know the time of each step", where="sampler", remedy=remedy)


def require_whole_row_student(student: Student, sampler: str) -> MDLM:
    """The student, if it predicts whole rows at once; a UsageError for block-wise and autoregressive ones."""
    if isinstance(student, MDLM) and not (isinstance(student, BD3LM) and student.num_blocks > 1):
        return student
    what, got = f"the {sampler} sampler fills whole rows", type(student).__name__
    expected, remedy = "an MDLM student", "use --sampler block for block diffusion"
    raise UsageError(what, where="sampler", got=got, expected=expected, remedy=remedy)


@dataclass(frozen=True, kw_only=True)
class DiffusionSampler(Sampler):
    """Base of the samplers that choose tokens by the student's prediction alone.

    Attributes:
        temperature: Divides the log-probabilities; 1 leaves them.
        decision: Draw the revealed tokens (``categorical``), or take the most probable ones.
    """

    temperature: float = 1.0
    decision: Decision = "categorical"

    has_times: ClassVar[bool] = False

    def check(self, student: Student, tokens: Int[Tensor, "b l"]) -> None:
        """See :class:`Sampler`; here for samplers of whole rows."""
        super().check(student, tokens)
        check_times(student, self.has_times, "use --sampler ancestral")
        check_length(student, tokens)
        require_whole_row_student(student, self.label)


@dataclass(frozen=True, kw_only=True)
class AncestralSampler(DiffusionSampler):
    """Ancestral sampling of masked diffusion (Sahoo et al. 2024), with caching.

    T steps at times linspace(1, 1e-5, T + 1). A row whose tokens all stay as they are needs no
    forward pass, so NFE is at most T, and below it when T is large for the row.

    Attributes:
        nfe: T, the most forward passes per sample (but see ``final_argmax``).
        final_argmax: What is masked after T steps (each position with probability p(1e-5) / p(1))
            gets its most probable token in one more pass: the authors' noise removal. False: the
            last step goes to t = 0 and leaves none.

    Further settings as in :class:`DiffusionSampler`.
    """

    nfe: int = setting(128, within=PASSES)
    final_argmax: bool = True

    label: ClassVar[str] = "ancestral"
    has_times: ClassVar[bool] = True

    def order(self, rows: Rows) -> Iterator[Pass]:
        """See :class:`Sampler`."""
        return ancestral_order(rows, ancestral_times(self.nfe, self.final_argmax))


def ancestral_times(num_steps: int, final_argmax: bool) -> Float[Tensor, "steps1"]:
    """t_0 = 1 > ... > t_T, float64, evenly spaced; t_T is 0 where no final fill follows."""
    last = LAST_TIME if final_argmax else 0.0
    return torch.linspace(1, last, num_steps + 1, dtype=torch.float64)


def ancestral_steps(
    uniform: Float[Tensor, "b l"], schedule: Schedule, times: Float[Tensor, "steps1"]
) -> Int[Tensor, "b l"]:
    """The step, 1..T, that reveals a position; T + 1 where none does: U against p(t_k) / p(1), in float64."""
    p = schedule.masking_probability(times)
    survival = placed(torch.where(times > 0, p / p[0], 0.0)[1:], uniform.device)
    return len(times) - torch.searchsorted(survival.flip(0), uniform)


def ancestral_order(rows: Rows, times: Float[Tensor, "steps1"]) -> Iterator[Pass]:
    """Ancestral steps; then the final fill of what is left."""
    rows.set_times(times)
    uniform = rows.keys.uniforms("sampling order", rows.active, rows.columns)
    steps = ancestral_steps(uniform, law_of(rows.student.settings.diffusion), times)
    steps = torch.where(rows.open, steps, 0)
    is_left = steps >= len(times)
    yield from planned(rows, steps.masked_fill(is_left, 0), None)
    yield from planned(rows, torch.where(is_left, steps, 0), TokenRule("argmax"))


def planned(rows: Rows, steps: Int[Tensor, "m w"], rule: TokenRule | None) -> Iterator[Pass]:
    """The passes that reveal every position in its step; 0 is none.

    A row skips the steps that reveal nothing in it, so pass k serves each row's k-th step that
    reveals something. Planned on the host, which waits for a GPU here and in no pass.
    """
    ranks, steps = torch.stack((dense_ranks(steps), steps)).to("cpu")
    for number in range(1, int(ranks.max()) + 1 if ranks.numel() else 0):
        row, column = (ranks == number).nonzero(as_tuple=True)
        some, group, sizes = row.unique_consecutive(return_inverse=True, return_counts=True)
        for part in row_groups(sizes.tolist(), rows.student.mask_id + 1):
            here = slice(int(sizes[: part.start].sum()), int(sizes[: part.stop].sum()))
            first = sizes.cumsum(0)[part] - 1  # a place of each row: its step is that of the others
            listed = torch.stack((row[here], rows.columns.start + column[here], group[here] - part.start))
            rows_here, positions, where = placed(listed, rows.active.device)
            in_pass, step = placed(torch.stack((some[part], steps[row[first], column[first]])), rows.active.device)
            places = Places(rows.active[rows_here], positions)
            yield Pass(rows.active[in_pass], places, Places(where, positions), step, rule)


def row_groups(num_positions: Sequence[int], num_columns: int) -> Iterator[slice]:
    """Consecutive rows whose log-probabilities, V + 1 columns a position, are held together; at least one row."""
    most = min(POSITIONS_AT_A_TIME, LOG_PROBS_AT_A_TIME // num_columns)
    start, total = 0, 0
    for row, count in enumerate(num_positions):
        total += count
        if total > most and row > start:
            yield slice(start, row)
            start, total = row, count
    yield slice(start, len(num_positions))


def dense_ranks(steps: Int[Tensor, "b l"]) -> Int[Tensor, "b l"]:
    """Each row's distinct positive values numbered 1, 2, ... in ascending order; 0 stays 0."""
    ordered, places = steps.sort(dim=1)
    rises = torch.cat((ordered[:, :1] > 0, ordered.diff(dim=1) > 0), dim=1)
    return torch.empty_like(steps).scatter_(1, places, rises.cumsum(dim=1))
