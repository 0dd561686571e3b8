"""Coupled verification: exact samples of the verifier, several tokens per pass.

A token of a language model is argmax(l + tau xi): with the noise xi given, decoding is a
deterministic map. The student, which has learnt that map, drafts the next tokens from the noise in
one pass. The verifier reads the draft in one pass and says, at each position, which token *it*
would have taken with the same noise::

    y_i = argmax(l_i + tau xi_i),   l_i its logits behind the tokens before i, drafted or not

The prefix on which draft and y agree is kept, and so is the first y that differs: the tokens before
it are right, so it is right. What comes out is the verifier's own sequential decode of xi, whatever
the student is, and thus an exact sample of the verifier at temperature tau. (Predictive sampling,
Wiggers and Hoogeboom, ICML 2020, with the student in the place of their forecaster.)

Unlike APD there is nothing to trade: a bad student costs passes and changes no token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Int
from torch import Tensor

from shards.base import UsageError
from shards.noise import Noise
from trainer.sampling.rules import NoiseUse, check_rows, require_times, sampling_noise
from trainer.sampling.verified.drafters import Drafter, drafter_of, require_drafter
from trainer.sampling.verified.rows import VerifiedRows, VerifiedSampler, require_whole_noise
from trainer.sampling.verified.verifier import Verifier, load_verifier, require_same_tokenizer
from trainer.students import Student


@dataclass(frozen=True, kw_only=True)
class CoupledConfig(VerifiedSampler):
    """The verifier's own samples, drafted by a student.

    Attributes:
        verifier: Folder or hub id of a causal language model with the student's tokenizer. It
            computes in float32, whatever the student's precision.

    Further settings as in :class:`VerifiedSampler`.
    """

    verifier: str = ""

    label: ClassVar[str] = "coupled"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.verifier:
            raise UsageError(
                "coupled needs a verifier",
                where="--sampler coupled",
                remedy="--verifier FOLDER: the teacher, or any causal language model of the same "
                "tokenizer",
            )

    def check_tokenizer(self, tokenizer: Any) -> None:
        """See :class:`Sampler`."""
        require_same_tokenizer(self.verifier, tokenizer)

    def load(self, student: Student) -> Verifier:
        """The verifier on the student's device; loaded once."""
        return load_verifier(self.verifier, student.config.vocab_size, student.device)

    def check(self, student: Student, tokens: Int[Tensor, "b l"]) -> Student:
        """See :class:`Sampler`; a verifier that does not fit is refused too."""
        require_times(student, False, "use --sampler ancestral")
        check_rows(student, tokens)
        self.stop.check(student, tokens)
        require_drafter(student)
        check_open_end(student, tokens)
        self.load(student).require_context(tokens.shape[1])
        return student

    def rows(
        self, student: Student, tokens: Int[Tensor, "b l"], use: NoiseUse, xi: Noise
    ) -> VerifiedRows:
        """See :class:`VerifiedSampler`."""
        return CoupledRows(self, student, tokens, use, xi)


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
