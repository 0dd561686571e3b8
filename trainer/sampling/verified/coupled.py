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
from typing import ClassVar

from jaxtyping import Int
from torch import Tensor

from shards.base import UsageError
from trainer.sampling.rules import NoiseUse, check_rows, require_times, sampling_noise
from trainer.sampling.verified.drafters import Drafter, drafter_of, require_drafter
from trainer.sampling.verified.rows import VerifiedRows, VerifiedSampler, require_whole_noise
from trainer.sampling.verified.verifier import SecondModelSampler
from trainer.students import Student


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
