"""Heads on backbones of the shapes of real language models, weights random: step, draft, verify.

Part of :mod:`benchmarks.gpu_suite`. ``paper`` are Qwen2.5-0.5B (tied head, 151,936 logits of which
151,665 are tokens) and Llama-3.2-1B, both with grouped queries and here in bfloat16; ``toy`` has
their make at tiny depth.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config

from benchmarks.acceptance import SEED
from benchmarks.coupled import COUPLED, PLAIN, open_rows, random_medusa
from benchmarks.measure import synchronize
from benchmarks.synthetic import random_batch
from shards.language_model.forward import DtypeName
from trainer.sampling.noise import sampling_noise
from trainer.students.registry import Medusa, StudentSettings
from trainer.training.optimization import make_optimizer
from trainer.training.settings import OptimizationConfig


@dataclass(frozen=True)
class BackboneShape:
    """A backbone and what stands on it.

    Attributes:
        config: Of the language model.
        vocab_size: V, its tokens; it may have more logits.
        settings: Of the heads.
        rows: (rows, tokens per row) of a training step.
        drawn: (rows, tokens per row) of decoding.
    """

    config: PretrainedConfig
    vocab_size: int
    settings: StudentSettings
    rows: tuple[int, int]
    drawn: tuple[int, int]


def heads(width: int, dtype: DtypeName) -> StudentSettings:
    """Three heads with noise, as in the paper."""
    return StudentSettings(
        hidden_size=width,
        num_layers=1,
        num_heads=4,
        dropout=0.0,
        conditioning="gumbel",
        backbone_dtype=dtype,
        head_output="low_rank",
        head_rank=min(64, width),
    )


def qwen(**changes: int) -> PretrainedConfig:
    """Qwen2.5-0.5B."""
    sizes = {
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    }
    return Qwen2Config(**{**sizes, **changes}, tie_word_embeddings=True)  # type: ignore[arg-type]


def llama(**changes: int) -> PretrainedConfig:
    """Llama-3.2-1B."""
    sizes = {
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    return LlamaConfig(**{**sizes, **changes}, tie_word_embeddings=True)  # type: ignore[arg-type]


TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SHAPES: Mapping[str, Mapping[str, BackboneShape]] = {
    "paper": {
        "Qwen2.5-0.5B": BackboneShape(qwen(), 151_665, heads(256, "bfloat16"), (8, 256), (4, 64)),
        "Llama-3.2-1B": BackboneShape(llama(), 128_256, heads(256, "bfloat16"), (8, 256), (4, 64)),
    },
    "toy": {
        "Qwen2.5-0.5B": BackboneShape(
            qwen(**TINY, vocab_size=112, num_attention_heads=4, num_key_value_heads=2),
            97,
            heads(16, "bfloat16"),
            (2, 16),
            (2, 12),
        ),
        "Llama-3.2-1B": BackboneShape(
            llama(**TINY, vocab_size=97, num_attention_heads=8, num_key_value_heads=2),
            97,
            heads(16, "float32"),
            (2, 16),
            (2, 12),
        ),
    },
}


def measure_shape(shape: BackboneShape, device: torch.device) -> dict[str, Any]:
    """Seconds of a training step and of decoding; whether the frozen weights stayed."""
    with tempfile.TemporaryDirectory() as folder:
        length = max(shape.rows[1], shape.drawn[1])
        student = random_medusa(
            shape.config, shape.settings, Path(folder), length, shape.vocab_size
        ).to(device)
    before = _sum(student)
    trained = _training(student, shape, device)
    decoded = _decoding(student, shape, device)
    return {
        "frozen_parameters": (student.config.frozen or {})["num_parameters"],
        "trained_parameters": student.num_parameters(),
        "training": trained,
        "decoding": decoded,
        "frozen_weights_stayed": bool(before == _sum(student)),
    }


def _sum(student: Medusa) -> float:
    """A checksum of the backbone's weights."""
    return sum(float(weight.double().sum()) for weight in student.frozen_weights)


def _training(student: Medusa, shape: BackboneShape, device: torch.device) -> dict[str, Any]:
    num_rows, length = shape.rows
    batch = random_batch(num_rows, length, shape.vocab_size, device, 0, num_rows)
    optimizer = make_optimizer(student.parameters(), OptimizationConfig(learning_rate=1e-4))
    losses, seconds = [], []
    for _ in range(2):
        synchronize(device)
        started = time.perf_counter()
        output = student.train().loss(batch)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(output.loss.detach()))
        seconds.append(time.perf_counter() - started)
    return {
        "losses": losses,
        "seconds_per_step": seconds[-1],
        "tokens_per_second": num_rows * length / seconds[-1],
    }


def _decoding(student: Medusa, shape: BackboneShape, device: torch.device) -> dict[str, Any]:
    num_rows, length = shape.drawn
    rows, ids = open_rows(student.eval(), num_rows, length), torch.arange(num_rows)
    rows, ids = rows.to(device), ids.to(device)
    found: dict[str, Any] = {}
    for name, sampler in (("plain", PLAIN), ("coupled", COUPLED)):
        noise = sampling_noise(SEED, ids, length, shape.vocab_size)
        synchronize(device)
        started = time.perf_counter()
        result = sampler.sample(student, rows, ids, noise, SEED)
        synchronize(device)
        found[name] = {
            "seconds": time.perf_counter() - started,
            "teacher_passes": int(result.details["verifier_nfe"].max()),
            "padding_ids": int((result.tokens >= shape.vocab_size).sum()),
        }
    return found
