"""Models to sample from, and ``gdistill-sample`` called in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.commands import call
from tests.trainer.sampling_cases import tiny_student

WORDS = ["<bos>", "<eos>", "up", "down", "left", "right", "a", "b", "c", "d", "e"]


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
