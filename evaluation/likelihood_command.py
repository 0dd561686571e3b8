"""``gdistill-eval perplexity`` and ``gdistill-lm-eval``: what students make of given text."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from evaluation.report import Table, write_report
from evaluation.samples import read_data_rows
from evaluation.score import Score
from shards.atomic import require_writable
from shards.console import run_command
from shards.settings import code_version


def perplexity(
    model: Annotated[Path, typer.Argument(help="Model folder, or the --out of a training.")],
    data: Annotated[list[Path], typer.Argument(help="Stores or tokens/ folders of gdistill-extract.")],
    noise: Annotated[
        Literal["posterior", "prior", "none", "all"],
        typer.Option(help="Noise of a conditioned student: the store's, drawn anew, or both (all)."),
    ] = "all",
    split: Annotated[str, typer.Option(help="Split of the data.")] = "validation",
    rows: Annotated[int | None, typer.Option(min=1, help="At most so many rows.")] = None,
    draws: Annotated[int, typer.Option(min=1, help="Times, masks and noise drawn for each row.")] = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows at a time; changes no number.")] = 16,
    seed: Annotated[int, typer.Option(help="Of times, masks and noise.")] = 0,
    out: Annotated[Path, typer.Option(help="Where to write.")] = Path("perplexity"),
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Validation perplexity of a student on stores and token datasets."""
    from evaluation.likelihood.validation import validation_perplexity
    from shards.language_model.forward import resolve_device
    from shards.store.manifest import MANIFEST_FILE
    from trainer.students.folder import open_model

    read = [(place, read_data_rows(place, split, rows)) for place in data]
    require_writable(out)
    folder = open_model(model, resolve_device(device))
    scored = []
    for place, part in read:
        store = next((p for p in (place, place / "store") if (p / MANIFEST_FILE).is_file()), None)
        known: Any = ("prior",) if store is None else ("posterior", "prior")
        if noise != "all":
            known = (noise,)
        elif not folder.student.is_conditioned:
            known = ("none",)
        for source in known:
            score = validation_perplexity(
                folder.student,
                part,
                noise=source,
                store=store,
                split=split,
                num_draws=draws,
                batch_size=batch_size,
                seed=seed,
            )
            scored.append((place, part.name, score))
    table = _table([(name, score) for _, name, score in scored])
    facts = {"student": str(folder.student.config.model_type), "weights_sha256": folder.weights_sha256}
    page = write_report(
        out,
        title="Validation perplexity",
        summary=f"{facts['student']} {facts['weights_sha256'][:12]}.",
        tables=[table],
        results={
            f"{place}, noise {score.settings['noise']}": {
                "name": f"{name}, noise {score.settings['noise']}",
                "drawn_with": {**facts, "seed": seed},
                "nfe_mean": None,
                "code_version": code_version(),
                "scores": [score.to_json()],
            }
            for place, name, score in scored
        },
    )
    typer.echo(table.to_text())
    typer.echo(f"wrote {out / 'results.json'} and {page}")


def _table(scored: list[tuple[str, Score]]) -> Table:
    rows = []
    for name, score in scored:
        value = f"{score.value:.2f}" + (" (conditional)" if score.cautions else "")
        interval = "-" if score.interval is None else "[{:.2f}, {:.2f}]".format(*score.interval)
        nats = f"{score.details['nll_nats_per_token']:.3f}"
        noise, estimate = (str(score.settings[key]) for key in ("noise", "estimate"))
        rows.append((name, noise, value, interval, nats, estimate))
    cautions = tuple(dict.fromkeys(f"(conditional): {c}" for _, s in scored for c in s.cautions))
    header = ("data", "noise", "perplexity", "95% interval", "nats per token", "estimate")
    return Table("Validation perplexity", header, tuple(rows), notes=cautions)


def lm_eval() -> None:
    """``gdistill-lm-eval``: the harness's own command, with the student among its models."""

    def evaluate() -> None:
        # The harness finds models in its registry alone, which this import fills.
        import_module("evaluation.likelihood.harness")
        from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]

        cli_evaluate()

    run_command(evaluate)
