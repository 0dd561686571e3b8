"""``gdistill-sample``: draw samples from a trained student."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from shards.console import LogFormatOption, command_app, run_command, use_log_format
from shards.errors import UsageError
from shards.settings import Section, settings_app
from trainer.sampling.registry import SAMPLERS

SETTINGS = tuple(
    Section(f"--sampler {name}", target, waits_for_torch=True) for name, target in SAMPLERS.items()
)
app = command_app()


@app.command()
def sample(
    checkpoint: Annotated[
        str, typer.Argument(help="Model folder, the --out of a training, or a hub id.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for samples.jsonl and settings.json.")] = Path(
        "samples"
    ),
    num: Annotated[int | None, typer.Option(help="Samples (64; or one per prompt or row).")] = None,
    nfe: Annotated[
        str | None,
        typer.Option(help="Forward passes per sequence; 8,16,32 writes one file for each."),
    ] = None,
    passes_per_block: Annotated[
        str | None, typer.Option(help="block: forward passes of each block instead of --nfe.")
    ] = None,
    sampler: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(SAMPLERS)}."),
    ] = None,
    nucleus_p: Annotated[float | None, typer.Option(help="Nucleus p (1 = off).")] = None,
    nucleus_rule: Annotated[
        str | None, typer.Option(help="strict (the authors') or crossing (transformers').")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Most probable tokens kept (all).")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Divides the log-probabilities (1 = off).")
    ] = None,
    tau: Annotated[float | None, typer.Option(help="Scale of the Gumbel noise (0.85).")] = None,
    decision: Annotated[
        str | None, typer.Option(help="categorical draws, or argmax of x_0.")
    ] = None,
    verifier: Annotated[
        str | None,
        typer.Option(help="apd, coupled: a causal LM of the same tokenizer."),
    ] = None,
    seed: Annotated[int, typer.Option(help="With the sample index it names all randomness.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Samples at a time; changes no sample.")] = 32,
    length: Annotated[int | None, typer.Option(help="Tokens per sample; the row's.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Text that every sample begins with.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="One prompt per line.")] = None,
    infill: Annotated[Path | None, typer.Option(help=".jsonl of rows with open positions.")] = None,
    stop_at_eos: Annotated[
        bool, typer.Option("--stop-at-eos", help="Variable length: a sample ends at eos.")
    ] = False,
    min_entropy: Annotated[
        float | None, typer.Option(help="Draw anew below this entropy (nats, last 256 tokens).")
    ] = None,
    precision: Annotated[str, typer.Option(help="fp32, or bf16 for autocast.")] = "fp32",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    backbone: Annotated[
        str | None,
        typer.Option(help="Where the student's frozen language model is, if it has moved."),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Further sampler settings, key=value.")
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(help="nucleus_p=0.7,0.8,0.9: a folder OUT/nucleus_p=0.7 for each value."),
    ] = None,
    log_format: LogFormatOption = "plain",
) -> None:
    """Draw samples. The same command resumes an interrupted run.

    `gdistill-sample settings [WORD]` lists what --set takes, sampler by sampler.
    """
    from trainer.sampling.command import Request

    use_log_format(log_format)
    named: dict[str, Any] = {
        "nucleus_p": nucleus_p,
        "nucleus_rule": nucleus_rule,
        "top_k": top_k,
        "temperature": temperature,
        "tau": tau,
        "decision": decision,
        "verifier": verifier,
    }
    stop = {"at_eos": stop_at_eos or None, "min_entropy_nats": min_entropy}
    named["stop"] = {name: value for name, value in stop.items() if value is not None} or None
    if nfe is not None and passes_per_block is not None:
        raise UsageError("these exclude each other", where="--nfe, --passes-per-block")
    request = Request(
        checkpoint=checkpoint,
        out=out,
        num=num,
        budgets=parse_budgets("--nfe", nfe)
        or parse_budgets("--passes-per-block", passes_per_block),
        counted="nfe" if passes_per_block is None else "passes_per_block",
        sampler=sampler,
        settings={name: value for name, value in named.items() if value is not None},
        overrides=tuple(settings or ()),
        sweep=sweep,
        seed=seed,
        batch_size=batch_size,
        length=length,
        prompt=prompt,
        prompt_file=prompt_file,
        infill=infill,
        precision=precision,
        device=device,
        backbone=backbone,
    )
    for run in request.resolve():
        for path in run.run():
            typer.echo(f"wrote {path}", err=True)
        for line in run.verification:
            typer.echo(line, err=True)
        if run.num_flagged:
            kept = f"{run.num_flagged} samples stayed below the least entropy in every try"
            typer.echo(f"warning: {kept}; they are flagged low_entropy", err=True)


def parse_budgets(option: str, text: str | None) -> tuple[int, ...]:
    """``8,16,32`` as integers; nothing is no budget.

    Raises:
        UsageError: For anything that is not a list of distinct positive integers.
    """
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    # Python reads no integer of thousands of digits.
    is_number = all(part.isascii() and part.isdigit() and len(part) < 20 for part in parts)
    if not is_number or not all(map(int, parts)):
        expected = "positive integers such as 16 or 8,16,32"
        raise UsageError("bad NFE", where=option, got=text[:40], expected=expected)
    budgets = tuple(map(int, parts))
    if len(set(budgets)) < len(budgets):
        raise UsageError("an NFE is named twice", where=option, got=text)
    return budgets


def main() -> None:
    """Entry point."""
    run_command(app, settings=settings_app(SETTINGS))


if __name__ == "__main__":
    main()
