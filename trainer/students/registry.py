"""The students; importing this package registers them with transformers' Auto classes."""

from __future__ import annotations

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

from trainer.students.autoregressive import AR, ARConfig
from trainer.students.base import LossOutput as LossOutput
from trainer.students.base import Student
from trainer.students.base import StudentConfig as StudentConfig
from trainer.students.bd3lm import BD3LM, BD3LMConfig
from trainer.students.configuration import StudentSettings as StudentSettings
from trainer.students.configuration import read_preset as read_preset
from trainer.students.drafter import Drafter
from trainer.students.drafter import DrafterConfig as DrafterConfig
from trainer.students.mdlm import MDLM, MDLMConfig
from trainer.students.medusa import Medusa
from trainer.students.medusa import MedusaConfig as MedusaConfig

STUDENTS: dict[str, type[Student]] = {"mdlm": MDLM, "bd3lm": BD3LM, "ar": AR, "medusa": Medusa, "drafter": Drafter}

for _student in STUDENTS.values():
    AutoConfig.register(_student.config_class.model_type, _student.config_class, exist_ok=True)
    AutoModel.register(_student.config_class, _student, exist_ok=True)
AutoModelForMaskedLM.register(MDLMConfig, MDLM, exist_ok=True)
AutoModelForMaskedLM.register(BD3LMConfig, BD3LM, exist_ok=True)
AutoModelForCausalLM.register(ARConfig, AR, exist_ok=True)
