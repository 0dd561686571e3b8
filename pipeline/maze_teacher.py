"""The maze's own teacher: an ordinary causal LM of transformers, trained on the spot.

The folder it leaves behind is a plain Hugging Face model directory; nothing downstream knows that
it came from here. ``training.json`` in it records the settings and how close the model came to
the distribution of the paths; it is part of the folder, which appears whole or not at all.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from pipeline.maze import (
    NUM_DOCUMENTS,
    TOKENS,
    MazeLayout,
    draw_documents,
    maze_tokenizer,
)
from shards.atomic import publish_folder, write_json_atomic
from shards.console import progress_bar
from shards.errors import UsageError
from shards.provenance import derive_seed, generator
from shards.settings import to_mapping

BOS, EOS = 0, 1
RECORD = "training.json"


@dataclass(frozen=True)
class MazeTeacherConfig:
    """Shape and schedule of the teacher; the defaults are the full protocol's.

    Attributes:
        learning_rate: Peak of a linear warm-up and cosine decay (AdamW).
        batch_size: Rows per step; a corpus of fewer distinct rows is trained on whole.
    """

    num_layers: int = 8
    num_heads: int = 8
    hidden_size: int = 128
    num_steps: int = 400
    learning_rate: float = 1e-3
    batch_size: int = 256
    num_documents: int = NUM_DOCUMENTS["train"]
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "seed" and value <= 0:
                raise UsageError("must be positive", where=f"maze teacher: {field.name}", got=value)
        if self.hidden_size % (2 * self.num_heads):
            raise UsageError(
                "hidden_size must be an even multiple of num_heads",
                where="maze teacher",
                got=f"{self.hidden_size} and {self.num_heads}",
            )


def demo_teacher_config(seed: int = 0) -> MazeTeacherConfig:
    """A smaller teacher for a quick walk through the system."""
    return MazeTeacherConfig(
        num_layers=4, hidden_size=64, num_steps=300, learning_rate=4e-3, seed=seed
    )


@dataclass(frozen=True)
class MazeTeacherReport:
    """How close the teacher came to its corpus.

    Attributes:
        path_probabilities: The teacher's probability of each path, in ``MazeLayout.paths()`` order.
        total_variation: Distance to the uniform distribution over the paths; probability that
            leaves the set of paths counts.
        total_variation_to_corpus: The same to the paths' shares in the training rows.
        loss_nats: Mean negative log-likelihood of a training row.
        entropy_nats: Entropy of the paths' shares in the training rows: the least possible loss.
    """

    path_probabilities: tuple[float, ...]
    total_variation: float
    total_variation_to_corpus: float
    loss_nats: float
    entropy_nats: float


def path_rows(paths: list[tuple[str, ...]], row_length: int) -> Int[Tensor, "n l"]:
    """Rows bos + moves + eos padding, as the ``pad`` packing makes them; int64."""
    ids = {token: index for index, token in enumerate(TOKENS)}
    rows = torch.full((len(paths), row_length), EOS)
    rows[:, 0] = BOS
    for row, path in zip(rows, paths, strict=True):
        row[1 : len(path) + 1] = torch.tensor([ids[move] for move in path])
    return rows


def row_log_probs(model: LlamaForCausalLM, rows: Int[Tensor, "n l"]) -> Float[Tensor, "n"]:
    """Log-probability in nats of every row given its first token; float32."""
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits.float()
    log_probs = logits.log_softmax(-1).gather(-1, rows[:, 1:, None]).squeeze(-1)
    return log_probs.sum(-1)


def train_maze_teacher(
    maze: MazeLayout, out: Path, config: MazeTeacherConfig | None = None
) -> MazeTeacherReport:
    """Train the teacher of ``maze`` and save it to ``out``; a finished one is left as it is.

    Args:
        out: The model directory (weights as safetensors, tokenizer, ``maze.json`` with the
            teacher's path probabilities, ``training.json``).

    Raises:
        UsageError: If ``out`` holds something else, or a teacher of other settings.
    """
    config = config or MazeTeacherConfig()
    settings = {"maze": maze.artifact(), "config": to_mapping(config)}
    if out.exists():
        return _finished(out, settings)
    model, report = _train(maze, config)
    temporary = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    transformers_logging.disable_progress_bar()  # one bar per stage, and it is ours
    model.save_pretrained(temporary)
    maze_tokenizer(maze.row_length).save_pretrained(temporary)
    artifact = {**maze.artifact(), "seed": config.seed}
    artifact["teacher_probabilities"] = list(report.path_probabilities)
    write_json_atomic(temporary / "maze.json", artifact)
    write_json_atomic(temporary / RECORD, {**settings, "report": to_mapping(report)})
    publish_folder(temporary, out)
    return report


def _finished(out: Path, settings: dict[str, Any]) -> MazeTeacherReport:
    """The report of the teacher that is already there."""
    try:
        record = json.loads((out / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            "the folder is no maze teacher",
            where=out,
            expected=f"a {RECORD} in it",
            remedy="choose another folder",
        ) from error
    for part, wanted in settings.items():
        for key, value in wanted.items():
            if (found := record.get(part, {}).get(key)) != value:
                raise UsageError(
                    "a maze teacher with other settings is already there",
                    where=f"{out}: {part}.{key}",
                    got=found,
                    expected=value,
                    remedy="choose another folder or remove this one",
                )
    report = record["report"]
    return MazeTeacherReport(
        **{**report, "path_probabilities": tuple(report["path_probabilities"])}
    )


def _new_model(maze: MazeLayout, config: MazeTeacherConfig) -> LlamaForCausalLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(config.seed, "maze teacher weights"))
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(TOKENS),
                hidden_size=config.hidden_size,
                intermediate_size=4 * config.hidden_size,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_heads,
                num_key_value_heads=config.num_heads,
                max_position_embeddings=maze.row_length,
                bos_token_id=BOS,
                eos_token_id=EOS,
                tie_word_embeddings=False,
            )
        )


def _train(
    maze: MazeLayout, config: MazeTeacherConfig
) -> tuple[LlamaForCausalLM, MazeTeacherReport]:
    documents = draw_documents(maze, config.num_documents, config.seed, "train")
    rows = path_rows([tuple(document.split()) for document in documents], maze.row_length)
    model = _new_model(maze, config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _warmup_cosine(config.num_steps))
    order = generator(config.seed, "maze teacher batches")
    with progress_bar("maze teacher", config.num_steps, unit="step") as bar:
        for _ in range(config.num_steps):
            batch, weights = _batch(rows, config.batch_size, order)
            loss = -(weights * row_log_probs(model, batch)).sum()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            bar.advance(1)
            bar.note(f"loss {loss.item():.3f} nats/row")
    model.eval()
    return model, _report(model, maze, rows)


def _warmup_cosine(num_steps: int) -> Any:
    warmup = max(1, num_steps // 20)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, num_steps - warmup)))

    return factor


def _batch(
    rows: Int[Tensor, "n l"], batch_size: int, order: torch.Generator
) -> tuple[Int[Tensor, "b l"], Float[Tensor, "b"]]:
    """Distinct rows with their shares: equal rows need one forward pass, the loss is the same."""
    distinct, counts = rows.unique(dim=0, return_counts=True)
    if len(distinct) > batch_size:
        chosen = torch.randint(len(rows), (batch_size,), generator=order)
        distinct, counts = rows[chosen].unique(dim=0, return_counts=True)
    return distinct, counts / counts.sum()


@torch.no_grad()
def _report(
    model: LlamaForCausalLM, maze: MazeLayout, rows: Int[Tensor, "n l"]
) -> MazeTeacherReport:
    paths = path_rows(maze.paths(), maze.row_length)
    model_probs = row_log_probs(model, paths).double().exp()
    shares = (rows[:, None] == paths[None]).all(-1).double().mean(0)
    uniform = torch.full_like(model_probs, 1 / len(paths))
    seen = shares > 0
    return MazeTeacherReport(
        path_probabilities=tuple(model_probs.tolist()),
        total_variation=_total_variation(model_probs, uniform),
        total_variation_to_corpus=_total_variation(model_probs, shares),
        loss_nats=-(shares[seen] * model_probs[seen].log()).sum().item(),
        entropy_nats=-(shares[seen] * shares[seen].log()).sum().item(),
    )


def _total_variation(model_probs: Float[Tensor, "n"], target: Float[Tensor, "n"]) -> float:
    """Half the L1 distance; what the model puts outside the n paths belongs to it."""
    outside = (1 - model_probs.sum()).clamp(min=0)
    return (((model_probs - target).abs().sum() + outside) / 2).item()
