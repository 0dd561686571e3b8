"""What the samplers share whose student drafts for the backbone that it stands on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal

from jaxtyping import Int
from torch import Tensor

from shards.base import UsageError
from trainer.sampling.rules import check_tokens
from trainer.sampling.verified.coupled import check_open_end
from trainer.sampling.verified.rows import VerifiedSampler
from trainer.sampling.verified.verifier import Verifier, hash_of_weights
from trainer.students import ADAPTER, BackboneStudent, Student


@dataclass(frozen=True, kw_only=True)
class OwnBackboneSampler(VerifiedSampler):
    """Base of the samplers that need no model beside the student.

    Attributes:
        max_lookahead: Most tokens proposed at a time; None is as many as the student proposes.
    """

    max_lookahead: int | None = None  # type: ignore[assignment]

    student_class: ClassVar[type[BackboneStudent]]
    student_in_words: ClassVar[str]

    def settled(self, student: Student) -> OwnBackboneSampler:
        """The same sampler with look-ahead and ``draft`` written out."""
        able = self.require(student)
        most = able.settings.num_proposed
        ahead = most if self.max_lookahead is None else min(self.max_lookahead, most)
        return replace(self, draft=self.draft or self.best_draft(able), max_lookahead=ahead)

    def best_draft(self, student: BackboneStudent) -> Literal["map", "race"]:
        """What ``draft`` is when it is left to the student."""
        return "map" if student.sees_own_noise else "race"

    def load(self, student: Student) -> Verifier:
        """The student's own backbone."""
        backbone = self.require(student).language_model
        return OwnVerifier(backbone.network, backbone.vocab_size, backbone.context_length)

    def check(self, student: Student, tokens: Int[Tensor, "b l"]) -> Student:
        """See :class:`Sampler`; rows may be as long as the backbone reads."""
        verifier = self.load(student)
        check_tokens(student, tokens)
        self.stop.check(student, tokens)
        check_open_end(student, tokens)
        verifier.require_context(tokens.shape[1])
        return student

    def require(self, student: Student) -> BackboneStudent:
        """The student, if it is of the sampler's kind.

        Raises:
            UsageError: If not.
        """
        if not isinstance(student, self.student_class):
            raise UsageError(
                f"the {self.label} sampler needs {self.student_in_words}",
                where="sampler",
                got=type(student).__name__,
                expected=f"a {self.student_class.__name__} student",
                remedy="use --sampler coupled with --verifier",
            )
        return student


class OwnVerifier(Verifier):
    """The student's backbone, known by its weights without the adapters beside them."""

    @cached_property
    def weights_sha256(self) -> str:
        """See :class:`Verifier`."""
        return hash_of_weights(
            {
                name.replace(".base_layer.", "."): value
                for name, value in self.model.state_dict().items()
                if f".{ADAPTER}." not in name
            }
        )
