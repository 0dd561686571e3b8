"""``gdistill-eval judge``: samples rated by a language model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from evaluation.report import own_folder
from evaluation.samples import find_sample_files, read_samples
from evaluation.score_tables import write_scores
from evaluation.text import readings_folder
from shards.base import UsageError, require_writable, write_json_atomic


def judge(
    samples: Annotated[Path, typer.Argument(help="Folder or .jsonl file of samples.")],
    url: Annotated[str, typer.Option(help="Base URL, such as http://localhost:8000/v1.")],
    model: Annotated[str, typer.Option(help="The model's name there.")],
    key_variable: Annotated[
        str, typer.Option(help="Environment variable that holds the key, if it is set.")
    ] = "OPENAI_API_KEY",
    limit: Annotated[int | None, typer.Option(help="At most so many samples a file.")] = None,
    per_minute: Annotated[float | None, typer.Option(help="Most questions in a minute.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for one answer.")] = 120.0,
    tries: Annotated[int, typer.Option(help="Tries of one question.")] = 6,
    prices: Annotated[
        str | None, typer.Option(help="IN,OUT: prices of a million tokens, for the estimate.")
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Estimate the cost and send nothing.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Where to write; SAMPLES/judge.")] = None,
) -> None:
    """Rate samples 1 to 10 in five dimensions; interrupted, the same command goes on.

    The samples' texts are sent to --url and nowhere else.
    """
    from evaluation.llm_judge import (
        AnswerFile,
        Endpoint,
        estimate_cost,
        rate_samples,
        rating_scores,
    )

    _check(url, limit=limit, per_minute=per_minute, timeout=timeout, tries=tries)
    folder = samples if samples.is_dir() else samples.parent
    directory = out or own_folder(folder, "judge")
    sets = [read_samples(file, folder) for file in find_sample_files(samples)]
    texts = [one.require_texts()[:limit] for one in sets]
    endpoint = Endpoint(
        url, model, os.environ.get(key_variable), timeout, tries, per_minute=per_minute
    )
    require_writable(directory)
    answers = AnswerFile(readings_folder(directory) / "answers.judge")
    cost = estimate_cost(endpoint, [t for part in texts for t in part], answers, _prices(prices))
    money = "" if cost.price is None else f", at most {cost.price:.2f}"
    typer.echo(
        f"{cost.num_questions} questions: about {cost.input_tokens:,} tokens in, at most "
        f"{cost.output_tokens:,} out{money}",
        err=True,
    )
    if plan:
        return
    try:
        scored = [
            (
                one,
                rating_scores(
                    rate_samples(endpoint, part, answers), one.indices[:limit], endpoint, one.source
                ),
            )
            for one, part in zip(sets, texts, strict=True)
        ]
    finally:
        write_json_atomic(directory / "faults.json", dict(endpoint.faults))
    summary = f"{model}; faults met: {dict(endpoint.faults) or 'none'}."
    page = write_scores(directory, "Judged by a language model", summary, scored)
    faults = ", ".join(f"{kind}: {count}" for kind, count in sorted(endpoint.faults.items()))
    typer.echo(f"faults met: {faults or 'none'}\nwrote {directory / 'results.json'} and {page}")


def _check(url: str, **counts: float | int | None) -> None:
    if not url.startswith(("http://", "https://")):
        raise UsageError(
            "no such endpoint", where="--url", got=url, expected="http://... or https://"
        )
    for name, value in counts.items():
        if value is not None and value <= 0:
            raise UsageError("not above 0", where=f"--{name.replace('_', '-')}", got=value)


def _prices(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        inside, outside = (float(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(
            "bad prices", where="--prices", got=text, expected="such as 0.15,0.6"
        ) from error
    return inside, outside
