"""Many starting points of one row, packed behind it: where slots stand and what they see.

A call reads tokens and slots together. Keys are w tokens, of which the last m are read now and the
others lie in a cache, and behind them the slots of S starting points, K each::

    keys       cached tokens .. w - m | tokens read now .. w | slots of point 1 | of point 2 | ..
    queries                             0 .. m                 m ..

A token sees the tokens up to itself. Slot k of a point sees the tokens before the point, and slots
1..k of the same point; no token sees a slot. So every point's slots read what they would if nothing
else had been packed, and the tokens' keys and values are those of a row without slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, no_type_check

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trainer.objective import Places

EMPTY = -1
"""Place of a key that holds no token: what lies before the beginning of a shorter row."""


@dataclass(frozen=True)
class SlotLayout:
    """Slots of one call.

    Attributes:
        starts: [B, S] tokens in front of each starting point; its first slot proposes the token at
            that position.
        num_slots: K, slots of a point.
        row_length: L; slots that reach past the row's end propose nothing.
    """

    starts: Int[Tensor, "b s"]
    num_slots: int
    row_length: int

    @property
    def places(self) -> Int[Tensor, "b n"]:
        """The row positions that the n = S K slots propose a token for, point by point."""
        steps = torch.arange(self.num_slots, device=self.starts.device)
        return (self.starts[:, :, None] + steps).flatten(1)

    @property
    def positions(self) -> Int[Tensor, "b n"]:
        """Where the slots stand: from there a causal model would propose the token at ``places``.

        So the first slot of a point stands where the last token before it does.
        """
        return (self.places - 1).clamp(max=self.row_length - 1)

    @property
    def indexable_starts(self) -> Int[Tensor, "b s1"]:
        """``starts``, or a column that belongs to no slot where there are none."""
        return self.starts if self.starts.shape[1] else self.starts.new_zeros(len(self.starts), 1)

    @property
    def prefix_lengths(self) -> Int[Tensor, "b n"]:
        """Tokens in front of each slot's starting point."""
        return self.starts.repeat_interleave(self.num_slots, dim=1)


def states_at(
    states: Float[Tensor, "b t d"], columns: Int[Tensor, "b s"]
) -> Float[Tensor, "b s d"]:
    """The states in these columns."""
    return states.gather(1, columns[..., None].expand(-1, -1, states.shape[-1]))


def proposed_places(
    layout: SlotLayout, tokens: Int[Tensor, "b l"]
) -> tuple[Places, Int[Tensor, "slots"]]:
    """The places that any slot proposes, each once, and which of them is each slot's."""
    proposed = torch.zeros_like(tokens, dtype=torch.bool).scatter(1, layout.places, True)
    where = Places.of(proposed)
    number = torch.zeros_like(tokens).index_put(
        where.index, torch.arange(len(where), device=tokens.device)
    )
    return where, number.gather(1, layout.places).flatten()


# FlexAttention traces this function, and cannot trace run-time type checks.
@no_type_check
def slot_pattern(row, query, key, key_places, starts, num_slots, num_read):
    """Whether a query of ``num_read`` tokens and all slots sees a key; indices that broadcast.

    A token that fills up a row (EMPTY) sees itself, so that it attends to something.
    """
    num_tokens = key_places.shape[1]
    query = query + num_tokens - num_read  # its index among the keys
    key_place = key_places[row, key.clamp(max=num_tokens - 1)]
    query_place = key_places[row, query.clamp(max=num_tokens - 1)]
    slot, other = (query - num_tokens).clamp(min=0), (key - num_tokens).clamp(min=0)
    point = slot // num_slots
    is_known = (key < num_tokens) & (key_place >= 0)
    earlier = is_known & (query < num_tokens) & (key_place <= query_place)
    prefix = is_known & (query >= num_tokens) & (key_place < starts[row, point])
    both = (query >= num_tokens) & (key >= num_tokens)
    together = both & (other // num_slots == point) & (other <= slot)
    return earlier | prefix | together | (key == query)


def slot_mask(
    layout: SlotLayout, key_places: Int[Tensor, "b w"], num_read: int
) -> Bool[Tensor, "b 1 q k"]:
    """The pattern for SDPA, [B, 1, m + n, w + n].

    Args:
        layout: The slots.
        key_places: Row position of every token key, cached ones first; EMPTY where there is none.
        num_read: m, how many of the last token keys are queries too.
    """
    num_new = layout.places.shape[1]
    device = key_places.device
    row = torch.arange(len(key_places), device=device)[:, None, None]
    query = torch.arange(num_read + num_new, device=device)[None, :, None]
    key = torch.arange(key_places.shape[1] + num_new, device=device)[None, None, :]
    starts = layout.indexable_starts
    seen = slot_pattern(row, query, key, key_places, starts, layout.num_slots, num_read)
    return seen[:, None]


def flex_slot_mask(layout: SlotLayout, key_places: Int[Tensor, "b w"], num_read: int) -> Any:
    """The same pattern as a block mask of FlexAttention, which skips what no query sees."""
    from torch.nn.attention.flex_attention import create_block_mask

    starts, num_slots = layout.indexable_starts, layout.num_slots
    num_new = layout.places.shape[1]

    @no_type_check
    def sees(batch, head, query, key):
        return slot_pattern(batch, query, key, key_places, starts, num_slots, num_read)

    return create_block_mask(
        sees,
        len(key_places),
        None,
        num_read + num_new,
        key_places.shape[1] + num_new,
        device=key_places.device,
    )
