"""Students in a format that engines load by themselves: vLLM's Medusa heads.

Heads without noise fit vLLM's ``MedusaModel`` whole. What reads noise has no place there: it drafts
through :mod:`trainer.serving.drafters`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from shards.errors import UsageError
from trainer.students.medusa import Medusa
from trainer.students.registry import Student


@torch.no_grad()
def export(student: Student, folder: Path) -> str:
    """Write a student in the engine's format; the files are config and safetensors.

    ``blocks.k`` is x + SiLU(W1 x), as ours; ``lm_heads.k`` the whole of W2.

    Returns:
        What was written, in a line.

    Raises:
        UsageError: For a student that fits no format of an engine.
    """
    remedy = "serve it with make serve DRAFTER=..."
    if not isinstance(student, Medusa):
        what, expected = "no format of an engine fits this student", "a medusa student"
        raise UsageError(what, got=type(student).__name__, expected=expected, remedy=remedy)
    if student.is_conditioned:
        what, where = "heads that read noise do not fit vLLM's MedusaModel", "conditioning"
        got = student.settings.conditioning
        raise UsageError(what, where=where, got=got, expected="none", remedy=remedy)
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
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return (
        f"wrote {len(heads)} heads to {folder}: vllm serve MODEL --speculative-config "
        f'\'{{"method": "medusa", "model": "{folder}", "num_speculative_tokens": {len(heads)}}}\''
    )
