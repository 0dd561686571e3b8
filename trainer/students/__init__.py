"""The students: MDLM, BD3-LM and the autoregressive baseline on one diffusion transformer.

In: a :class:`Batch` (for the loss), or rows with open positions and noise embeddings (for
log-probabilities). Out: :class:`LossOutput`, log-probabilities over V + 1 tokens, and model
folders: written whole or not at all, read back with all of their weights or an error. Loading
any name of :mod:`trainer.students.registry` registers the students with transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from trainer.students.attention import (
        Rotary,
        causal_attention,
        flex_training_attention,
        full_attention,
        masked_attention,
        training_mask,
    )
    from trainer.students.base import before_float32
    from trainer.students.conditioning import GumbelConditioner
    from trainer.students.decoder import DecoderBackbone
    from trainer.students.dit import Block, Half, compiled_halves, sigma_features
    from trainer.students.drafter.adapters import ADAPTER
    from trainer.students.drafter.layout import EMPTY, SlotLayout, states_at
    from trainer.students.drafter.signals import token_uniforms
    from trainer.students.folder import (
        ModelFolder,
        export_model,
        find_model,
        is_model,
        load_tokenizer,
        open_model,
        read_model,
        weights_sha256,
    )
    from trainer.students.fused_head import CHUNK_ROWS, HEAD_MULTIPLE
    from trainer.students.on_backbone import BackboneStudent, FrozenBackbone, load_backbone
    from trainer.students.registry import (
        AR,
        BD3LM,
        MDLM,
        STUDENTS,
        BD3LMConfig,
        Drafter,
        LossOutput,
        MDLMConfig,
        Medusa,
        MedusaConfig,
        Student,
        StudentConfig,
        StudentSettings,
        read_preset,
    )
    from trainer.students.vocabulary_attention import (
        NoiseToRead,
        VocabularyAttention,
        pack_noise,
        searched_at_once,
    )

__getattr__, __dir__ = open_door(__name__, __file__)
