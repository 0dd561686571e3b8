"""A causal language model reading rows of different lengths together, each token once.

The cache is right-aligned: the last known token of every row lies in the last slot, and the empty
slots in front of shorter rows are hidden by the attention mask. That is transformers' left padding,
so a model reads each row as if it stood alone, sliding windows and all. Tokens that were read in
vain are forgotten by moving the rows back into line::

    slots       0 1 2 3 4 | 5 6 7            keep 4 and 7 tokens      0 1 2 3 4 5 6
    row 0       . . a b c | d x y    ->                               . . . a b c d
    row 1       a b c d e | f g x                                     a b c d e f g
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


class CausalReader:
    """Next-token logits of B growing rows.

    Args:
        model: A causal language model of transformers; one without a key/value cache reads every
            row from its beginning each time.
        vocab_size: V, the logits that belong to tokens.
        num_rows: B.
        device: Of the model.

    Attributes:
        num_passes: Forward passes made.
        lengths: [B] tokens of each row whose keys and values are kept.
        keeps_hidden: Whether ``hidden`` is wanted.
        hidden: [B, n, D] of the last pass: what the output layer saw in each column of its logits.
    """

    def __init__(
        self, model: Any, vocab_size: int, num_rows: int, device: torch.device | str
    ) -> None:
        self.model, self.vocab_size = model, vocab_size
        self.lengths = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.num_passes = 0
        self.keeps_hidden = False
        self.hidden: Tensor | None = None
        accepted = inspect.signature(model.forward).parameters
        self.accepted = accepted.keys() & {"position_ids", "logits_to_keep"}
        self.cache = DynamicCache() if "past_key_values" in accepted else None

    @torch.no_grad()
    def next_logits(
        self, tokens: Int[Tensor, "b l"], stops: Int[Tensor, "b"], num_last: int
    ) -> Float[Tensor, "b n v"]:
        """Logits of the token behind each of the last ``num_last`` tokens of every row, float32.

        The last column is about position ``stops[b]`` of row b. All rows have that many tokens to
        look back on, or what stands in front of them is without meaning.

        Args:
            tokens: The rows from their beginning; every token before ``stops`` is known. Those
                within ``lengths`` must be the tokens that were read.
            stops: [B] tokens to read, at least one more than ``lengths``.
            num_last: Columns of the result.
        """
        self.num_passes += 1
        if self.cache is None:
            return self._read_from_the_start(tokens, stops, num_last)
        counts = stops - self.lengths
        width, new = int(self.lengths.max()), int(counts.max())
        places = stops[:, None] - new + torch.arange(new, device=tokens.device)
        is_new = places >= self.lengths[:, None]
        places = torch.where(is_new, places, 0)
        options = {"position_ids": places, "logits_to_keep": num_last}
        logits, hidden = self._run(
            input_ids=tokens.gather(1, places),
            attention_mask=torch.cat((self._is_known(width), is_new), dim=1).long(),
            past_key_values=self.cache,
            use_cache=True,
            **{name: options[name] for name in self.accepted},
        )
        if not _holds(self.cache, width + new):  # a recurrent model, or one with a cache of its own
            self.cache = None
            self.lengths.zero_()
            return self._read_from_the_start(tokens, stops, num_last)
        self._realign(width, new, counts)
        self.hidden = None if hidden is None else hidden[:, -num_last:]
        return logits[:, -num_last:, : self.vocab_size].float()

    def _run(self, **inputs: Any) -> tuple[Tensor, Tensor | None]:
        """Logits, and what the output layer saw where that is wanted."""
        if not self.keeps_hidden:
            return self.model(**inputs).logits, None
        seen: list[Tensor] = []
        layer = self.model.get_output_embeddings()
        handle = layer.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
        try:
            return self.model(**inputs).logits, seen[0]
        finally:
            handle.remove()

    def _read_from_the_start(
        self, tokens: Tensor, stops: Tensor, num_last: int
    ) -> Float[Tensor, "b n v"]:
        """What stands behind a row's tokens is read too, and seen by none of them."""
        longest = int(stops.max())
        rows = tokens[:, :longest].clamp(max=self.vocab_size - 1)
        logits, hidden = self._run(input_ids=rows)
        places = stops[:, None] - num_last + torch.arange(num_last, device=tokens.device)
        everyone = torch.arange(len(rows), device=tokens.device)[:, None]
        index = everyone, places.clamp_min(0)
        self.hidden = None if hidden is None else hidden[index]
        return logits[index][..., : self.vocab_size].float()

    def _is_known(self, width: int) -> Bool[Tensor, "b width"]:
        slots = torch.arange(width, device=self.lengths.device)
        return slots >= width - self.lengths[:, None]

    def _realign(self, width: int, new: int, counts: Int[Tensor, "b"]) -> None:
        """After a pass: each row's ``counts`` tokens lie at the end; close the gaps before them."""
        lengths = self.lengths + counts
        slots = torch.arange(int(lengths.max()), device=lengths.device) - int(lengths.max())
        # Counted from the end, the new tokens are where they belong, and older ones further left.
        gap = new - counts
        source = slots - torch.where(-slots > counts[:, None], gap[:, None], 0)
        self._take(source + width + new, width + new)
        self.lengths = lengths

    def keep(self, lengths: Int[Tensor, "b"]) -> None:
        """Forget the tokens of each row behind its first ``lengths[b]`` ones."""
        if self.cache is None:
            return
        width = int(self.lengths.max())
        lost = self.lengths - lengths
        slots = torch.arange(-int(lengths.max()), 0, device=lengths.device)
        self._take(slots - lost[:, None] + width, width)
        self.lengths = lengths

    def select(self, rows: Int[Tensor, "m"]) -> None:
        """Go on with some of the rows; slots that are empty in all of them are given up."""
        before, self.lengths = int(self.lengths.max()), self.lengths[rows]
        if self.cache is not None and len(rows):
            self.cache.batch_select_indices(rows)
            slots = torch.arange(before - int(self.lengths.max()), before, device=rows.device)
            self._take(slots.expand(len(rows), -1), before)

    def _take(self, source: Int[Tensor, "b width"], before: int) -> None:
        """Slots of the cache from other slots; negative sources stand for empty slots."""
        assert self.cache is not None
        width = source.shape[1]
        if bool((source == torch.arange(width, device=source.device)).all()):
            self.cache.crop(width - before)
            return
        index = source.clamp_min(0)[:, None, :, None]
        for layer in self.cache.layers:
            for name in ("keys", "values"):
                memory = getattr(layer, name)
                wide = index.expand(-1, memory.shape[1], -1, memory.shape[-1])
                setattr(layer, name, memory.gather(2, wide))


def _holds(cache: DynamicCache, num_slots: int) -> bool:
    """Whether a cache keeps every slot as it was written."""
    plain = all(type(layer) is DynamicLayer for layer in cache.layers)
    return bool(cache.layers) and plain and cache.get_seq_length() == num_slots
