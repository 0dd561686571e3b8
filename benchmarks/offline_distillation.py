"""A student language model trained from a store by transformers' Trainer, beside text alone.

python -m benchmarks.offline_distillation --store out/latest/store --out out/offline.json

Both sides take the same rows in the same order, steps, weights at the start and settings. What
differs is the loss, and that one side reads the teacher's arrays.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from benchmarks.measure import machine
from shards.atomic import write_json_atomic
from shards.provenance import code_version
from shards.store.store import ShardStore
from trainer.distillation import DistillationLoss, DistillationMixin, store_rows


class Distilled(DistillationMixin, Trainer):
    """The recipe of docs/trainers.md."""


def student(vocab_size: int, row_length: int, seed: int) -> LlamaForCausalLM:
    """About a million weights at V = 4,096, half of them embeddings."""
    torch.manual_seed(seed)
    size = {"hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": True}
    length = {"max_position_embeddings": row_length}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **size, **heads, **length))


def trainer_of(store: str, weight: float, seed: int, steps: int, folder: str) -> Trainer:
    """A Trainer on the store's rows; weight 0 is transformers' own loss on plain text."""
    manifest = ShardStore.open(store).manifest
    args = TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, steps // 10),
        seed=seed,
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_num_workers=0,
    )
    given: dict[str, Any] = {
        "model": student(manifest.vocab_size, manifest.row_length, seed),
        "args": args,
        "train_dataset": store_rows(store, seed=seed, with_teacher=weight > 0),
        "eval_dataset": store_rows(
            store, "validation", seed=None, epochs=1, with_teacher=weight > 0
        ),
    }
    if weight == 0:
        return Trainer(**given)
    return Distilled(**given, distillation=DistillationLoss(store, weight=weight))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--weight", type=float, default=0.9)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--turns", type=int, default=7, help="of 25 steps, for the speed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    manifest = ShardStore.open(options.store).manifest
    sides = {"text alone": 0.0, "from the store": options.weight}
    losses: dict[str, dict[str, float]] = {name: {} for name in sides}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    steps, tokens = 25, 25 * 8 * manifest.row_length
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.turns):
            for name, weight in sides.items():
                made = trainer_of(options.store, weight, 0, steps, folder)
                start = time.process_time()
                made.train()
                seconds[name].append(time.process_time() - start)
        rates = {name: tokens / median(values) for name, values in seconds.items()}
        print(json.dumps(rates))
        for seed in options.seeds:
            for name, weight in sides.items():
                made = trainer_of(options.store, weight, seed, options.steps, folder)
                made.train()
                losses[name][f"seed {seed}"] = made.evaluate()["eval_loss"]
                print(name, seed, losses[name][f"seed {seed}"], flush=True)
    record = {
        "commit": code_version(),
        "machine": machine(torch.device("cpu")),
        "versions": {"transformers": transformers.__version__},
        "teacher": manifest.teacher["id"],
        "vocab_size": manifest.vocab_size,
        "row_length": manifest.row_length,
        "weights": sum(p.numel() for p in student(manifest.vocab_size, 8, 0).parameters()),
        "steps": options.steps,
        "rows_per_step": 8,
        "share_of_kl": options.weight,
        "validation_nll_nats": losses,
        "tokens_per_cpu_second": rates,
        "speed_ratio": rates["from the store"] / rates["text alone"],
        "cpu_seconds_of_25_steps": seconds,
    }
    write_json_atomic(options.out, record)


if __name__ == "__main__":
    main()
