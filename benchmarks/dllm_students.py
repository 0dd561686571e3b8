"""dllm's masked diffusion students trained with the noise of a store, beside dllm's own training.

python -m benchmarks.dllm_students --store out/latest/store --teacher DIR --out out/dllm.json

Both sides start from the teacher's weights and have the same rows, masks and settings. A sample is
drawn by dllm's sampler: by its own randomness, or by the noise alone (temperature 0). The teacher
then scores it.
Runs where dllm does (docs/dllm.md).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from dllm.core.samplers import MDLMSampler, MDLMSamplerConfig
from dllm.core.trainers import MDLMConfig, MDLMTrainer
from dllm.pipelines.a2d import A2DLlamaConfig, A2DLlamaLMHeadModel
from torch.utils.data import default_collate

from benchmarks.measure import machine
from shards.atomic import write_json_atomic
from shards.provenance import code_version
from shards.store.store import ShardStore
from trainer.distillation import store_rows
from trainer.dllm_adapter import NoiseMixin, NoiseSamplerMixin

NUM_SAMPLES, PASSES, TAU = 64, (8,), 0.85


class Noisy(NoiseMixin, MDLMTrainer):
    """The recipe of docs/dllm.md."""


class NoisySampler(NoiseSamplerMixin, MDLMSampler):
    """The same."""


def student(teacher: str, mask_id: int) -> A2DLlamaLMHeadModel:
    """Tiny-A2D's start: a language model's weights in dllm's bidirectional class, and a mask."""
    config = A2DLlamaConfig.from_pretrained(teacher)
    model = A2DLlamaLMHeadModel.from_pretrained(teacher, config=config, dtype=torch.float32)
    torch.manual_seed(0)  # of the mask's embedding
    model.resize_token_embeddings(mask_id + 1)
    return model


def trained(
    store: str, teacher: str, tokenizer: Any, noisy: bool, seed: int, steps: int, folder: str
) -> Any:
    """A trainer after its steps."""
    args = MDLMConfig(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        learning_rate=3e-3,
        seed=seed,
        use_cpu=True,
        bf16=False,
        eval_strategy="no",
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    made: Any = (Noisy if noisy else MDLMTrainer)(
        model=student(teacher, tokenizer.mask_token_id),
        args=args,
        processing_class=tokenizer,
        data_collator=default_collate,
        train_dataset=store_rows(store, seed=seed, with_teacher=noisy),
        eval_dataset=store_rows(store, "validation", seed=None, epochs=1, with_teacher=noisy),
        **({"store": store} if noisy else {}),
    )
    made.train()
    return made


@torch.inference_mode()
def scores(rows: torch.Tensor, teacher: Any) -> dict[str, float]:
    """Nats per token under the teacher; entropy of a row's own tokens; rows that differ."""
    nats = torch.nn.functional.cross_entropy(
        teacher(rows).logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten()
    )
    shares = torch.stack([row.bincount(minlength=rows.max() + 1) for row in rows]) / rows.shape[1]
    entropy = torch.special.entr(shares).sum(1).mean()
    return {
        "teacher_nll_nats": float(nats),
        "row_entropy_nats": float(entropy),
        "distinct_rows": len(rows.unique(dim=0)),
    }


def samples(model: Any, tokenizer: Any, noisy: bool, length: int, teacher: Any) -> dict[str, Any]:
    """Scores by passes and remasking rule."""
    found = {}
    for passes in PASSES:
        for remasking in ("low_confidence", "random"):
            torch.manual_seed(0)
            config = MDLMSamplerConfig(
                max_new_tokens=length - 1,
                block_size=length - 1,
                steps=passes,
                remasking=remasking,
                temperature=0.0 if noisy else 1.0,
                suppress_tokens=[tokenizer.mask_token_id],
            )
            sampler: Any = (NoisySampler if noisy else MDLMSampler)(model.eval(), tokenizer)
            own = {"seed": 0, "tau": TAU} if noisy else {}
            rows = sampler.sample([[tokenizer.bos_token_id]] * NUM_SAMPLES, config, **own)
            found[f"{passes} passes, {remasking}"] = scores(rows, teacher)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", required=True)
    parser.add_argument(
        "--teacher", required=True, help="the start of the students; scores samples"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    options = parser.parse_args()
    torch.set_num_threads(1)
    manifest = ShardStore.open(options.store).manifest
    teacher = transformers.AutoModelForCausalLM.from_pretrained(options.teacher)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.teacher, padding_side="right")
    tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
    sides: dict[str, dict[str, Any]] = {"dllm alone": {}, "with noise": {}}
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            for name, found in sides.items():
                noisy = name == "with noise"
                made = trained(
                    options.store, options.teacher, tokenizer, noisy, seed, options.steps, folder
                )
                torch.manual_seed(0)  # of the masks
                loss = made.evaluate()["eval_loss"]
                drawn = samples(made.model, tokenizer, noisy, manifest.row_length, teacher)
                found[f"seed {seed}"] = {"validation_loss_nats": loss, "samples": drawn}
                print(name, seed, json.dumps(found[f"seed {seed}"]), flush=True)
    rows = ShardStore.open(options.store).split("validation").read_rows(0, NUM_SAMPLES)["tokens"]
    record = {
        "commit": code_version(),
        "machine": machine(torch.device("cpu")),
        "versions": {"transformers": transformers.__version__, "dllm": "ca17675"},
        "teacher": manifest.teacher["id"],
        "vocab_size": manifest.vocab_size,
        "row_length": manifest.row_length,
        "rows_per_step": 8,
        "steps": options.steps,
        "tau": TAU,
        "weights": student(options.teacher, tokenizer.mask_token_id).num_parameters(),
        "text": scores(torch.from_numpy(rows).long(), teacher),
        "sides": sides,
    }
    write_json_atomic(options.out, record)


if __name__ == "__main__":
    main()
