"""How far samples are from the text as a whole, at every setting of a sampler.

The entropy within a sample does not see samples that are all alike, and a sampler that keeps to
the likeliest tokens is paid for it in perplexity. The Fréchet distance between the states in which
a judge reads samples and text grows with both faults, poor text and little of it, so every student
is taken where its own is least, and compared there.

    python -m benchmarks.quality.fidelity benchmarks/quality/stories-blocks.toml --home .. \
      --extract .. --judge .. --only 'BD3-LM, blocks of 8' --only 'BD3-LM, blocks of 8 + Gumbel'

goes through students that the bench has trained: plan, --home, --extract and --judge as there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from jaxtyping import Float, Int
from torch import Tensor

from benchmarks.measure import machine
from benchmarks.quality.__main__ import make_judge
from benchmarks.quality.matched import match_students, ratio_lines, ratios
from benchmarks.quality.plan import Plan, Recipe, Run, read_plan, recall, remember
from benchmarks.quality.stories import (
    ORDER_TEMPERATURES,
    SUREST_BY_SAMPLER,
    SUREST_FIRST,
    StoriesBench,
)
from benchmarks.quality.variety import frequency_divergence_nats
from evaluation.curve import matched_table
from shards.base import UsageError, progress_bar, run_command, to_mapping, write_json_atomic
from trainer import load_student

FIGURES = "fidelity.json"
NUCLEUS_PS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
TEMPERATURES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
TAUS = (0.7, 0.85, 1.0, 1.2, 1.5, 2.2, 3.0)
DRAWN_TAUS = (0.7, 0.85, 1.0)
DRAWN_TEMPERATURES = (0.5, 0.7, 0.85, 1.0)
BY_PROBABILITY = "by probability"
Ways = dict[str, dict[str, dict[str, Any]]]


def frechet_distance(x: Float[np.ndarray, "n d"], y: Float[np.ndarray, "m d"]) -> float:
    """Squared Fréchet distance of the Gaussians fitted to x and y (Dowson and Landau 1982).

    |mean_x - mean_y|^2 + tr(C_x + C_y - 2 (C_x C_y)^(1/2)); of language models' states de Masson
    d'Autume et al. 2019, of pictures' FID. Few rows bias it upward: compare equal numbers.

    Raises:
        UsageError: With fewer than two rows, which have no covariance.
    """
    if min(len(x), len(y)) < 2:
        got = f"{len(x)} and {len(y)} rows"
        raise UsageError("a covariance needs two", where="samples", got=got, remedy="--num 64")
    first, second = (np.atleast_2d(np.cov(rows, rowvar=False)) for rows in (x, y))
    values, vectors = np.linalg.eigh(first)
    root = vectors * np.sqrt(values.clip(min=0)) @ vectors.T
    # The trace of (C_x C_y)^(1/2) by the eigenvalues of a symmetric matrix that has the same.
    common = np.sqrt(np.linalg.eigvalsh(root @ second @ root).clip(min=0)).sum()
    apart = ((x.mean(axis=0) - y.mean(axis=0)) ** 2).sum()
    return float(apart + np.trace(first) + np.trace(second) - 2 * common)


@torch.no_grad()
def mean_states(judge: Any, tokens: Int[Tensor, "n l"]) -> Float[np.ndarray, "n d"]:
    """The judge's last states, float64, averaged over all tokens but the first, which is given."""
    body = judge.backbone if hasattr(judge, "backbone") else judge.base_model
    kept: list[Any] = []
    hook = body.register_forward_hook(lambda _module, _inputs, output: kept.append(output))
    try:
        judge(input_ids=tokens)
    finally:
        hook.remove()
    states = getattr(kept[0], "last_hidden_state", kept[0])
    return states[:, 1:].double().mean(dim=1).numpy()


def ways_of(student: Any, nfe: int) -> Ways:
    """Order -> way -> settings of the sampler.

    Where a block has one pass there is no order, and one stands for all.
    """
    surest = SUREST_BY_SAMPLER[student.default_sampler]
    by_probability = {**surest, "confidence": "probability"}
    found = _conditioned(surest, by_probability) if student.is_conditioned else _plain(surest)
    has_order = nfe > student.config.row_length // student.config.tokens_per_block
    left_out = set() if has_order else {BY_PROBABILITY, *list(ORDER_TEMPERATURES)[1:]}
    return {order: ways for order, ways in found.items() if order not in left_out}


def _conditioned(surest: Mapping[str, Any], by_probability: Mapping[str, Any]) -> Ways:
    found: Ways = {
        order: {f"argmax, tau {tau:g}": {**base, "decision": "argmax", "tau": tau} for tau in TAUS}
        for order, base in ((SUREST_FIRST, surest), (BY_PROBABILITY, by_probability))
    }
    for tau in DRAWN_TAUS:
        found[f"{SUREST_FIRST}, drawn at tau {tau:g}"] = {
            f"T {heat:g}": {**surest, "tau": tau, "temperature": heat}
            for heat in DRAWN_TEMPERATURES
        }
    return found


def _plain(surest: Mapping[str, Any]) -> Ways:
    found: Ways = {"ancestral": {f"nucleus {p:g}": {"nucleus_p": p} for p in NUCLEUS_PS}}
    for order, noise in ORDER_TEMPERATURES.items():
        base = {**surest, "confidence": "probability", "order_temperature": noise}
        found[order] = {f"T {heat:g}": {**base, "temperature": heat} for heat in TEMPERATURES}
    return found


class Fidelity:
    """Samples of a bench's students against its validation rows.

    Args:
        bench: Judges, validation rows, samples.
    """

    def __init__(self, bench: StoriesBench) -> None:
        self.bench = bench
        self.corpus = bench.validation[:, 1:].tolist()
        self.states = self._states(bench.validation)

    def _states(self, tokens: Int[Tensor, "n l"]) -> dict[str, Float[np.ndarray, "n d"]]:
        return {name: mean_states(judge, tokens) for name, judge in self.bench.judges.items()}

    def measure(self, folder: Path, budgets: Sequence[int]) -> list[dict[str, Any]]:
        """A figure per NFE, order and way of one student."""
        student: Any = load_student(folder).eval()
        cells = [
            (nfe, order, way, settings)
            for nfe in budgets
            for order, ways in ways_of(student, nfe).items()
            for way, settings in ways.items()
        ]
        found = []
        with progress_bar(folder.name, len(cells), unit="settings") as bar:
            for nfe, order, way, settings in cells:
                tokens = self.bench.draw(student, nfe, settings)
                place = {"nfe": nfe, "order": order, "way": way}
                found.append({**place, **self.figures_of(tokens, student.config.vocab_size)})
                bar.advance(1)
        return found

    def figures_of(self, tokens: Int[Tensor, "n l"], vocab_size: int) -> dict[str, Any]:
        """Scores of each sample, and how far all of them are from the text."""
        samples = tokens[:, 1:].tolist()
        distances = {
            name: frechet_distance(states, self.states[name])
            for name, states in self._states(tokens).items()
        }
        return {
            **self.bench.scores(tokens),
            "divergence_nats": frequency_divergence_nats(samples, self.corpus, vocab_size),
            "distances": distances,
        }


@dataclass(frozen=True)
class Setting:
    """One way of sampling one recipe's students, of all training seeds.

    Attributes:
        recipe: Its name.
        nfe: Forward passes.
        order: Of the sampler.
        way: And the rest of its settings.
        distances: Judge -> Fréchet distance to the validation rows, of each seed's student.
        perplexities: Judge -> perplexity of all samples.
        entropy_nats: Mean entropy within a sample.
        divergence_nats: KL of token frequencies from the corpus's, mean over seeds.
    """

    recipe: str
    nfe: int
    order: str
    way: str
    distances: Mapping[str, tuple[float, ...]]
    perplexities: Mapping[str, float]
    entropy_nats: float
    divergence_nats: float

    def distance(self, judge: str) -> float:
        """Mean over seeds."""
        return float(np.mean(self.distances[judge]))


def settings_of(recipe: str, seeds: Sequence[Sequence[Mapping[str, Any]]]) -> list[Setting]:
    """The figures of a recipe's students, setting by setting."""
    return [_setting(recipe, cells) for cells in zip(*seeds, strict=True)]


def _setting(recipe: str, cells: Sequence[Mapping[str, Any]]) -> Setting:
    first = cells[0]
    judges = tuple(first["distances"])
    return Setting(
        recipe,
        first["nfe"],
        first["order"],
        first["way"],
        {judge: tuple(cell["distances"][judge] for cell in cells) for judge in judges},
        {judge: _perplexity(cells, judge) for judge in judges},
        float(np.mean([cell["entropies"] for cell in cells])),
        float(np.mean([cell["divergence_nats"] for cell in cells])),
    )


def _perplexity(cells: Sequence[Mapping[str, Any]], judge: str) -> float:
    sums = [cell["nll_sums"][judge] for cell in cells]
    num_tokens = sum(len(cell["entropies"]) * cell["num_tokens"] for cell in cells)
    return math.exp(sum(map(sum, sums)) / num_tokens)


def nearest(settings: Sequence[Setting], judge: str) -> dict[tuple[str, int], Setting]:
    """(Recipe, NFE) -> where its students' mean distance is least."""
    found: dict[tuple[str, int], Setting] = {}
    for setting in sorted(settings, key=lambda setting: setting.distance(judge)):
        found.setdefault((setting.recipe, setting.nfe), setting)
    places = dict.fromkeys((setting.recipe, setting.nfe) for setting in settings)
    return {place: found[place] for place in places}


def nearest_lines(settings: Sequence[Setting], judge: str, judges: Sequence[str]) -> list[str]:
    """A row per recipe and NFE, with the perplexities by all judges."""
    head = [
        f"nearest the text ({judge})",
        "NFE",
        "distance",
        "of each seed",
        f"perplexity there ({', '.join(judges)})",
        "entropy, nats",
        "KL of frequencies, nats",
        "sampled",
    ]
    lines = [head, ["---"] * len(head)]
    for (recipe, nfe), best in nearest(settings, judge).items():
        seeds = ", ".join(f"{value:.2f}" for value in best.distances[judge])
        perplexities = ", ".join(f"{best.perplexities[name]:.0f}" for name in judges)
        numbers = [f"{best.distance(judge):.2f}", seeds, perplexities]
        numbers += [f"{best.entropy_nats:.2f}", f"{best.divergence_nats:.3f}"]
        lines.append([recipe, str(nfe), *numbers, f"{best.order}, {best.way}"])
    return ["| " + " | ".join(line) + " |" for line in lines]


def by_order(
    figures: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]],
) -> dict[str, list[dict[str, Any]]]:
    """``recipe; order`` -> samples per seed, as :mod:`benchmarks.quality.matched` reads them."""
    found: dict[str, list[dict[str, Any]]] = {}
    for recipe, seeds in figures.items():
        for order in dict.fromkeys(cell["order"] for cell in seeds[0]):
            found[f"{recipe}; {order}"] = [{"samples": _nested(cells, order)} for cells in seeds]
    return found


def _nested(cells: Sequence[Mapping[str, Any]], order: str) -> dict[str, dict[str, Any]]:
    samples: dict[str, dict[str, Any]] = {}
    for cell in (cell for cell in cells if cell["order"] == order):
        samples.setdefault(str(cell["nfe"]), {})[cell["way"]] = cell
    return samples


def fidelity(
    plan_file: Annotated[Path, typer.Argument(help="TOML file of recipes.")],
    home: Annotated[Path, typer.Option(help="Where the bench has its stores and students.")],
    extract: Annotated[str, typer.Option(help="As of the bench; the teacher is read of it.")],
    judge: Annotated[str, typer.Option(help="As of the bench.")] = "",
    out: Annotated[Path, typer.Option(help="Results.")] = Path("benchmarks/results"),
    only: Annotated[list[str] | None, typer.Option(help="Recipes, by their whole names.")] = None,
    nfe: Annotated[str, typer.Option(help="Forward passes, 4,8; else the recipe's own.")] = "",
    num: Annotated[int, typer.Option(min=2, help="Samples per setting.")] = 256,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key=value")] = None,
) -> None:
    """Sweep every sampler of trained students; interrupted, the same command goes on."""
    plan = replace(read_plan(plan_file, overrides or []), num_samples=num)
    if plan.task != "stories":
        raise UsageError("samples of text are wanted", where=plan_file, got=f"task {plan.task!r}")
    recipes = chosen(plan, only or [])
    torch.set_num_threads(1)
    words = extract.split()
    if "--teacher" not in words:
        raise UsageError("no judge", where="--extract", got=extract, expected="--teacher FOLDER")
    teacher = words[words.index("--teacher") + 1]
    bench = StoriesBench(plan, home, teacher, make_judge(plan, judge.split(), home, 1))
    work = Fidelity(bench)
    budgets = tuple(map(int, nfe.split(","))) if nfe else None
    figures = {
        recipe.name: [swept(work, plan, recipe, seed, budgets) for seed in plan.seeds]
        for recipe in recipes
    }
    settings = [setting for name, seeds in figures.items() for setting in settings_of(name, seeds)]
    table = table_of(plan, bench, figures, settings)
    place = out / f"quality-{plan_file.stem}-fidelity"
    out.mkdir(parents=True, exist_ok=True)
    results = {"machine": machine(torch.device("cpu")), "plan": to_mapping(plan)}
    found = [asdict(setting) for setting in settings]
    write_json_atomic(place.with_suffix(".json"), {**results, "settings": found})
    place.with_suffix(".md").write_text("\n".join(table) + "\n", encoding="utf-8")
    typer.echo("\n".join(table))


def chosen(plan: Plan, names: Sequence[str]) -> tuple[Recipe, ...]:
    """The recipes of these names; all where none is given.

    Raises:
        UsageError: For a name that the plan has not.
    """
    known = [recipe.name for recipe in plan.recipes]
    if unknown := set(names) - set(known):
        raise UsageError("no such recipe", where="--only", got=sorted(unknown), expected=known)
    return tuple(recipe for recipe in plan.recipes if not names or recipe.name in names)


def swept(
    work: Fidelity, plan: Plan, recipe: Recipe, seed: int, budgets: tuple[int, ...] | None
) -> Any:
    """Figures of one student, kept beside it."""
    run = Run(recipe, seed)
    folder = work.bench.home / run.folder
    budgets = budgets or recipe.nfe or plan.nfe
    key = [
        run.command(plan, work.bench.home / "store", work.bench.home),
        [plan.num_samples, list(plan.sample_seeds), list(budgets)],
    ]
    found = recall(folder / FIGURES, key)
    if found is None:
        found = work.measure(folder, budgets)
        remember(folder / FIGURES, key, found)
    return found


def table_of(
    plan: Plan,
    bench: StoriesBench,
    figures: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]],
    settings: Sequence[Setting],
) -> list[str]:
    """By each judge: where each recipe is nearest the text, and perplexity at its entropy."""
    entropy, sweeps = bench.reference()["entropy_nats"], by_order(figures)
    lines: list[str] = []
    for judge in bench.judges:
        matched = matched_table(
            match_students(sweeps, judge, entropy), entropy, f"the validation rows; judge: {judge}"
        )
        lines += [
            *nearest_lines(settings, judge, tuple(bench.judges)),
            "",
            matched.to_markdown(),
            "",
        ]
        lines += [*ratio_lines(ratios(plan, sweeps, judge, entropy)), ""]
    return lines[:-1]


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(fidelity)
    run_command(app)
