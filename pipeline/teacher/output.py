"""What a forward pass leaves: logits, their log-softmax, and whether it can be used."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from shards.base import GdistillError
from shards.codec import TeacherOutput


@dataclass(frozen=True)
class RawLogits:
    """What one forward pass leaves on the device, not yet normalised.

    Attributes:
        logits: [B, T, >= V], float32.
        tokens: [B, T] the scored tokens.
        row_ids: [B].
        hidden: [B, T, D] input of the LM head, if asked for.
    """

    logits: Float[Tensor, "b t w"]
    tokens: Int[Tensor, "b t"]
    row_ids: Int[Tensor, "b"]
    hidden: Float[Tensor, "b t d"] | None

    def rows(self, part: slice) -> RawLogits:
        """Some of the rows."""
        hidden = None if self.hidden is None else self.hidden[part]
        return RawLogits(self.logits[part], self.tokens[part], self.row_ids[part], hidden)

    def normalise(self, vocab_size: int, buffer: Tensor | None = None) -> TeacherOutput:
        """Log-softmax over the V real tokens, in float32 on centred logits (max 0).

        Args:
            vocab_size: V.
            buffer: Float32 memory for the result, of at least as many elements; new if not given.
        """
        real = self.logits[..., :vocab_size]
        if buffer is None:
            log_probs = real.log_softmax(-1, dtype=torch.float32)
        else:
            place = buffer[: real.numel()].view(real.shape)
            log_probs = torch.log_softmax(real, -1, dtype=torch.float32, out=place)
        return TeacherOutput(log_probs, self.tokens, self.row_ids, self.hidden)


def check_output(output: TeacherOutput, split: str = "") -> None:
    """Refuse log-probabilities of tokens that are not finite.

    A NaN or +inf anywhere in a position's logits makes its normaliser, and so this number, NaN or
    infinite; so does -inf at the token itself. -inf elsewhere is a probability of zero, and legal.

    Raises:
        GdistillError: Names row and position.
    """
    picked = output.token_log_probs.cpu()
    bad = ~torch.isfinite(picked)
    if bad.any():
        row, position = (int(index) for index in bad.nonzero()[0])
        raise GdistillError(
            "the teacher gave NaN or infinite logits",
            where=f"{split} row {int(output.rows[row])}, position {position + 1}".strip(),
            got=f"log-probability {float(picked[row, position])} of token "
            f"{int(output.tokens[row, position])}",
            expected="a finite number",
            remedy="try --dtype float32; is the row text that the teacher can score?",
        )


def rows_tensor(rows: np.ndarray) -> Int[Tensor, "b l"]:
    """Token rows as the teacher takes them: int64."""
    return torch.from_numpy(rows.astype(np.int64))
