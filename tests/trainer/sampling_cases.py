"""Tiny models with random weights to sample from, and ``gdistill-sample`` called in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from shards.noise.gumbel import KeyedPrior
from shards.settings import resolve
from tests.commands import call
from trainer.sampling.noise import sampling_noise
from trainer.students.registry import STUDENTS, Student, StudentSettings

VOCAB, LENGTH, BOS = 11, 12, 0
WIDE, NARROW = 1.5, 0.3
WORDS = ["<bos>", "<eos>", "up", "down", "left", "right", "a", "b", "c", "d", "e"]


def tiny_student(
    kind: str = "mdlm",
    conditioning: str = "gumbel",
    *,
    block_size: int | None = None,
    vocab_size: int = VOCAB,
    row_length: int = LENGTH,
    **settings: object,
) -> Student:
    """A student whose predictions vary from position to position."""
    student_class = STUDENTS[kind]
    shape = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "condition_size": 8}
    own = {"dropout": 0.3, "conditioning": conditioning, "block_size": block_size}
    chosen = resolve(StudentSettings, shape, own, settings)
    config = student_class.config_class.build(
        chosen, vocab_size=vocab_size, row_length=row_length, bos_token_id=BOS, eos_token_id=1
    )
    torch.manual_seed(0)
    student = student_class(config).eval()
    for name, parameter in student.named_parameters():
        if "norm" not in name:
            scale = WIDE if name.endswith(("embedding", "conditioner.weight")) else NARROW
            torch.nn.init.normal_(parameter, std=scale)
    return student


def open_rows(student: Student, num_rows: int, length: int | None = None) -> Tensor:
    """Rows of bos and masks."""
    tokens = torch.full((num_rows, length or student.config.row_length), student.mask_id)
    tokens[:, 0] = BOS
    return tokens


def noise_for(student: Student, ids: Tensor, seed: int, length: int = LENGTH) -> KeyedPrior | None:
    """The samples' noise, for a conditioned student."""
    if not student.is_conditioned:
        return None
    return sampling_noise(seed, ids, length, student.config.vocab_size)


def draw(student: Student, sampler, ids: Tensor, tokens: Tensor | None = None, seed: int = 3):
    """Sample some ids with the samples' own noise."""
    tokens = open_rows(student, len(ids)) if tokens is None else tokens
    noise = noise_for(student, ids, seed, tokens.shape[1])
    return sampler.sample(student, tokens, ids, noise, seed)


def tiny_llama(vocab_size: int = VOCAB, context: int = 32) -> LlamaForCausalLM:
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    shape |= {"num_hidden_layers": 2, "max_position_embeddings": context}
    config = LlamaConfig(vocab_size=vocab_size, bos_token_id=BOS, eos_token_id=1, **shape)
    torch.manual_seed(1)
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


class Largest(TorchDispatchMode):
    """Notes the elements of the largest tensor, of that dtype if one is named, that any operation makes."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.dtype, self.elements = dtype, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and self.dtype in (None, value.dtype):
                self.elements = max(self.elements, value.numel())
        return result


# The command, and folders of models.


def save(directory: Path, kind: str = "mdlm", conditioning: str = "gumbel", **options: Any) -> Path:
    """A tiny student with a tokenizer of eleven words."""
    tiny_student(kind, conditioning, **options).save_pretrained(directory)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "a"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(directory)
    return directory


def save_models(folder: Path) -> Path:
    """One of every kind."""
    save(folder / "mdlm")
    save(folder / "plain", conditioning="none")
    save(folder / "bd3lm", "bd3lm", block_size=4)
    save(folder / "ar", "ar", "none")
    save(folder / "timed", diffusion={"time_conditioning": True})
    save(folder / "timed_blocks", "bd3lm", block_size=4, diffusion={"time_conditioning": True})
    return folder


def command(*arguments: object) -> int:
    """Exit code of one call, in this process."""
    return call("gdistill-sample", *arguments)


def read(file: Path) -> list[dict[str, Any]]:
    """The records of a file of samples."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def without_seconds(file: Path) -> list[dict[str, Any]]:
    """The records without the time they took."""
    return [{k: v for k, v in record.items() if not k.endswith("seconds")} for record in read(file)]
