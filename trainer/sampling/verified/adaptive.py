"""Adaptive parallel decoding (APD; Israel, Van den Broeck, Grover, arXiv 2506.00413).

From left to right: the student drafts all tokens ahead in one forward pass, each from its own
marginal p_D; a small autoregressive model scores the draft in one pass. With the same random draw
the target p_T ~ p_D^R p_AR^(1-R) picks a token at each position too; the longest prefix on which
draft and target agree is kept, and at least the first token, which needs no verifier: all tokens
before it are known. R = 1 keeps every draft and so is the student itself, from left to right.

Three settings trade speed for quality: R, how much the student counts; ``max_lookahead``, how many
tokens are drafted, and so how many masks the student sees; ``kv_window``, how many known tokens
the student reads again (keys and values of older ones are kept as they were).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shards.errors import UsageError
from shards.noise.kinds import Noise
from shards.noise.philox import PositionKeys
from trainer.sampling.noise import NoiseUse, check_noise_settings, require_times
from trainer.sampling.revealing import inference
from trainer.sampling.sampler import NoisySampler, check_rows, require_whole_row_student
from trainer.sampling.stopping import SampleResult
from trainer.sampling.token_rule import SampleKeys, position_chunks
from trainer.sampling.verified.verifier import SecondModelSampler, Verifier
from trainer.students.registry import MDLM, Student


@dataclass(frozen=True, kw_only=True)
class AdaptiveConfig(SecondModelSampler, NoisySampler):
    """Left to right, as many tokens per forward pass as a verifier agrees with.

    Attributes:
        mixture_weight: R in [0, 1]: weight of the student in the target; the rest is the
            verifier's.
        max_lookahead: Most tokens drafted at a time; None drafts to the row's end.
        kv_window: Known tokens read again in each pass; None reads all of them.

    Further settings as in :class:`SecondModelSampler` and :class:`NoisySampler`, whose hold for
    draft and target alike.
    """

    mixture_weight: float = 0.7
    max_lookahead: int | None = None
    kv_window: int | None = None

    label: ClassVar[str] = "apd"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.mixture_weight <= 1:
            raise UsageError(
                "bad mixture", where="mixture_weight", got=self.mixture_weight, expected="in [0, 1]"
            )
        for name in ("max_lookahead", "kv_window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError("a count below 1", where=name, got=value, expected="at least 1")

    def check(self, student: Student, tokens: Int[Tensor, "b l"]) -> MDLM:
        """See :class:`Sampler`; a verifier that does not fit is refused too."""
        check_noise_settings(student, self.tau, False)
        check_rows(student, tokens)
        require_times(student, False, "use --sampler ancestral")
        self.load(student).require_context(tokens.shape[1])
        return require_whole_row_student(student, "adaptive")

    def sample(
        self,
        student: Student,
        tokens: Int[Tensor, "b l"],
        sample_ids: Int[Tensor, "b"],
        noise: Noise | None,
        seed: int,
    ) -> SampleResult:
        """See :class:`Sampler`. ``details`` hold ``verifier_nfe``, ``drafted`` and
        ``accepted`` tokens, and their ratio ``acceptance``.
        """
        whole, verifier = self.check(student, tokens), self.load(student)
        use = NoiseUse(noise, self.tau).checked(student, tokens)
        everyone = torch.arange(len(tokens), device=tokens.device)
        # Which keys and values are kept depends on the row, so such rows go one by one.
        groups = everyone.split(len(tokens) if self.kv_window is None else 1)
        with inference(student):
            parts = [
                Rows(
                    self, whole, verifier, tokens[rows], use.of(rows), sample_ids[rows], seed
                ).run()
                for rows in groups
            ]
        counts = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return SampleResult(
            tokens=counts.pop("tokens"),
            nfe=counts.pop("nfe"),
            lengths=torch.full_like(everyone, tokens.shape[1]),
            details={**counts, "acceptance": counts["accepted"] / counts["drafted"].clamp_min(1)},
        )


class Rows:
    """Rows on their way; each has its own frontier, the first position still masked.

    Args:
        config: The sampler.
        student: Drafts.
        verifier: Scores.
        tokens: [B, L] rows as given.
        use: Their noise, checked.
        sample_ids: [B] their indices.
        seed: The user's seed.
    """

    def __init__(
        self,
        config: AdaptiveConfig,
        student: MDLM,
        verifier: Verifier,
        tokens: Int[Tensor, "b l"],
        use: NoiseUse,
        sample_ids: Int[Tensor, "b"],
        seed: int,
    ) -> None:
        self.config, self.student, self.verifier = config, student, verifier
        self.tokens, self.masked = tokens.clone(), tokens == student.mask_id
        self.keys = SampleKeys(seed, sample_ids)
        self.active = self.masked.any(dim=1).nonzero()[:, 0]
        everyone = torch.arange(len(tokens), device=tokens.device)
        self.condition = use.embed(student, self.masked, everyone)
        self.nfe, self.drafted, self.accepted, self.verifier_nfe = torch.zeros(
            4, len(tokens), dtype=torch.int64, device=tokens.device
        )
        self.num_passes = self.advance = 0
        self.cache = student.start_cache(len(tokens)) if config.kv_window is not None else None

    def run(self) -> dict[str, Tensor]:
        """Fill the rows; tokens and counts of each."""
        self.verifier.start()
        ahead, length = self.config.max_lookahead, self.tokens.shape[1]
        place = torch.arange(length, device=self.tokens.device)
        while len(self.active):
            masked = self.masked[self.active]
            first = masked.int().argmax(dim=1)
            stop = (
                torch.full_like(first, length)
                if ahead is None
                else (first + ahead).clamp_max(length)
            )
            visible = (place < stop[:, None])[:, : int(stop.max())]
            where = masked[:, : visible.shape[1]] & visible
            log_probs = self._student_log_probs(where, visible, int(first.min()))
            self._keep_prefix(log_probs, where, first)
            still = self.masked[self.active].any(dim=1).nonzero()[:, 0]
            if len(still) < len(self.active):
                self.active = self.active[still]
                self.verifier.select(still)
        names = ("tokens", "nfe", "verifier_nfe", "drafted", "accepted")
        return {name: getattr(self, name) for name in names}

    def _student_log_probs(
        self, where: Bool[Tensor, "m stop"], visible: Bool[Tensor, "m stop"], first: int
    ) -> Float[Tensor, "n v1"]:
        tokens = self.tokens[self.active, : where.shape[1]]
        condition = self.condition
        if condition is not None:
            condition = condition[self.active, : where.shape[1]]
        if self.cache is None:
            seen = None if bool(visible.all()) else visible
            return self.student.predict_at(tokens, where, condition, visible=seen)
        # Tokens accepted in the last pass were masks in it, so the window begins before them.
        window = self.config.kv_window or 0
        start = max(0, first - window - self.advance + 1) if self.num_passes else 0
        self.cache.length = start
        part = None if condition is None else condition[:, start:]
        return self.student.predict_behind(tokens[:, start:], where[:, start:], part, self.cache)

    def _keep_prefix(
        self,
        log_probs: Float[Tensor, "n v1"],
        where: Bool[Tensor, "m stop"],
        first: Int[Tensor, "m"],
    ) -> None:
        """Draft, verify, and keep each row's tokens before the first disagreement."""
        self.num_passes += 1
        names = self._draw_names(where)
        rows, width = self.tokens[self.active], where.shape[1]
        draft = rows[:, :width].clone()
        draft[where] = self.config.rule.choose(log_probs, names)
        agrees = self._agreement(draft, log_probs, where, first, names)
        kept = where & agrees.cummin(dim=1).values
        rows[:, :width] = torch.where(kept, draft, rows[:, :width])
        self.tokens[self.active] = rows
        self.masked[self.active] = rows == self.student.mask_id
        self.nfe[self.active] += 1
        self.drafted[self.active] += where.sum(dim=1)
        self.accepted[self.active] += kept.sum(dim=1)
        self.advance = int(kept[0].nonzero().max()) + 1 - int(first[0])

    def _agreement(
        self,
        draft: Int[Tensor, "m stop"],
        log_probs: Float[Tensor, "n v1"],
        where: Bool[Tensor, "m stop"],
        first: Int[Tensor, "m"],
        names: PositionKeys,
    ) -> Bool[Tensor, "m stop"]:
        """Where draft and target are the same token; always so at each row's first position."""
        agrees = torch.ones_like(where)
        to_verify = where.sum(dim=1) > 1
        if self.config.mixture_weight == 1 or not bool(to_verify.any()):
            return agrees
        # Behind a row's own draft stand masks, which the verifier does not know or look at.
        known = draft.masked_fill(draft == self.student.mask_id, 0)
        begin = int(first.min())
        verdict = self.verifier.log_probs(known, begin)[where[:, begin:]]
        agrees[where] = self._choose_target(log_probs, verdict, names) == draft[where]
        self.verifier_nfe[self.active] += to_verify
        return agrees.scatter(1, first[:, None], True)

    def _choose_target(
        self, log_probs: Float[Tensor, "n v1"], verdict: Float[Tensor, "n v"], names: PositionKeys
    ) -> Int[Tensor, "n"]:
        weight, rule = self.config.mixture_weight, self.config.rule
        parts = [
            rule.choose(mixture(log_probs[chunk], verdict[chunk], weight), names.select(chunk))
            for chunk in position_chunks(len(log_probs), log_probs.shape[1], log_probs.device)
        ]
        return torch.cat(parts)

    def _draw_names(self, where: Bool[Tensor, "m stop"]) -> PositionKeys:
        """Draft and target of one pass share their draws; every pass has its own."""
        names = self.keys.select(self.active).at("sampling tokens", where)
        return replace(names, draw=self.num_passes)


def mixture(
    student: Float[Tensor, "n v1"], verifier: Float[Tensor, "n v"], weight: float
) -> Float[Tensor, "n v1"]:
    """log p_T = R log p_D + (1 - R) log p_AR, normalised; the mask keeps no probability.

    Args:
        student: Log-probabilities of the student; the last entry is the mask's.
        verifier: Log-probabilities of the verifier.
        weight: R.
    """
    mixed = weight * student[:, :-1].double() + (1 - weight) * verifier.double()
    return torch.nn.functional.pad(mixed.log_softmax(dim=-1), (0, 1), value=-1e6)
