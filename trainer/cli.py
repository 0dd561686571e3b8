"""``gdistill-train``: train, see how far a run is, import the authors' checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from shards.console import command_app, is_first_process, run_command
from shards.errors import Stopped
from shards.settings import nested, read_toml
from shards.settings_table import Section, settings_app

SETTINGS = (Section("a training run", "trainer.training.settings:RunConfig"),)
StoreOption = Annotated[str, typer.Option(help="Store to train on: a folder or URL.")]
OutOption = Annotated[Path, typer.Option(help="Folder of this run; the same command resumes it.")]
ConfigOption = Annotated[Path | None, typer.Option(help="TOML file with the run's settings.")]
InitOption = Annotated[
    Path | None,
    typer.Option(
        help="Model whose weights the student starts from: a student's folder, or a language "
        "model of transformers (folder or hub id), whose network it then has."
    ),
]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="key.path=value, e.g. training.num_steps=500")]
PRESETS = "tiny, small, medium or maze."
app = command_app(
    no_args_is_help=True,
    help="Train students, see how far a run is, import the authors' checkpoints. "
    "`gdistill-train settings [WORD]` lists every key of --set with default and meaning.",
)


@app.command()
def run(
    store: StoreOption,
    out: OutOption,
    student: Annotated[str | None, typer.Option(help="mdlm, bd3lm, ar, medusa or drafter.")] = None,
    preset: Annotated[str | None, typer.Option(help=PRESETS)] = None,
    config: ConfigOption = None,
    conditioning: Annotated[str | None, typer.Option(help="none or gumbel.")] = None,
    kd: Annotated[
        str | None, typer.Option(help="none, token (KL to stored probabilities), or sequence (teacher's rows)")
    ] = None,
    backbone: Annotated[
        str | None, typer.Option(help="Frozen causal LM below the student: the teacher of the shards.")
    ] = None,
    init_from: InitOption = None,
    overrides: SetOption = None,
) -> None:
    """Train a student from a store; no teacher is needed."""
    from trainer.training.settings import RunConfig, compose_run, layered, read_recipe, student_class

    words = overrides or []
    sources: list[dict[str, Any]] = [] if preset is None else [read_recipe(preset)]
    sources += [] if config is None else [read_toml(config)]
    sources += [] if student is None else [{"student": student}]
    kind = student_class(str(layered(sources, words).get("student", RunConfig.student)))
    if init_from is not None:
        from trainer.initial_weights import network_settings

        sources.append(network_settings(init_from, kind, out))
    named = {"model.conditioning": conditioning, "model.kd.kind": kd, "model.backbone.location": backbone}
    sources += [nested(name.split("."), value) for name, value in named.items() if value is not None]
    composed = compose_run(sources, words)
    from trainer.training.loop import train

    _finish(lambda: train(composed, store, out, init_from=init_from))


@app.command("two-stage")
def two_stage(
    store: StoreOption,
    out: OutOption,
    student: Annotated[str, typer.Option(help="mdlm or bd3lm.")] = "mdlm",
    preset: Annotated[str, typer.Option(help=PRESETS)] = "tiny",
    config: ConfigOption = None,
    init_from: InitOption = None,
    overrides: SetOption = None,
) -> None:
    """Beyond the paper: a student without noise, then as many steps with noise cross-attention.

    The first part is the preset's length and goes to OUT/plain; --init-from a finished student
    without noise stands in its place. --config and --set are for both.
    """
    from shards.store.store import ShardStore
    from trainer.initial_weights import network_settings
    from trainer.training.settings import PLAIN, read_recipe, student_class
    from trainer.two_stage import train_two_stage, two_stage_parts

    chosen = [] if config is None else [read_toml(config)]
    begun = out / PLAIN if (out / PLAIN).exists() else out  # knows the network of both parts
    chosen.append(network_settings(init_from, student_class(student), begun))
    opened, recipe = ShardStore.find(store), read_recipe(preset)
    parts = two_stage_parts(student, opened, recipe, chosen, overrides or [])
    _finish(lambda: train_two_stage(parts, store, out, init_from))


def _finish(training: Callable[[], Path]) -> None:
    """Train; the first process says what was made, and what to type next."""
    from trainer.training.parallel import leave

    try:
        model = training()
    except Stopped:  # all processes stop at the same step
        leave()
        raise
    leave()
    if is_first_process():
        typer.echo(f"wrote {model}\nnext: gdistill-sample {model.parent} --num 8 --out samples", err=True)


@app.command()
def status(
    out: Annotated[Path, typer.Argument(help="Folder of a run, the --out of a training.")],
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """How far a run is and how fast: steps, losses, checkpoints, whether a process is at it."""
    from trainer.training.status import status_text

    typer.echo(status_text(out, as_json))


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

    sizes = {"row_length": row_length, "block_size": block_size}
    student, made = import_checkpoint(checkpoint, out, ema, tokenizer=tokenizer, **sizes)
    steps = "" if made["global_step"] is None else f" after {made['global_step']:,} steps"
    facts = f"{made['student']}, {student.num_parameters():,} parameters, {made['weights']} weights{steps}"
    typer.echo(f"wrote {out}: {facts}\nnext: gdistill-sample {out} --num 8 --out samples", err=True)


@app.command()
def export(
    model: Annotated[Path, typer.Argument(help="A trained medusa student, RUN/model.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    backbone: Annotated[str | None, typer.Option(help="The model it stands on, if not where its config says.")] = None,
) -> None:
    """Write a student as engines load it: vLLM's Medusa heads."""
    from trainer.loading import load_student
    from trainer.serving.export import export as write

    typer.echo(write(load_student(model, backbone=backbone), out))


def main() -> None:
    """Entry point."""
    run_command(app, settings=partial(settings_app, SETTINGS))


if __name__ == "__main__":
    main()
