"""A tiny teacher with its tokenizer, a corpus of its words, and one run in this process."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from pipeline.run import run_extraction
from pipeline.settings import Worker, resolve_request
from shards.store.store import ShardStore

WORDS = ["<bos>", "<eos>", *(f"w{i}" for i in range(21))]
VOCAB_SIZE = len(WORDS)
ROW_LENGTH = 12
CONTEXT_LENGTH = 16


def save_tokenizer(folder: Path, words: list[str] = WORDS) -> Path:
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=words[0], eos_token=words[1]
    ).save_pretrained(folder)
    return folder


def save_teacher(folder: Path, num_logits: int = VOCAB_SIZE, seed: int = 0) -> Path:
    """A random GPT-2 whose distributions are far from uniform, with a tokenizer beside it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = GPT2Config(
            vocab_size=num_logits,
            n_positions=CONTEXT_LENGTH,
            n_embd=16,
            n_layer=2,
            n_head=2,
            initializer_range=0.4,
            bos_token_id=0,
            eos_token_id=1,
        )
        GPT2LMHeadModel(config).save_pretrained(folder)
    return save_tokenizer(folder)


def write_corpus(path: Path, num_documents: int = 60, seed: int = 0) -> Path:
    """One document of known words per line."""
    draw = random.Random(seed)
    documents = [
        " ".join(draw.choices(WORDS[2:], k=draw.randint(5, 40))) for _ in range(num_documents)
    ]
    path.write_text("\n".join(documents) + "\n")
    return path


def options(teacher: Path, corpus: Path, /, **changes: Any) -> dict[str, Any]:
    """Options as the command makes them, for the tiny teacher."""
    given: dict[str, Any] = {
        "device": "cpu",
        "batch_size": 4,
        "threads": 1,
        "corpus": {
            "spec": f"text:{corpus}",
            "row_length": ROW_LENGTH,
            "document_separator": "line",
            "validation_fraction": 0.1,
        },
        "codec": {"name": "posterior", "num_entries": 5},
        "teacher": {"location": str(teacher)},
        "store": {"rows_per_shard": 16, "rows_per_chunk": 8},
    }
    for name, value in changes.items():
        given[name] = {**given.get(name, {}), **value} if isinstance(value, dict) else value
    return given


def run(out: Path, given: dict[str, Any], worker: Worker | None = None) -> ShardStore:
    """Run the extraction and open what it made."""
    run_extraction(resolve_request(out, given), worker or Worker())
    return ShardStore.open(out / "store")


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
