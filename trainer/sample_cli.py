"""``gdistill-sample``: draw samples from a trained student."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from shards.console import command_app, run_command
from shards.errors import UsageError
from shards.settings_table import Section, settings_app
from trainer.sampling.registry import SAMPLERS

SETTINGS = tuple(Section(f"--sampler {name}", target, waits_for_torch=True) for name, target in SAMPLERS.items())
DEFAULT_NUM = 64
app = command_app()


@app.command()
def sample(
    checkpoint: Annotated[str, typer.Argument(help="Model, the --out of a training, or a hub id.")],
    out: Annotated[Path, typer.Option(help="Folder of the samples.")] = Path("samples"),
    num: Annotated[int | None, typer.Option(min=1, help="Samples (64; or one per prompt or row).")] = None,
    nfe: Annotated[str | None, typer.Option(help="Forward passes per sequence; 8,16,32 writes a file each.")] = None,
    passes_per_block: Annotated[
        str | None, typer.Option(help="block: forward passes of each block instead of --nfe.")
    ] = None,
    sampler: Annotated[str | None, typer.Option(help=f"{', '.join(SAMPLERS)}.")] = None,
    nucleus_p: Annotated[float | None, typer.Option(help="Nucleus p (1 = off).")] = None,
    nucleus_rule: Annotated[str | None, typer.Option(help="strict (the authors') or crossing (transformers').")] = None,
    top_k: Annotated[int | None, typer.Option(help="Most probable tokens kept (all).")] = None,
    temperature: Annotated[float | None, typer.Option(help="Divides the log-probabilities (1 = off).")] = None,
    tau: Annotated[float | None, typer.Option(help="Scale of the Gumbel noise (0.85).")] = None,
    decision: Annotated[str | None, typer.Option(help="categorical draws, or argmax.")] = None,
    verifier: Annotated[str | None, typer.Option(help="apd, coupled: a causal LM of the same tokenizer.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="With the sample index it names all randomness.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples at a time; changes no sample.")] = 32,
    length: Annotated[int | None, typer.Option(help="Tokens per sample; the row's.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Text that every sample begins with.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="One prompt per line.")] = None,
    infill: Annotated[Path | None, typer.Option(help=".jsonl of rows with open positions.")] = None,
    stop_at_eos: Annotated[bool, typer.Option("--stop-at-eos", help="Variable length: a sample ends at eos.")] = False,
    min_entropy: Annotated[
        float | None, typer.Option(help="Draw anew below this entropy (nats, last 256 tokens).")
    ] = None,
    precision: Annotated[Literal["fp32", "bf16"], typer.Option(help="bf16 is autocast.")] = "fp32",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    backbone: Annotated[
        str | None, typer.Option(help="Where the student's frozen language model is, if moved.")
    ] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="Further sampler settings, key=value.")] = None,
    sweep: Annotated[str | None, typer.Option(help="nucleus_p=0.7,0.8: a folder OUT/nucleus_p=0.7 for each.")] = None,
) -> None:
    """Draw samples. The same command resumes an interrupted run.

    `gdistill-sample settings [WORD]` lists what --set takes, sampler by sampler.
    """
    exclude(nfe=nfe, passes_per_block=passes_per_block)
    exclude(prompt=prompt, prompt_file=prompt_file, infill=infill)
    exclude("a row to infill has its own length", infill=infill, length=length)
    counted, text = ("nfe", nfe) if passes_per_block is None else ("passes_per_block", passes_per_block)
    listed = parse_budgets(f"--{counted.replace('_', '-')}", text) if text else ()
    budgets = [{counted: budget} for budget in listed] or [{}]
    options = {
        "nucleus_p": nucleus_p,
        "nucleus_rule": nucleus_rule,
        "top_k": top_k,
        "temperature": temperature,
        "tau": tau,
        "decision": decision,
        "verifier": verifier,
        "stop.at_eos": stop_at_eos or None,
        "stop.min_entropy_nats": min_entropy,
    }

    from trainer.sampling import command

    loaded = command.open_student(checkpoint, device, backbone)
    rows = command.rows_to_fill(loaded, length, prompt, prompt_file, infill)
    is_one_per_row = prompt_file is not None or infill is not None
    is_unconditional = prompt is None and not is_one_per_row
    named = {name: value for name, value in options.items() if value is not None}
    variants = command.sampler_variants(loaded.student, sampler, named, settings or (), sweep, budgets)
    runs = [
        command.SampleRun(
            loaded=loaded,
            samplers=samplers,
            rows=rows,
            skips_first=is_unconditional or loaded.student.config.bos_token_id is not None,
            seed=seed,
            num_samples=num or (len(rows) if is_one_per_row else DEFAULT_NUM),
            batch_size=batch_size,
            precision=precision,
            out=out / folder,
        )
        for folder, samplers in variants
    ]
    for run in runs:
        run.check()
    products = command.choose_products(runs[0])
    for run in runs:
        for path in run.run(products):
            typer.echo(f"wrote {path}", err=True)
        if flagged := run.num_flagged():
            typer.echo(f"warning: {flagged} samples stayed below the least entropy; flagged low_entropy", err=True)


def exclude(remedy: str = "", **options: Any) -> None:
    """Refuse (UsageError) more than one of options that exclude each other."""
    names = [f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None]
    if len(names) > 1:
        raise UsageError("these exclude each other", where=", ".join(names), remedy=remedy)


def parse_budgets(option: str, text: str) -> list[int]:
    """``8,16,32`` as integers; a UsageError for what is no list of distinct positive integers."""
    if not re.fullmatch(r" *[1-9]\d{0,6} *(, *[1-9]\d{0,6} *)*", text, re.ASCII):
        expected = "positive integers such as 16 or 8,16,32"
        raise UsageError("bad NFE", where=option, got=text[:40], expected=expected)
    budgets = [int(part) for part in text.split(",")]
    if len(set(budgets)) < len(budgets):
        raise UsageError("an NFE is named twice", where=option, got=text)
    return budgets


def main() -> None:
    """Entry point."""
    run_command(app, settings=partial(settings_app, SETTINGS))


if __name__ == "__main__":
    main()
