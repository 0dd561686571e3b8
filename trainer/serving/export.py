"""Students in formats that engines load by themselves: vLLM's Medusa heads, a PEFT folder.

Heads without noise fit vLLM's ``MedusaModel`` whole. What reads noise has no place there: it drafts
through :mod:`trainer.serving.drafters`. A drafter's LoRA fits PEFT; its slots, which stand behind
the tokens and are the only rows that it may touch, do not, so the folder is for those who read it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import save_file
from transformers.pytorch_utils import Conv1D

from shards.errors import UsageError
from trainer.students.drafter.student import Drafter
from trainer.students.medusa import Medusa
from trainer.students.registry import Student


def export(student: Student, folder: Path) -> str:
    """Write a student in the engine's format; the files are config and safetensors.

    Returns:
        What was written, and what does not fit, in a line.

    Raises:
        UsageError: For a student that fits no format of an engine.
    """
    if isinstance(student, Medusa):
        return _export_medusa(student, folder)
    if isinstance(student, Drafter):
        return _export_adapters(student, folder)
    raise UsageError(
        "no format of an engine fits this student",
        got=type(student).__name__,
        expected="a medusa or drafter student",
        remedy="serve it with make serve DRAFTER=...",
    )


@torch.no_grad()
def _export_medusa(student: Medusa, folder: Path) -> str:
    """``blocks.k`` is x + SiLU(W1 x), as ours; ``lm_heads.k`` the whole of W2."""
    if student.is_conditioned:
        raise UsageError(
            "heads that read noise do not fit vLLM's MedusaModel",
            where="conditioning",
            got=student.settings.conditioning,
            expected="none",
            remedy="serve them with make serve DRAFTER=...",
        )
    backbone, size = student.language_model, student.config.vocab_size
    shared = backbone.network.get_output_embeddings().weight[:size].float()
    weights: dict[str, torch.Tensor] = {}
    heads: Any = student.heads
    for k, head in enumerate(heads):
        weights[f"blocks.{k}.layers.0.weight"] = head.residual.weight.float().contiguous()
        own = shared.clone()
        if head.output is not None:
            own += head.output(torch.eye(own.shape[1], device=own.device)).T
        weights[f"lm_heads.{k}.weight"] = own.contiguous()
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": shared.shape[1],
        "vocab_size": size,
        "num_heads": len(heads),
        "num_hidden_layers": 1,
        "medusa_fc_bias": False,
    }
    _write(folder, "config.json", config, "model.safetensors", weights)
    return (
        f"wrote {len(heads)} heads to {folder}: vllm serve MODEL --speculative-config "
        f'\'{{"method": "medusa", "model": "{folder}", "num_speculative_tokens": {len(heads)}}}\''
    )


@torch.no_grad()
def _export_adapters(student: Drafter, folder: Path) -> str:
    """Low-rank weights by the names that PEFT gives them."""
    weights = {}
    adapters: Any = student.adapters
    for name, own in zip(adapters.names, adapters.layers, strict=True):
        base = f"base_model.model.{name}"
        weights[f"{base}.lora_A.weight"] = own.down.weight.float().contiguous()
        weights[f"{base}.lora_B.weight"] = own.up.weight.float().contiguous()
    modules: Any = student.language_model.network.modules()
    config = LoraConfig(
        r=adapters.rank,
        lora_alpha=2 * adapters.rank,
        target_modules="|".join(name.replace(".", r"\.") for name in adapters.names),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in modules),
        task_type="CAUSAL_LM",
    ).to_dict()
    _write(folder, "adapter_config.json", config, "adapter_model.safetensors", weights)
    return (
        f"wrote the adapters of {len(weights) // 2} layers to {folder} for PEFT; slots and noise "
        "do not fit it: on all rows these adapters change the model's text"
    )


def _write(
    folder: Path,
    config_name: str,
    config: dict[str, Any],
    weights_name: str,
    weights: dict[str, torch.Tensor],
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / weights_name)
    (folder / config_name).write_text(json.dumps(config, indent=2, default=str) + "\n")
