"""Students that are a language model of transformers: its layers and first weights, trained on.

In comes an autoregressive model (folder or hub id: Llama, Qwen, GPT-2 and other shapes); out comes
the backbone of a diffusion student with the same layers, which attend as the student's rows want
and no longer to the left alone. Its configuration goes into the student's own, so a model folder
needs no other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from trainer.students.decoder.network import DecoderBackbone, layer_lists

__getattr__, __dir__ = open_door(__name__, __file__)
