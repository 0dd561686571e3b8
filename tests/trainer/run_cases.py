"""Small stores and short runs that the trainer's tests share; a tokenizer and noise weights for dllm's models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from shards.codec.protocol import TeacherOutput, codec_parameters, make_codec
from shards.store.manifest import Manifest
from shards.store.store import ShardStore, ShardWriter
from shards.stream.stream import ShardStream
from trainer.objective.batch import Batch, BatchMaker
from trainer.students.registry import Student
from trainer.training.loop import Trainer, Validator
from trainer.training.settings import RunConfig, build_student, compose_run

VOCAB, LENGTH, SEED = 12, 8, 7
ROWS = {"train": 40, "validation": 10}


def write_store(path: Path, codec_name: str = "posterior", num_entries: int = 4, **changes: Any) -> Path:
    """A finished store of random rows under a random bigram teacher.

    ``num_entries`` are of codec ``posterior``; ``changes`` are other fields of the manifest, and
    ``files``, those beside the shards.
    """
    parameters = {"num_entries": num_entries} if codec_name == "posterior" else {}
    codec = make_codec(codec_name, **parameters)
    files = changes.pop("files", {"tokenizer/vocab.txt": b"a b", "corpus/maze.json": b"[]"})
    vocab, length = changes.pop("vocab_size", VOCAB), changes.pop("row_length", LENGTH)
    fields: dict[str, Any] = {
        "codec": {"name": codec_name, "parameters": codec_parameters(codec)},
        "arrays": codec.array_specs(vocab, None),
        "vocab_size": vocab,
        "row_length": length,
        "splits": ROWS,
        "rows_per_shard": 16,
        "rows_per_chunk": 4,
        "teacher": {"id": "bigram", "weights_sha256": "ab" * 32},
        "tokenizer": {"id": "none", "sha256": "cd" * 32},
        "tokens": {"fingerprint": "ef" * 32, "corpus": {"name": "random"}},
        "seed": SEED,
        "versions": {"gdistill": "0.1.0"},
        "bos_id": 0,
    }
    manifest = Manifest(**{**fields, **changes})
    resources = {"unigram_log_probs": np.full(vocab, -np.log(vocab), np.float32)}
    writer = ShardWriter.create_or_resume(path, manifest, resources, files)
    for split in manifest.splits:
        for shard in writer.pending(split):
            rows = torch.arange(shard.start, shard.stop)
            arrays = encode_rows(codec, rows, vocab, length, split, manifest.noise_seed(split))
            with writer.claim(shard) as mine:
                assert mine
                writer.write(shard, arrays)
    return path


def teacher_logits(vocab: int = VOCAB) -> torch.Tensor:
    """[V, V] logits of the bigram teacher: row i is about the token after token i."""
    return torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(SEED)) * 2


def encode_rows(
    codec: Any, rows: torch.Tensor, vocab: int, length: int, split: str, seed: int
) -> dict[str, np.ndarray]:
    """Stored arrays of some rows: tokens drawn from the teacher that is then encoded."""
    generator = torch.Generator().manual_seed(int(rows[0]) + 1000 * len(split))
    table = teacher_logits(vocab)
    tokens = torch.zeros(len(rows), length, dtype=torch.int64)
    for position in range(1, length):
        probs = table[tokens[:, position - 1]].softmax(-1)
        tokens[:, position] = torch.multinomial(probs, 1, generator=generator)[:, 0]
    log_probs = table[tokens[:, :-1]].log_softmax(-1)
    output = TeacherOutput(log_probs, tokens[:, 1:], rows)
    unigram = torch.full((vocab,), -np.log(vocab))
    coded = codec.encode(output, seed, {"unigram_log_probs": unigram})
    token_log_probs = log_probs.gather(-1, tokens[:, 1:, None])[..., 0]
    arrays = {"token_log_probs": token_log_probs, **coded}
    padded = {}
    for name, value in arrays.items():
        value = value.numpy()
        padded[name] = np.concatenate([np.zeros_like(value[:, :1]), value], axis=1)
    return {"tokens": tokens.to(torch.int32).numpy(), **padded}


def tiny_run(*sources: dict[str, Any], **changes: Any) -> RunConfig:
    """Ten steps of a student that fits anywhere; dotted names with ``__`` change settings."""
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "condition_size": 8}
    steps = {"num_steps": 10, "global_batch_size": 8, "log_every_steps": 3}
    steps |= {"validate_every_steps": 4, "checkpoint_every_steps": 100}
    place = {"precision": "fp32", "device": "cpu", "num_workers": 0, "trackers": []}
    base = {
        "model": {**sizes, "dropout": 0.0, "conditioning": "gumbel"},
        "training": {**steps, **place},
        "optimization": {"learning_rate": 1e-2, "warmup_steps": 2},
    }
    overrides = [f"{name.replace('__', '.')}={value}" for name, value in changes.items()]
    return compose_run([base, *sources], overrides)


def first_batch(store: Path, num_rows: int = 3, seed: int = 0, with_noise: bool = True) -> Batch:
    """The first rows of the train split, as a run of that seed sees them."""
    opened = ShardStore.open(store)
    make = BatchMaker(opened, "train", seed, torch.device("cpu"), with_noise)
    stream = ShardStream(opened.split("train", make.arrays), seed=0, global_batch_size=num_rows)
    return make(next(iter(stream)))


def student_of(store: Path, init_from: Path | None = None, **changes: Any) -> Student:
    """The student at step 0 of a tiny run."""
    return build_student(tiny_run(**changes), ShardStore.open(store), init_from)


def trainer_of(store: Path, out: Path, *given: Any, **changes: Any) -> tuple[Trainer, Validator]:
    """A tiny run that is about to begin."""
    trainer = Trainer(tiny_run(*given, **changes), ShardStore.open(store), out)
    assert trainer.validator is not None
    return trainer, trainer.validator


def next_batch(trainer: Trainer) -> Batch:
    return trainer.make_batch(next(trainer._rows()))


def quiet(out: Path, **changes: Any) -> dict[str, Any]:
    """Arguments of a short training by transformers."""
    size = {"per_device_train_batch_size": 4, "use_cpu": True, "learning_rate": 1e-2}
    silent = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    return {"output_dir": str(out), "max_steps": 8, **size, **silent, **changes}


def run_files(out: Path) -> dict[str, bytes]:
    """What must not depend on interruptions: the last checkpoint's and the model's tensors."""
    last = max((out / "checkpoints").glob("step-*"))
    paths = [*last.glob("*.safetensors"), out / "model" / "model.safetensors"]
    return {path.name: path.read_bytes() for path in paths}


def metrics_without_timing(out: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl without the fields that depend on the machine."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "tokens_per_second")} for line in lines]


def assert_same_run(first: Path, second: Path) -> None:
    """Two finished runs agree bit for bit."""
    files, others = run_files(first), run_files(second)
    assert len(files) == 4
    assert metrics_without_timing(first) == metrics_without_timing(second)
    assert [name for name in files if files[name] != others[name]] == []


def tokenizer(**changes: Any) -> PreTrainedTokenizerFast:
    vocab = {letter: index for index, letter in enumerate("abcdefghijkl")}
    ends = dict.fromkeys(("pad_token", "bos_token", "eos_token"), "a")
    options = {"mask_token": "[MASK]", "padding_side": "right", **ends, **changes}
    model = Tokenizer(WordLevel(vocab, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=model, **options)


def draw_weights(own: Any) -> torch.Tensor:
    """W of ones and zeros: the sum over its row is softmax(xi) itself."""
    with torch.no_grad():
        own.weight.copy_(torch.eye(*own.weight.shape))
    return own.weight
