"""Tiny random language models of known shapes, and stores that name them as their teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PretrainedConfig, Qwen2Config

from shards.language_model.loading import find_pretrained
from tests.trainer.run_cases import VOCAB as VOCAB
from tests.trainer.run_cases import tiny_run, write_store
from trainer.training.settings import RunConfig

SHAPES = ("llama", "qwen2", "gpt2")
PADDED = 16


def tiny_config(shape: str, num_logits: int = PADDED, **changes: Any) -> PretrainedConfig:
    """The shapes of known families at tiny depth: padded heads, tied or not, grouped queries."""
    common: dict[str, Any] = {"vocab_size": num_logits, "max_position_embeddings": 64}
    common |= {"bos_token_id": 0, "eos_token_id": 1}
    grouped = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    grouped |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    if shape == "llama":  # as Llama 3.2 1B: grouped queries, tied head
        return LlamaConfig(**{**common, **grouped, "head_dim": 8, "tie_word_embeddings": True, **changes})
    if shape == "qwen2":  # as Qwen2.5: biases in q, k, v
        return Qwen2Config(**{**common, **grouped, "tie_word_embeddings": False, **changes})
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
    return GPT2Config(**{**common, **sizes, **changes})


def write_backbone(folder: Path, shape: str = "llama", seed: int = 0, **changes: Any) -> Path:
    """A model of that shape whose predictions differ from token to token."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(shape, **changes))
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.5 if "embed" in name or "wte" in name else 0.3)
    model.save_pretrained(folder)
    return folder


def store_of(path: Path, backbone: Path, **changes: Any) -> Path:
    """A small store that says that this backbone scored it."""
    files = find_pretrained(backbone)
    teacher = {"id": files.name, "weights_sha256": files.weights_sha256}
    return write_store(path, teacher=teacher, **changes)


def backbone_run(backbone: Path, student: str = "medusa", **changes: Any) -> RunConfig:
    """Ten steps of a student on that backbone."""
    chosen = {"model__backbone__location": str(backbone), "student": student, **changes}
    if student == "drafter":
        chosen = {"model__conditioning": "none", **chosen}
    return tiny_run(**{"model__backbone__num_proposed": 2, **chosen})
