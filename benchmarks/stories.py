"""Students on real text with a real teacher: learning curves, conditional against unconditional.

    python -m benchmarks.stories --corpus 'text:DIR/*.txt' --teacher DIR/stories260K

One store, three students of one size, seed and data order: MDLM, MDLM + Gumbel with the paper's
conditioner (prior_weight 0) and with the corpus unigram in it (prior_weight 1). Each goes through
the commands: extraction, training, sampling, scoring. Writes ``stories-SHAPE.json`` and ``.png``.

The noise reaches a student as softmax(xi) W, D numbers for V arrival times. In a ``wide`` student
(D = V) the rows of W can be orthogonal and every xi read; in a ``narrow`` one (D = V / 4) a token's
weight drowns among the others' unless its xi is among the very largest.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.measure import machine
from evaluation.figures import PALETTE, WITH_NOISE, WITHOUT_NOISE, figure_file
from shards.atomic import write_json_atomic
from shards.console import run_command
from shards.errors import GdistillError, UsageError
from shards.store.manifest import MANIFEST_FILE

NFE = (8, 32)
BATCH_ROWS = 16
TRAINING = (
    "training.precision=bf16",
    "training.noise_kernel=compiled",
    f"training.global_batch_size={BATCH_ROWS}",
    "training.validate_every_steps=400",
    "training.log_every_steps=200",
    "training.checkpoint_every_steps=1000",
)


@dataclass(frozen=True)
class Shape:
    """A size of student with the learning rate that suits it and a default number of steps."""

    settings: tuple[str, ...]
    num_steps: int


SHAPES = {
    "wide": Shape(
        (
            "model.hidden_size=512",
            "model.num_layers=2",
            "model.num_heads=8",
            "optimization.learning_rate=5e-4",
            "optimization.warmup_steps=200",
        ),
        num_steps=8_000,
    ),
    "narrow": Shape(
        (
            "model.hidden_size=128",
            "model.num_layers=4",
            "model.num_heads=4",
            "optimization.learning_rate=1e-3",
            "optimization.warmup_steps=100",
        ),
        num_steps=16_000,
    ),
}


DRAWS = {f"nucleus-{p:g}": ("--nucleus-p", p) for p in (1.0, 0.9, 0.8, 0.7, 0.6)}
ARGMAX = {f"argmax-{tau:g}": ("--decision", "argmax", "--tau", tau) for tau in (1.0, 0.85)}


@dataclass(frozen=True)
class Contestant:
    """One student of the comparison.

    ``sampling`` names ways to sample. Each trades entropy for generative perplexity, so students
    are to be compared where their entropies are equal. Those that see noise can also be decoded by
    argmax.
    """

    name: str
    conditioning: str
    prior_weight: float
    sampling: Mapping[str, tuple[object, ...]]

    @property
    def folder(self) -> str:
        return f"mdlm-{self.conditioning}-w{self.prior_weight:g}"


CONTESTANTS = (
    Contestant("MDLM", "none", 0.0, DRAWS),
    *(
        Contestant(f"MDLM + Gumbel, w = {weight:g}", "gumbel", weight, DRAWS | ARGMAX)
        for weight in (0.0, 1.0)
    ),
)


COLOURS = (WITHOUT_NOISE, WITH_NOISE, PALETTE[2])
"""Of the contestants."""


def call(module: str, *words: object) -> float:
    """Run one of the project's commands; returns its seconds.

    Raises:
        GdistillError: When the command fails; it has said why.
    """
    start = time.monotonic()
    command = [sys.executable, "-m", module, *map(str, words)]
    code = subprocess.run(command, check=False).returncode
    if code:
        raise GdistillError("a stage of the benchmark failed", where=module, got=f"exit {code}")
    return time.monotonic() - start


def extract(corpus: str, teacher: str, home: Path) -> float:
    """The store all students share; 5% of the documents are for validation."""
    words = ("--corpus", corpus, "--teacher", teacher, "--out", home, "--row-length", 128)
    return call("pipeline.cli", *words, "--set", "corpus.validation_fraction=0.05")


def train(
    contestant: Contestant, home: Path, shape: Sequence[str], num_steps: int, seed: int
) -> float:
    """Train one student from the store."""
    settings = (
        *TRAINING,
        *shape,
        f"training.num_steps={num_steps}",
        f"model.prior_weight={contestant.prior_weight}",
        f"seed={seed}",
    )
    overrides = [word for setting in settings for word in ("--set", setting)]
    words = ("--store", home / "store", "--student", "mdlm", "--preset", "tiny")
    words += ("--conditioning", contestant.conditioning, "--out", home / contestant.folder)
    return call("trainer.cli", "run", *words, *overrides)


def sample_and_score(contestant: Contestant, home: Path, judge: str, seed: int) -> dict[str, Any]:
    """Way of sampling -> file -> generative perplexity under the teacher, and entropy."""
    figures = {}
    for way, options in contestant.sampling.items():
        out = home / contestant.folder / f"samples-{way}"
        nfe = ",".join(map(str, NFE))
        words = (home / contestant.folder, "--out", out, "--num", 64, "--nfe", nfe, *options)
        call("trainer.sample_cli", *words, "--seed", seed)
        call("evaluation.cli", out, "--judge", judge)
        scored = json.loads((out / "results.json").read_text())
        figures[way] = {Path(file).name: _figures(part) for file, part in scored.items()}
    return figures


def _figures(scored: Mapping[str, Any]) -> dict[str, Any]:
    """Value and interval of every score."""
    values = {
        score["name"]: {"value": score["value"], "interval_95": score["interval_95"]}
        for score in scored["scores"]
    }
    return {"nfe_mean": scored["nfe_mean"], **values}


def curves(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Lines of metrics.jsonl by kind."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {kind: [x for x in lines if x["kind"] == kind] for kind in ("train", "validation")}


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Validation NLL over tokens seen, and generative perplexity over entropy."""
    with figure_file(path, 1, 2, size=(13, 4.4)) as (figure, panels):
        learning, sampling = panels[0]
        _draw_curves(learning, results)
        _draw_samples(sampling, results["students"])
        learning.legend()
        sampling.legend(handlelength=3, loc="center left", bbox_to_anchor=(1, 0.5))
        figure.suptitle(f"Stories: three {results['shape']} students of one store, one seed")


def _draw_curves(axes: Any, results: Mapping[str, Any]) -> None:
    """The teacher's own NLL is a line."""
    for (name, student), color in zip(results["students"].items(), COLOURS, strict=True):
        points = student["curves"]["validation"]
        tokens = [line["step"] * results["tokens_per_step"] / 1e6 for line in points]
        values = [line["nll_nats"] for line in points]
        axes.plot(tokens, values, marker="o", ms=3, color=color, label=name)
    teacher = results["teacher_nll_nats"]
    axes.axhline(teacher, color="grey", ls="--", lw=1, label="teacher, left to right")
    axes.set_xlabel("training tokens, millions")
    axes.set_ylabel("validation NLL, nats per token")


def _draw_samples(axes: Any, students: Mapping[str, Any]) -> None:
    """A colour per student; filled marks are the larger NFE. Draws are dots, argmax is stars.

    Only what was measured gets an entry of the legend: some draws are one point, no line.
    """
    for (name, student), color in zip(students.items(), COLOURS, strict=True):
        for nfe in NFE:
            face = {"color": color, "mfc": None if nfe == NFE[-1] else "none"}
            for is_argmax, kind in ((False, "drawn"), (True, "argmax")):
                points = _points(student["samples"], nfe, is_argmax)
                style = "*" if is_argmax else ("o-" if nfe == NFE[-1] else "o--")
                if len(points) == 1:
                    style = style[0]
                if points:
                    label = f"{name}, NFE {nfe}, {kind}"
                    size = 10 if is_argmax else 5
                    axes.plot(*zip(*points, strict=True), style, ms=size, label=label, **face)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.tick_params(axis="y", which="both", labelsize=8)
    axes.set_xlabel("entropy, nats (right is more varied)")
    axes.set_ylabel("generative perplexity (lower is better)")


def _points(samples: Mapping[str, Any], nfe: int, is_argmax: bool) -> list[tuple[float, float]]:
    """(entropy, generative perplexity) of the ways to sample, in the order of entropy."""
    chosen = [
        figures[f"samples-nfe{nfe}.jsonl"]
        for way, figures in samples.items()
        if way.startswith("argmax") == is_argmax
    ]
    return sorted(
        (figures["entropy_nats"]["value"], figures["generative_perplexity"]["value"])
        for figures in chosen
    )


def teacher_nll(store: Path) -> float:
    """Mean -log p of the validation tokens under the teacher, from the store itself."""
    from shards.store.store import ShardStore

    reader = ShardStore.open(store).split("validation", ["token_log_probs"])
    rows = reader.read_rows(0, reader.num_rows)["token_log_probs"]
    return float(-rows[:, 1:].mean())


def summary(results: Mapping[str, Any]) -> Sequence[str]:
    """One line per student."""
    lines = [f"teacher              validation NLL {results['teacher_nll_nats']:.3f}"]
    for name, student in results["students"].items():
        last = student["curves"]["validation"][-1]
        kind = "given noise" if last["conditional"] else "bound"
        lines.append(f"{name:<21}validation NLL {last['nll_nats']:.3f} ({kind})")
    return lines


def run(
    corpus: Annotated[str, typer.Option(help="Corpus of the teacher's kind.")],
    teacher: Annotated[str, typer.Option(help="Teacher; also the judge of samples.")],
    home: Annotated[Path, typer.Option(help="Stores and students.")] = Path("out/stories"),
    out: Annotated[Path, typer.Option(help="Results.")] = Path("benchmarks/results"),
    shape: Annotated[str, typer.Option(help="wide or narrow.")] = "wide",
    num_steps: Annotated[
        int | None, typer.Option(help="Training steps of 16 x 128 tokens; the shape's.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Training and sampling seed.")] = 0,
) -> None:
    """Run the comparison; interrupted, the same command goes on."""
    if shape not in SHAPES:
        raise UsageError("unknown shape", where=shape, expected=f"one of {sorted(SHAPES)}")
    num_steps = num_steps or SHAPES[shape].num_steps
    results: dict[str, Any] = {
        "machine": machine(torch.device("cpu")),
        "shape": shape,
        "settings": [*TRAINING, *SHAPES[shape].settings],
        "num_steps": num_steps,
        "seed": seed,
        "seconds": {"extract": extract(corpus, teacher, home)},
        "students": {},
    }
    manifest = json.loads((home / "store" / MANIFEST_FILE).read_text())
    results["tokens_per_step"] = BATCH_ROWS * manifest["row_length"]
    results["teacher_nll_nats"] = teacher_nll(home / "store")
    results["store"] = {name: manifest[name] for name in ("codec", "splits", "teacher")}
    results["store"]["tokens_fingerprint"] = manifest["tokens"]["fingerprint"]
    for contestant in CONTESTANTS:
        seconds = train(contestant, home, SHAPES[shape].settings, num_steps, seed)
        results["seconds"][contestant.name] = seconds
        results["students"][contestant.name] = {
            "prior_weight": contestant.prior_weight,
            "conditioning": contestant.conditioning,
            "curves": curves(home / contestant.folder),
            "samples": sample_and_score(contestant, home, teacher, seed),
        }
    out.mkdir(parents=True, exist_ok=True)
    write_json_atomic(out / f"stories-{shape}.json", results)
    draw(results, out / f"stories-{shape}.png")
    for line in summary(results):
        typer.echo(line)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(run)
    run_command(app)
