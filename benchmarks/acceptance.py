"""Accepted tokens per teacher pass over held-out prompts, for every way of drafting.

    python -m benchmarks.acceptance --backbone DIR --prompts FILE NAME=MODEL [NAME=MODEL ...]

Each MODEL is a run of ``gdistill-train`` on this backbone. All of them continue the same prompts
with the same noise, so under ``coupled`` acceptance all must give the same tokens (checked) and
differ only in the passes that they need; ratios are over the same prompts, drawn again together.
How a student decodes stands in ``DECODERS``: one line for each kind of student and rule.
Writes ``acceptance.json``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from benchmarks.measure import machine
from evaluation.acceptance import acceptance_score
from evaluation.bootstrap import PerSample, bootstrap_draws, percentile_interval
from shards.atomic import write_json_atomic
from shards.console import run_command
from shards.errors import UsageError
from trainer.sampling.noise import sampling_noise
from trainer.sampling.sampler import Sampler
from trainer.sampling.stopping import SampleResult
from trainer.sampling.verified.medusa import MedusaConfig
from trainer.sampling.verified.slots import DrafterSampler
from trainer.students.folder import ModelFolder, open_model
from trainer.students.registry import Drafter, Medusa, Student

SEED = 17
BATCH_ROWS = 50
DECODERS: dict[type[Student], dict[str, Callable[[], Sampler]]] = {
    Medusa: {
        "coupled": lambda: MedusaConfig(acceptance="coupled"),
        "typical": lambda: MedusaConfig(acceptance="typical"),
        "greedy": lambda: MedusaConfig(acceptance="greedy"),
    },
    Drafter: {
        "coupled": lambda: DrafterSampler(),
        "two calls": lambda: DrafterSampler(calls_per_round=2),
    },
}
"""Kind of student -> acceptance rule -> sampler."""
LOSSLESS = ("coupled", "two calls", "greedy")
"""All of a rule give the same tokens, but a drafter of one uniform, which couples by F^-1(u)."""


@dataclass(frozen=True)
class Decoded:
    """What one student made of all prompts under one rule.

    Attributes:
        result: Tokens and counts of each prompt, in order.
        seconds: Of the whole decoding.
    """

    result: SampleResult
    seconds: float

    def score(self) -> Any:
        """Tokens per pass, acceptance by head, intervals."""
        details = self.result.details
        return acceptance_score(
            details["accepted"].tolist(),
            details["reached"].tolist(),
            details["verifier_nfe"].tolist(),
            range(len(self.result.tokens)),
        )


def read_prompts(
    file: Path, tokenizer: Any, student: Student, num: int, given: int, new: int
) -> Tensor:
    """Rows of bos, the first ``given`` tokens of a story and ``new`` open positions.

    Stories stand between lines of ``<|endoftext|>``; those that are too short are left out.

    Raises:
        UsageError: When the file holds fewer than ``num`` that are long enough.
    """
    stories = file.read_text(encoding="utf-8").split("<|endoftext|>")
    bos, rows = student.config.first_token_id, []
    for story in stories:
        ids = tokenizer.encode(story.strip(), add_special_tokens=False)[:given]
        if len(ids) == given:
            rows.append([bos, *ids, *[student.mask_id] * new])
        if len(rows) == num:
            return torch.tensor(rows)
    raise UsageError("too few prompts", where=file, got=len(rows), expected=num)


def decode(student: Student, sampler: Sampler, rows: Tensor) -> Decoded:
    """Continue all prompts; prompt i has the noise of sample i."""
    started, parts = time.perf_counter(), []
    for ids in torch.arange(len(rows)).split(BATCH_ROWS):
        noise = sampling_noise(SEED, ids, rows.shape[1], student.config.vocab_size)
        parts.append(sampler.sample(student, rows[ids], ids, noise, SEED))
    seconds = time.perf_counter() - started
    details = {n: torch.cat([part.details[n] for part in parts]) for n in parts[0].details}
    tokens, nfe, lengths = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("tokens", "nfe", "lengths")
    )
    return Decoded(SampleResult(tokens, nfe, lengths, details), seconds)


def describe(model: ModelFolder, rule: str, decoded: Decoded) -> dict[str, Any]:
    """One line of the table, as JSON."""
    score, settings = decoded.score(), model.student.settings
    run = model.record.get("run", {}).get("config", {})
    return {
        "student": type(model.student).__name__.lower(),
        "acceptance": rule,
        "conditioning": settings.conditioning,
        "own_noise": settings.own_noise,
        "num_proposed": settings.num_proposed,
        "trainable_parameters": model.student.num_parameters(),
        "steps": model.record.get("step"),
        "training_seed": run.get("seed"),
        "rows_per_step": run.get("training", {}).get("global_batch_size"),
        "tokens_per_teacher_pass": score.value,
        "tokens_per_teacher_pass_95": score.interval,
        **score.details,
        "seconds": round(decoded.seconds, 2),
    }


def ratio(one: PerSample, other: PerSample) -> dict[str, Any]:
    """Tokens per pass of one over the other's, with the interval over prompts drawn together."""
    draws = bootstrap_draws(len(one.indices))
    low, high = percentile_interval(one.resampled(draws) / other.resampled(draws))
    everyone = np.arange(len(one.indices))[None]
    value = float((one.resampled(everyone) / other.resampled(everyone))[0])
    return {"value": value, "interval_95": [low, high]}


def parse_models(given: Sequence[str]) -> dict[str, Path]:
    """``NAME=FOLDER`` as a mapping.

    Raises:
        UsageError: For anything else.
    """
    pairs = [text.partition("=") for text in given]
    if not all(name and folder for name, _, folder in pairs):
        raise UsageError("bad model", where="MODEL", got=given, expected="NAME=FOLDER")
    return {name: Path(folder) for name, _, folder in pairs}


def compare(models: dict[str, ModelFolder], rows: Tensor, rules: Sequence[str]) -> dict[str, Any]:
    """All students under all rules that they know.

    Raises:
        UsageError: When two students' lossless tokens differ.
    """
    found: dict[str, Any] = {"models": {}, "ratios": {}}
    for rule in rules:
        scores, tokens = {}, None
        for name, model in models.items():
            make = DECODERS[type(model.student)].get(rule)
            if make is None:
                continue
            decoded = decode(model.student, make(), rows)
            found["models"][f"{name}, {rule}"] = line = describe(model, rule, decoded)
            print(f"{name}, {rule}: {summary(line)}", flush=True)
            scores[name] = decoded.score().per_sample
            if rule in LOSSLESS:
                line["tokens_differing_from_the_first"] = _differing(tokens, decoded.result.tokens)
                tokens = decoded.result.tokens if tokens is None else tokens
        first, *others = scores
        for name in others:
            found["ratios"][f"{name} / {first}, {rule}"] = ratio(scores[name], scores[first])
    return found


def _differing(first: Tensor | None, other: Tensor) -> int:
    return 0 if first is None else int((first != other).sum())


def summary(line: dict[str, Any]) -> str:
    """The figures of a line as text."""
    low, high = line["tokens_per_teacher_pass_95"]
    heads = " ".join(f"{share:.3f}" for share in line["conditional_acceptance"])
    value = line["tokens_per_teacher_pass"]
    return f"{value:.3f} [{low:.3f}, {high:.3f}] tokens per teacher pass; heads {heads}"


def main(
    models: Annotated[list[str], typer.Argument(help="NAME=FOLDER of trained students.")],
    backbone: Annotated[str, typer.Option(help="The frozen language model below all of them.")],
    prompts: Annotated[Path, typer.Option(help="Text file of stories.")],
    num: Annotated[int, typer.Option(help="Prompts.")] = 500,
    given: Annotated[int, typer.Option(help="Tokens of a prompt, behind bos.")] = 24,
    new: Annotated[int, typer.Option(help="Tokens that follow it.")] = 64,
    rules: Annotated[str, typer.Option(help="Acceptance rules.")] = "coupled,typical,greedy",
    out: Annotated[Path, typer.Option(help="Folder for acceptance.json.")] = Path("out/bench"),
) -> None:
    """Compare drafting students over the same prompts and noise."""
    opened = {
        name: open_model(folder, backbone=backbone) for name, folder in parse_models(models).items()
    }
    first = next(iter(opened.values()))
    rows = read_prompts(prompts, first.tokenizer, first.student, num, given, new)
    found = compare(opened, rows, rules.split(","))
    out.mkdir(parents=True, exist_ok=True)
    document = {
        "backbone": first.student.config.frozen,
        "prompts": {"file": prompts.name, "num": num, "given": given, "new": new, "seed": SEED},
        **found,
        "machine": machine(first.student.device),
    }
    write_json_atomic(out / "acceptance.json", document)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(main)
    run_command(app)
