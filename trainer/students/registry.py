"""The students; importing this package registers them with transformers' Auto classes."""

from __future__ import annotations

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

from trainer.students.autoregressive import AR, ARConfig
from trainer.students.base import LossOutput, Student
from trainer.students.bd3lm import BD3LM, BD3LMConfig
from trainer.students.configuration import StudentSettings, read_preset
from trainer.students.drafter import Drafter, DrafterConfig
from trainer.students.hugging_face import StudentConfig
from trainer.students.mdlm import MDLM, MDLMConfig
from trainer.students.medusa import Medusa, MedusaConfig

STUDENTS: dict[str, type[Student]] = {
    "mdlm": MDLM,
    "bd3lm": BD3LM,
    "ar": AR,
    "medusa": Medusa,
    "drafter": Drafter,
}

for _student in STUDENTS.values():
    AutoConfig.register(_student.config_class.model_type, _student.config_class, exist_ok=True)
    AutoModel.register(_student.config_class, _student, exist_ok=True)
AutoModelForMaskedLM.register(MDLMConfig, MDLM, exist_ok=True)
AutoModelForMaskedLM.register(BD3LMConfig, BD3LM, exist_ok=True)
AutoModelForCausalLM.register(ARConfig, AR, exist_ok=True)

__all__ = [
    "AR",
    "BD3LM",
    "MDLM",
    "STUDENTS",
    "ARConfig",
    "BD3LMConfig",
    "Drafter",
    "DrafterConfig",
    "LossOutput",
    "MDLMConfig",
    "Medusa",
    "MedusaConfig",
    "Student",
    "StudentConfig",
    "StudentSettings",
    "read_preset",
]
