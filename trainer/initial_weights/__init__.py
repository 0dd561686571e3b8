"""Where a student begins: another student's weights, a language model's, or noise brought into one.

In comes ``--init-from``: the folder of a student or of its run, or a language model of transformers
as a folder or hub id. Out come the settings that it asks for (a language model's network) and a
student that holds its weights; what does not fit is refused before a step is taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from trainer.initial_weights.loading import load_initial_weights
    from trainer.initial_weights.source import find_source, is_language_model, network_settings
    from trainer.initial_weights.student import noise_parameters, silence_noise

__getattr__, __dir__ = open_door(__name__, __file__)
