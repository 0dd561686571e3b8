"""How much goes through a judge at once, by the memory of its device.

On a GPU as many texts as fit, side by side; what did not fit is remembered. On a CPU, whose results
are reproduced bit for bit, one text at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from shards.language_model import BatchSize, in_batches, largest_batch, memory_bytes

MEMORY_SHARE = 0.5
"""Of what the weights leave."""
FLOATS_PER_LOGIT, FLOATS_PER_UNIT = 3, 32
"""Float32 values alive at once for each logit (their log-softmax, a copy) and for each unit of the
hidden state (a block's activations)."""


@dataclass
class Room:
    """What a judge reads at once.

    Attributes:
        side_by_side: Most tokens of several texts, filled up to one length; less for good where
            memory runs out. One text always goes, whatever its length.
        with_logits: Most tokens whose logits are held at once; longer windows are read in parts.
    """

    side_by_side: int
    with_logits: int

    @classmethod
    def on(cls, device: torch.device, num_logits: int, hidden_size: int, weight_bytes: int) -> Room:
        """The room on a device; the same on every machine with the same device."""
        token_bytes = 4 * (FLOATS_PER_LOGIT * num_logits + FLOATS_PER_UNIT * hidden_size)
        free = max(0, memory_bytes(device) - weight_bytes)
        tokens = max(1, int(MEMORY_SHARE * free) // token_bytes)
        tokens = min(tokens, largest_batch(num_logits, device))
        return cls(tokens if device.type == "cuda" else 1, tokens)

    def fill(self, lengths: Sequence[int], context: int, work: Callable[[list[int]], None]) -> None:
        """Do ``work`` on every text, longest first, as many at a time as there is room for.

        Args:
            lengths: Tokens of each text.
            context: Tokens of the longest window.
            work: Given the texts' indices, longest first; done again with half of them where
                memory runs out.

        Raises:
            GdistillError: If a single text does not fit.
        """
        order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
        while order:
            width = max(1, min(lengths[order[0]], context))
            group = order[: max(1, self.side_by_side // width)]
            order = order[len(group) :]
            size = BatchSize(len(group))
            in_batches(_on_members(work, group), len(group), size)
            if size.rows < len(group):
                self.side_by_side = size.rows * width


def _on_members(work: Callable[[list[int]], None], group: list[int]) -> Callable[[slice], None]:
    return lambda part: work(group[part])
