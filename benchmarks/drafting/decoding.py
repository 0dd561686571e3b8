"""Tokens per second of a trained drafter in ``gdistill-sample``'s own loop, beside plain decoding.

``python -m benchmarks.drafting.decoding RUN/model --text STORIES.txt --out FILE.json``. The sides
take turns on the same prompts, row by row (batch 1), and must write the same tokens; seconds are
of the one thread's processor time. With ``--engine`` a stock vLLM, which draws otherwise, joins.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.drafting.target import story_prompts
from benchmarks.measure import machine
from benchmarks.serving import Engine, Job
from shards.atomic import write_json_atomic
from trainer import load_student
from trainer.sampling.registry import make_sampler

PROBABLE = {"min_reach": 0.5, "width": 4}
SIDES = {
    "plain": {"max_lookahead": 0},
    "chain of 2": {"max_lookahead": 2, "tree": 2, "width": 1},
    "tree of 8, 2 steps": {"max_lookahead": 2, "tree": 8, "width": 4},
    "tree of 16, 8 steps": {},
    "tree of 16, steps while probable": PROBABLE,
    "tree of 16, steps while probable, blind": {"draft": "greedy", **PROBABLE},
}
COUNTED = {
    "counts, tree of 5": {"tree": 5, "min_reach": 0.4},
    "counts, tree of 7": {"tree": 7, "min_reach": 0.5},
    "counts, tree of 11": {"tree": 11, "min_reach": 0.5},
    "counts, tree of 7, blind": {"tree": 7, "min_reach": 0.5, "draft": "greedy"},
}
"""Sides whose drafts come from counts of a store's rows."""


def main(
    model: Annotated[Path, typer.Argument(help="A trained drafter.")],
    text: Annotated[Path, typer.Option(help="Stories that it has not seen.")],
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
    rows: Annotated[int, typer.Option(help="Prompts, of 16 tokens each.")] = 8,
    length: Annotated[int, typer.Option(help="Tokens of a finished row.")] = 80,
    seed: Annotated[int, typer.Option(help="Names the noise.")] = 0,
    ngrams: Annotated[str, typer.Option(help="A store of rows that the backbone wrote.")] = "",
    engine: Annotated[Path | None, typer.Option(help="An environment with vLLM.")] = None,
    target: Annotated[str, typer.Option(help="What it serves: the drafter's backbone.")] = "",
) -> None:
    """Decode, time and write."""
    torch.set_num_threads(1)
    student = load_student(model)
    prompts = story_prompts(model, [text], rows, 16)
    tokens = torch.full((rows, length), student.mask_id)
    tokens[:, :16] = prompts
    counted = {name: {"ngrams": ngrams, **settings} for name, settings in COUNTED.items()}
    sides: dict[str, dict[str, Any]] = SIDES | (counted if ngrams else {})
    found = {name: {"seconds": 0.0, "passes": 0} for name in sides}
    if engine:
        vllm, found["vLLM, plain"] = Engine(engine, target, False), dict(found["plain"])
    for row in range(-1, rows):  # the first turn warms up
        written = []
        for name, settings in sides.items():
            ids, begin = torch.tensor([row]).abs(), time.thread_time()
            sampler = make_sampler("drafter", **settings)
            result = sampler.sample(student, tokens[ids], ids, None, seed)
            written.append(result.tokens)
            if row >= 0:
                found[name]["seconds"] += time.thread_time() - begin
                found[name]["passes"] += int(result.details["verifier_nfe"].sum())
        if engine:
            asked = {"prompt_token_ids": prompts[abs(row)].tolist()}
            said = vllm.serve([Job(asked, row + 1, max_tokens=length - 16)], 1)
            if row >= 0:
                found["vLLM, plain"]["seconds"] += said["cpu_seconds"]
                found["vLLM, plain"]["passes"] += said["rows"][0]["passes"]
        if not all(torch.equal(each, written[0]) for each in written):
            raise SystemExit(f"row {row}: two sides wrote different tokens")
    count = rows * (length - 16)
    for side in found.values():
        side["tokens_per_second"] = count / side["seconds"]
        side["tokens_per_pass"] = count / side["passes"]
        side["speed_up"] = found["plain"]["seconds"] / side["seconds"]
    settings = SIDES | (COUNTED if ngrams else {})
    run = {"rows": rows, "length": length, "seed": seed, "settings": settings}
    write_json_atomic(out, {"machine": machine(torch.device("cpu")), **run, "sides": found})
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    typer.run(main)
