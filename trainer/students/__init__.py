"""DOOR: trainer.students."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from trainer.students.attention import (
        Rotary,
        flex_training_attention,
        masked_attention,
        training_mask,
    )
    from trainer.students.conditioning import GumbelConditioner
    from trainer.students.dit import noise_level_features
    from trainer.students.export import export_model
    from trainer.students.model_folder import read_model
    from trainer.students.registry import (
        AR,
        BD3LM,
        MDLM,
        STUDENTS,
        BD3LMConfig,
        LossOutput,
        MDLMConfig,
        Student,
        StudentConfig,
        StudentSettings,
        read_preset,
    )

__getattr__, __dir__ = open_door(__name__, __file__)
