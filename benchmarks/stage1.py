"""Stage 1 measured: memory against corpus size, and speed against the bare tokenizers library.

    python -m benchmarks.stage1 --out benchmarks/results [--shared ../shared]

Without the reference books, text is generated. Every measurement is a process of its own, so peak
memory is that of the measured work. Speeds alternate between the two sides in the same run; the
fastest of either counts, for whatever else the machine does only slows.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pipeline.corpus.config import CorpusConfig, corpus_config
from pipeline.corpus.splits import read_documents
from pipeline.tokens.build import prepare_tokens
from pipeline.tokens.tokenizer import backend, load_tokenizer
from shards.atomic import write_json_atomic

SMALL_BYTES, LARGE_BYTES = 10_000_000, 72_000_000
SEPARATOR = "<|endoftext|>"
MAX_GROWTH_MB, MIN_SPEED_RATIO = 200.0, 0.8


def main() -> None:
    arguments = _arguments()
    if arguments.task:
        print(json.dumps(_task(arguments)))
        return
    with tempfile.TemporaryDirectory() as folder:
        results = _measure(Path(folder), arguments.shared, arguments.repeats)
    write_json_atomic(arguments.out / "stage1.json", results)
    print(json.dumps(results, indent=2))
    if not results["bars"]["all_met"]:
        sys.exit(1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--shared", type=Path, default=Path("../shared"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--task", choices=["stage1", "library"])
    parser.add_argument("--corpus")
    parser.add_argument("--validation")
    parser.add_argument("--tokenizer", type=Path)
    return parser.parse_args()


def _measure(folder: Path, shared: Path, repeats: int) -> dict:
    """Write the corpora, run every task and compare with the bars."""
    books = sorted((shared / "data/prose").glob("books_train_*.txt.gz"))
    documents = _books(books) if books else _generated(LARGE_BYTES)
    sizes = _write_corpora(folder, documents)
    gpt2 = shared / "data/gpt2-tokenizer"
    tokenizer = gpt2 if gpt2.is_dir() else _trained_tokenizer(folder)

    small = _run("stage1", folder / "small.txt", tokenizer)
    stage1, library = [], []
    for _ in range(repeats):
        library.append(_run("library", folder / "large.txt", tokenizer))
        stage1.append(_run("stage1", folder / "large.txt", tokenizer))
    growth = median(run["peak_mb"] for run in stage1) - small["peak_mb"]
    # All books, compressed as they are, with the validation books as a source of their own.
    prose = shared / "data/prose"
    all_books = (prose / "books_train_*.txt.gz", tokenizer, prose / "books_valid.txt")
    gzipped = _run("stage1", *all_books) if books else None
    seconds = {
        "stage1": min(run["seconds"] for run in stage1),
        "library": min(run["seconds"] for run in library),
    }
    ratio = seconds["library"] / seconds["stage1"]
    return {
        "corpus": "books" if books else "generated",
        "tokenizer": tokenizer.name,
        "corpus_bytes": sizes,
        "machine": {"processor": platform.machine(), "num_cores": os.cpu_count()},
        "stage1": min(stage1, key=_seconds),
        "library": min(library, key=_seconds),
        "all_seconds": {
            "stage1": [run["seconds"] for run in stage1],
            "library": [run["seconds"] for run in library],
        },
        "all_books_gzipped": gzipped,
        "small_peak_mb": small["peak_mb"],
        "peak_growth_mb": round(growth, 1),
        "speed_ratio": round(ratio, 3),
        "bars": {
            "peak_growth_mb_below": MAX_GROWTH_MB,
            "speed_ratio_at_least": MIN_SPEED_RATIO,
            "all_met": growth < MAX_GROWTH_MB and ratio >= MIN_SPEED_RATIO,
        },
    }


def _seconds(run: dict) -> float:
    return run["seconds"]


def _run(task: str, corpus: Path, tokenizer: Path, validation: Path | None = None) -> dict:
    """One task in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.stage1", "--task", task]
    command += ["--corpus", f"text:{corpus}", "--tokenizer", str(tokenizer)]
    command += ["--validation", f"text:{validation}"] if validation else []
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def _task(arguments: argparse.Namespace) -> dict:
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    settings = {"row_length": 1024, "validation_source": arguments.validation}
    config = corpus_config(arguments.corpus, settings=settings)
    run = _run_stage1 if arguments.task == "stage1" else _run_library
    result = run(config, arguments.tokenizer)
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return result | {"peak_mb": round(peak_kb / 1024, 1)}


def _run_stage1(config: CorpusConfig, tokenizer: Path) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        loaded = load_tokenizer(tokenizer)
        start = time.perf_counter()
        dataset = prepare_tokens(config, loaded, Path(folder))
        seconds = time.perf_counter() - start
    splits = dataset.record["splits"].values()
    num_tokens = sum(split["num_tokens"] for split in splits)
    return {
        "seconds": round(seconds, 2),
        "num_documents": sum(split["num_documents"] for split in splits),
        "num_rows": sum(split["num_rows"] for split in splits),
        "num_tokens": num_tokens,
        "tokens_per_second": round(num_tokens / seconds),
    }


def _run_library(config: CorpusConfig, tokenizer: Path) -> dict:
    """Only the library's own call is timed: all documents in one batch, in memory, ids let go."""
    fast = backend(load_tokenizer(tokenizer))
    documents = [
        text for split in ("train", "validation") for text in read_documents(config, split)
    ]
    start = time.perf_counter()
    encodings = fast.encode_batch_fast(documents, add_special_tokens=False)
    seconds = time.perf_counter() - start
    num_tokens = sum(map(len, encodings))
    return {
        "seconds": round(seconds, 2),
        "num_tokens": num_tokens,
        "tokens_per_second": round(num_tokens / seconds),
    }


def _books(paths: list[Path]) -> Iterator[str]:
    for path in paths:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            yield from file.read().split(f"{SEPARATOR}\n")


def _generated(num_bytes: int) -> Iterator[str]:
    """Documents of made-up words with a Zipf-like frequency, about 50 kB each."""
    source = random.Random(0)
    letters = "etaoinshrdlucmfwypvbgk"
    words = ["".join(source.choices(letters, k=source.randint(2, 9))) for _ in range(20_000)]
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    for _ in range(num_bytes // 50_000 + 1):
        yield " ".join(source.choices(words, weights, k=9_000)) + "\n"


def _write_corpora(folder: Path, documents: Iterator[str]) -> dict[str, int]:
    """``small.txt`` and ``large.txt``: the first documents, up to either size."""
    sizes = {"small": 0, "large": 0}
    limits = {"small": SMALL_BYTES, "large": LARGE_BYTES}
    with (
        open(folder / "small.txt", "w", encoding="utf-8") as small,
        open(folder / "large.txt", "w", encoding="utf-8") as large,
    ):
        for text in documents:
            block = f"{text.rstrip()}\n{SEPARATOR}\n"
            for name, file in (("small", small), ("large", large)):
                if sizes[name] < limits[name]:
                    file.write(block)
                    sizes[name] += len(block.encode())
    return sizes


def _trained_tokenizer(folder: Path) -> Path:
    """A byte-level BPE trained on the small corpus, where GPT-2's is not at hand."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore
    trainer = trainers.BpeTrainer(vocab_size=30_000, special_tokens=[SEPARATOR])  # type: ignore
    tokenizer.train([str(folder / "small.txt")], trainer)
    path = folder / "trained-tokenizer"
    shutil.rmtree(path, ignore_errors=True)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=SEPARATOR, bos_token=SEPARATOR
    ).save_pretrained(path)
    return path


if __name__ == "__main__":
    main()
