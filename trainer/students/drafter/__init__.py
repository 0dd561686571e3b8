"""The drafter: a frozen language model that proposes several tokens at once on slots of its own.

In come the model, rows, and starting points in them. Behind each starting point stand K slots,
which see the tokens before it, each other in order, and the noise of the tokens to come. Adapters
(LoRA) touch slots only, so that keys and values of the tokens stay the model's own. Out go hidden
states of the slots and the loss of what they propose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from trainer.students.drafter.adapters import ADAPTER, SlotAdapters
    from trainer.students.drafter.layout import EMPTY, SlotLayout, flex_slot_mask, slot_mask
    from trainer.students.drafter.signals import token_uniforms
    from trainer.students.drafter.student import Drafter, DrafterConfig

__getattr__, __dir__ = open_door(__name__, __file__)
