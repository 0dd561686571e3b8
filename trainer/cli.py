"""``gdistill-train``: train, tell how far a run is, import checkpoints, count added weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shards.console import (
    LogFormatOption,
    command_app,
    is_first_process,
    run_command,
    use_log_format,
)
from shards.settings import Section, read_toml, settings_app

if TYPE_CHECKING:
    from trainer.training.settings import RunConfig

SETTINGS = (Section("a training run", "trainer.training.settings:RunConfig"),)
app = command_app(
    no_args_is_help=True,
    help="Train students, see how far a run is, import the authors' checkpoints, count added "
    "weights. `gdistill-train settings [WORD]` lists every key of --set with default and meaning.",
)


@app.command()
def run(
    store: Annotated[str, typer.Option(help="Store to train on: a folder or URL.")],
    out: Annotated[Path, typer.Option(help="Folder of this run; the same command resumes it.")],
    student: Annotated[str | None, typer.Option(help="mdlm, bd3lm, ar, medusa or drafter.")] = None,
    preset: Annotated[str | None, typer.Option(help="tiny, small, medium or maze.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with the run's settings.")] = None,
    conditioning: Annotated[
        str | None, typer.Option(help="none, gumbel, or a drafter's uniform.")
    ] = None,
    kd: Annotated[
        str | None,
        typer.Option(help="none, token (KL to stored probabilities), sequence (teacher's rows)."),
    ] = None,
    backbone: Annotated[
        str | None,
        typer.Option(help="Frozen causal LM below the student: the teacher of the shards."),
    ] = None,
    init_from: Annotated[
        Path | None,
        typer.Option(
            help="Model whose weights the student starts from: a student's folder, or a language "
            "model of transformers (folder or hub id), whose network it then has."
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="key.path=value, e.g. training.num_steps=500")
    ] = None,
    plan: Annotated[
        bool, typer.Option(help="Print the memory that the run would hold, part by part; no more.")
    ] = False,
    processes: Annotated[int, typer.Option(help="Processes that --plan is made for.")] = 1,
    log_format: LogFormatOption = "plain",
) -> None:
    """Train a student from a store; no teacher is needed."""
    from trainer.initial_weights import network_settings
    from trainer.training.construction import student_class
    from trainer.training.loop import train
    from trainer.training.parallel import leave
    from trainer.training.settings import RunConfig, compose_run, layered, read_recipe

    use_log_format(log_format)
    sources: list[dict[str, Any]] = []
    if preset is not None:
        sources.append(read_recipe(preset))
    if config is not None:
        sources.append(read_toml(config))
    chosen: dict[str, Any] = {
        **({} if conditioning is None else {"conditioning": conditioning}),
        **({} if kd is None else {"kd": {"kind": kd}}),
        **({} if backbone is None else {"backbone": {"location": backbone}}),
    }
    sources.append({} if student is None else {"student": student})
    kind = student_class(str(layered(sources, overrides or []).get("student", RunConfig.student)))
    sources.append(network_settings(init_from, kind, out))
    sources.append({"model": chosen})
    composed = compose_run(sources, overrides or [])
    if plan:
        typer.echo(planned_memory(composed, store, processes))
        return
    finished = train(composed, store, out, init_from=init_from)
    leave()
    if is_first_process():
        done = f"wrote {out / 'model'}" if finished else f"stopped; checkpoint saved below {out}"
        typer.echo(done, err=True)


@app.command("read-again")
def read_again(
    store: Annotated[str, typer.Option(help="Store to train on: a folder or URL.")],
    out: Annotated[Path, typer.Option(help="Folder of this run; the same command resumes it.")],
    student: Annotated[str, typer.Option(help="mdlm or bd3lm.")] = "mdlm",
    preset: Annotated[str, typer.Option(help="tiny, small, medium or maze.")] = "tiny",
    config: Annotated[Path | None, typer.Option(help="TOML file with settings of both.")] = None,
    init_from: Annotated[
        Path | None,
        typer.Option(
            help="A finished student without noise, for the first part, or a language model of "
            "transformers that it begins with."
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="key.path=value, for both parts")
    ] = None,
    log_format: LogFormatOption = "plain",
) -> None:
    """Beyond the paper: a student without noise, then as many steps with noise read again.

    The first part is the preset's length and goes to OUT/plain.
    """
    from shards import open_store
    from trainer.initial_weights import network_settings
    from trainer.read_again import PLAIN, read_again_parts, train_read_again
    from trainer.training.construction import student_class
    from trainer.training.parallel import leave
    from trainer.training.settings import read_recipe

    use_log_format(log_format)
    chosen = [] if config is None else [read_toml(config)]
    chosen.append(network_settings(init_from, student_class(student), out / PLAIN))
    parts = read_again_parts(
        student, open_store(store), read_recipe(preset), chosen, overrides or []
    )
    finished = train_read_again(parts, store, out, init_from)
    leave()
    if is_first_process():
        done = f"wrote {out / 'model'}" if finished else f"stopped; checkpoint saved below {out}"
        typer.echo(done, err=True)


def planned_memory(config: RunConfig, store: str, processes: int) -> str:
    """The text of ``--plan``; a GPU is planned for unless training.device says otherwise."""
    from shards import open_store
    from trainer.training.memory_plan import plan_memory

    device = "cpu" if config.training.device == "cpu" else "cuda"
    planned = plan_memory(config, open_store(store), device=device, world_size=processes)
    return f"peak memory of one of {processes} processes on {device}\n{planned.to_text()}"


@app.command()
def status(
    out: Annotated[Path, typer.Argument(help="Folder of a run, the --out of a training.")],
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """How far a run is and how fast: steps, losses, checkpoints, whether a process is at it."""
    from trainer.training.checkpoint import RunStatus

    found = RunStatus.of(out)
    typer.echo(json.dumps(found.to_json(), indent=2) if as_json else found.to_text())


@app.command("import")
def import_(
    checkpoint: Annotated[Path, typer.Argument(help="Lightning checkpoint of the authors.")],
    out: Annotated[Path, typer.Argument(help="Folder for the model in Hugging Face layout.")],
    ema: Annotated[bool, typer.Option(help="The averaged weights, or the raw ones.")] = True,
    row_length: Annotated[int | None, typer.Option(help="Tokens per row.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens per block (BD3-LM).")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Its tokenizer's folder; without it samples have no text.")
    ] = None,
) -> None:
    """Convert one of the authors' released checkpoints."""
    from trainer.importing import import_checkpoint

    made = import_checkpoint(
        checkpoint, out, ema, row_length=row_length, block_size=block_size, tokenizer=tokenizer
    )
    steps = "" if made.global_step is None else f" after {made.global_step:,} steps"
    typer.echo(
        f"wrote {out}: {made.student}, {made.num_parameters:,} parameters, "
        f"{made.weights} weights{steps}",
        err=True,
    )


@app.command()
def export(
    model: Annotated[Path, typer.Argument(help="A trained medusa or drafter student, RUN/model.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    backbone: Annotated[
        str | None, typer.Option(help="The model it stands on, if not where its config says.")
    ] = None,
) -> None:
    """Write a student as engines load it: vLLM's Medusa heads, or a PEFT folder."""
    from trainer.loading import load_student
    from trainer.serving.export import export as write

    typer.echo(write(load_student(model, backbone=backbone), out))


@app.command()
def overhead(
    vocab_sizes: Annotated[
        str, typer.Option("--vocab-size", help="Vocabularies, with commas between.")
    ] = "32000,50257,128000,152000,256000",
    preset: Annotated[str, typer.Option(help="Shape of the student: small, medium, ...")] = "small",
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="model.*, e.g. model.noise.rank=128")
    ] = None,
    row_length: Annotated[int, typer.Option(help="Tokens per row.")] = 1024,
    rows: Annotated[int, typer.Option(help="Rows per forward pass.")] = 16,
    masked: Annotated[float, typer.Option(help="Share of the tokens that see noise.")] = 0.5,
    device: Annotated[str, typer.Option(help="cuda or cpu: decides the size of tiles.")] = "cuda",
    measure: Annotated[
        bool, typer.Option("--measure", help="Also time steps with and without noise here.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Weights that noise adds to the paper's models, and what it costs at other vocabularies."""
    from dataclasses import asdict

    from trainer.training.overhead import (
        Scale,
        cost_table,
        noise_cost,
        overhead_table,
        parse_vocab_sizes,
    )
    from trainer.training.settings import compose_run

    student = {"architecture": preset, "training": {"num_steps": 1}}
    settings = compose_run([student, {"model": {"conditioning": "gumbel"}}], overrides or []).model
    scale = Scale(settings, row_length, rows, masked, device)
    costs = [noise_cost(scale, size, measure) for size in parse_vocab_sizes(vocab_sizes)]
    if as_json:
        typer.echo(json.dumps([asdict(cost) for cost in costs], indent=2))
        return
    typer.echo(overhead_table())
    typer.echo(f"\n{preset}, {rows} rows of {row_length}, {masked:g} masked, tiles of {device}:")
    typer.echo(cost_table(costs))


def main() -> None:
    """Entry point."""
    run_command(app, settings=settings_app(SETTINGS))


if __name__ == "__main__":
    main()
