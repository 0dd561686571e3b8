"""The drafter's backbone reading tokens and slots of rows of different lengths in one call.

Tokens are read as :class:`CausalReader` reads them, each once, and slots behind them; what the
slots leave in the cache is forgotten at once, so the cache holds the backbone's own keys and values
and nothing else, whether a call had slots or not.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache

from trainer.sampling.verified.reader import CausalReader
from trainer.students import EMPTY, Drafter, SlotLayout, states_at


class SlotReader(CausalReader):
    """Next-token logits of B growing rows, and logits of slots behind them.

    Args:
        student: Gives backbone, adapters and slots.
        num_rows: B.
    """

    def __init__(self, student: Drafter, num_rows: int) -> None:
        backbone = student.language_model
        super().__init__(backbone.network, backbone.vocab_size, num_rows, student.device)
        self.student, self.cache = student, DynamicCache()

    @torch.no_grad()
    def read(
        self,
        tokens: Int[Tensor, "b l"],
        stops: Int[Tensor, "b"],
        num_last: int,
        starts: Int[Tensor, "b p"],
        noise_table: Float[Tensor, "b l e"] | None,
    ) -> tuple[Float[Tensor, "b n v"], Float[Tensor, "b p k v"]]:
        """Logits behind the last tokens, as :meth:`next_logits`, and those of the slots.

        Args:
            tokens: The rows from their beginning; every token before ``stops`` is known.
            stops: [B] tokens to read, at least one more than ``lengths``.
            num_last: n, columns of the first result.
            starts: Starting points of slots, each at most ``stops``; p may be 0.
            noise_table: Noise embeddings by row position; None without noise.
        """
        self.num_passes += 1
        student, cache = self.student, self.cache
        assert cache is not None
        layout = SlotLayout(starts, student.num_slots, tokens.shape[1])
        counts = stops - self.lengths
        width, new = int(self.lengths.max()), int(counts.max())
        places = stops[:, None] - new + torch.arange(new, device=tokens.device)
        is_new = places >= self.lengths[:, None]
        cached = torch.arange(-width, 0, device=tokens.device) + self.lengths[:, None]
        known = torch.cat((cached.clamp_min(EMPTY), torch.where(is_new, places, EMPTY)), dim=1)
        num_slots = layout.places.shape[1]
        hidden = self._states(tokens, places.clamp_min(0), layout, known, noise_table)
        if num_slots:
            cache.crop(-num_slots)
        self._realign(width, new, counts)
        proposed = student.logits(hidden[:, new:])
        shape = (len(tokens), starts.shape[1], student.num_slots, proposed.shape[-1])
        return student.logits(hidden[:, new - num_last : new]), proposed.view(shape)

    def _states(
        self,
        tokens: Int[Tensor, "b l"],
        places: Int[Tensor, "b m"],
        layout: SlotLayout,
        known: Int[Tensor, "b w"],
        noise_table: Float[Tensor, "b l e"] | None,
    ) -> Float[Tensor, "b m_and_n d"]:
        """Last hidden states of the tokens at ``places`` and of the slots behind them."""
        student, network = self.student, self.model
        inputs = network.get_input_embeddings()(tokens.gather(1, places))
        slots = student.slot_inputs(tokens, layout, noise_table)
        waits = len(student.readings) > 0 and slots.shape[1] > 0  # for what the tokens' call says
        here = replace(layout, starts=layout.starts[:, :0]) if waits else layout
        entered = slots[:, : here.places.shape[1], : inputs.shape[2]].to(inputs.dtype)
        with student.adapters.on_last(entered.shape[1]):
            hidden = network.base_model(
                inputs_embeds=torch.cat((inputs, entered), dim=1),
                position_ids=torch.cat((places, here.positions), dim=1),
                attention_mask=student.attention_mask(here, known, places.shape[1]),
                past_key_values=self.cache,
                use_cache=True,
            ).last_hidden_state
        if not waits:
            return hidden
        columns = layout.starts - 1 - places[:, -1:] + places.shape[1] - 1
        last = states_at(hidden, columns)
        states = student.read_slots(self.cache, layout, slots, known, last)
        return torch.cat((hidden, states), dim=1)
