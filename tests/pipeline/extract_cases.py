"""A tiny teacher with its tokenizer, a corpus of its words, and one run in this process."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from pipeline.cli import run as run_request
from pipeline.settings import Worker, resolve_request
from pipeline.teacher import Teacher, check_output
from shards.codec.protocol import TeacherOutput
from shards.noise.embedding import Noise
from shards.noise.philox import PositionKeys
from shards.store.store import ShardStore

WORDS = ["<bos>", "<eos>", *(f"w{i}" for i in range(21))]
VOCAB_SIZE = len(WORDS)
ROW_LENGTH = 12
CONTEXT_LENGTH = 16


def save_tokenizer(folder: Path, words: list[str] = WORDS) -> Path:
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    ends = {"bos_token": words[0], "eos_token": words[1]}
    PreTrainedTokenizerFast(tokenizer_object=backend, **ends).save_pretrained(folder)
    return folder


def save_teacher(folder: Path, num_logits: int = VOCAB_SIZE, seed: int = 0) -> Path:
    """A random GPT-2 whose distributions are far from uniform, with a tokenizer beside it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shape = {"n_positions": CONTEXT_LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2}
        ends = {"bos_token_id": 0, "eos_token_id": 1}
        config = GPT2Config(vocab_size=num_logits, initializer_range=0.4, **shape, **ends)
        GPT2LMHeadModel(config).save_pretrained(folder)
    return save_tokenizer(folder)


def write_corpus(path: Path, num_documents: int = 60, seed: int = 0) -> Path:
    """One document of known words per line."""
    draw = random.Random(seed)
    lengths = (draw.randint(5, 40) for _ in range(num_documents))
    path.write_text("".join(" ".join(draw.choices(WORDS[2:], k=k)) + "\n" for k in lengths))
    return path


def write_lines(path: Path, *records: Any) -> Path:
    """JSON, a record a line."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def options(teacher: Path, corpus: Path, /, **changes: Any) -> dict[str, Any]:
    """Options as the command makes them, for the tiny teacher; a codec by name is that whole."""
    lines = {"spec": f"text:{corpus}", "row_length": ROW_LENGTH, "document_separator": "line"}
    given: dict[str, Any] = {
        "device": "cpu",
        "batch_size": 4,
        "threads": 1,
        "corpus": {**lines, "validation_fraction": 0.1},
        "codec": {} if "name" in changes.get("codec", {}) else {"num_entries": 5},
        "teacher": {"location": str(teacher)},
        "store": {"rows_per_shard": 16, "rows_per_chunk": 8},
    }
    for name, value in changes.items():
        given[name] = {**given.get(name, {}), **value} if isinstance(value, dict) else value
    return given


def run(out: Path, given: dict[str, Any], worker: Worker | None = None) -> ShardStore:
    """Run the extraction, from an engine where one is given, and open what it made."""
    run_request(resolve_request(out, given), worker or Worker())
    return ShardStore.open(out / "store")


def scored(
    teacher: Teacher, rows: torch.Tensor, ids: torch.Tensor | None = None, hidden: bool = False
) -> TeacherOutput:
    """What a teacher says of rows, checked."""
    output = teacher.forward(rows, torch.arange(len(rows)) if ids is None else ids, hidden).normalise(
        teacher.vocab_size
    )
    check_output(output)
    return output


def stored_noise(store: ShardStore, split: str = "train") -> tuple[Noise, torch.Tensor]:
    """The frozen noise of every scored position of a split, and the rows."""
    arrays = store.split(split).read_rows(0, store.split(split).num_rows)
    tokens = torch.from_numpy(arrays["tokens"]).long()
    rows, positions = torch.ones_like(tokens).bool().nonzero(as_tuple=True)
    rows, positions = rows[positions > 0], positions[positions > 0]
    noise = store.codec.decode(
        {name: torch.from_numpy(arrays[name])[rows, positions] for name in store.manifest.arrays},
        tokens[rows, positions],
        torch.from_numpy(arrays["token_log_probs"])[rows, positions],
        PositionKeys(store.manifest.noise_seed(split), rows, positions),
        store.resources,
    )
    return noise, tokens


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def times(folder: Path) -> dict[Path, int]:
    """When each file below a folder was written last, but for locks."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {path: path.stat().st_mtime_ns for path in files}
