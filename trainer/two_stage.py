"""The recipe beyond the paper, per kind of student: without noise first, then with it.

A student that has learnt to read the text learns to read noise the sooner: added to the mask's
embedding, the corpus unigram beside it, and again by attention behind its blocks (noise
cross-attention). The weights and rates of a kind are in ``presets/two_stage/<kind>.toml``; a
user's own settings go before them, in both parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shards.console import is_first_process, stderr
from shards.errors import UsageError
from shards.settings import flatten, merge
from shards.store.store import ShardStore
from trainer.initial_weights import find_source
from trainer.students.configuration import read_named, unread_settings
from trainer.students.registry import STUDENTS
from trainer.training.loop import train
from trainer.training.settings import CONFIG_FILE, MODEL, PLAIN, RunConfig, build_student, compose_run, layered

RECIPES = Path(__file__).resolve().parent / "presets" / "two_stage"
LARGE_VOCABULARY = 4096
"""From here on noise is attended to behind two blocks, among the top k: over all of V a layer costs
two products with [V, D] per masked position (benchmarks/results/readings.json)."""
TOP_K = 256


def noise_layers_of(num_layers: int, vocab_size: int) -> dict[str, Any]:
    """Behind every block; at large vocabularies behind two, at thirds, among the top k."""
    if vocab_size < LARGE_VOCABULARY:
        return {"layers": list(range(1, num_layers + 1))}
    thirds = sorted({max(1, num_layers // 3), max(1, 2 * num_layers // 3)})
    return {"layers": thirds, "top_k": TOP_K}


def two_stage_parts(
    student: str,
    store: ShardStore,
    preset: Mapping[str, Any],
    chosen: Sequence[Mapping[str, Any]] = (),
    overrides: Iterable[str] = (),
) -> tuple[RunConfig, RunConfig]:
    """The two runs of the recipe: without noise, and what goes on from it with noise.

    Args:
        student: Kind of the student with noise.
        store: What both are trained on.
        preset: Architecture and amount of the first part. The second has as many steps and a
            multiple of its peak learning rate.
        chosen: The user's own settings, and
        overrides: his ``key=value`` words: they go before the recipe's in both parts, but those
            that only noise or only the second part's kind has a use for.

    Raises:
        UsageError: For a student without such a recipe, for settings that the recipe decides, and
            as :func:`compose_run`.
    """
    recipe, overrides = read_named(RECIPES, student, "no recipe for this student", "--student"), list(overrides)
    asked = flatten(layered(chosen, overrides))
    for where, expected in {"student": student, "model.conditioning": "gumbel"}.items():
        if (got := asked.get(where, expected)) != expected:
            what = "the two-stage recipe decides this"
            remedy = "leave it out, or gdistill-train run (make train RECIPE=paper)"
            raise UsageError(what, where=where, got=got, expected=expected, remedy=remedy)
    first = layered([preset, recipe["plain"], *chosen], overrides)
    idle = {"noise", "conditioning", *unread_settings(STUDENTS[recipe["first"]].reads)}
    model = {k: v for k, v in first.get("model", {}).items() if k not in idle}
    no_draws = {"training": {"num_noise_draws": None}}
    plain = compose_run([merge({**first, "student": recipe["first"], "model": model}, no_draws)])
    num_steps = plain.training.steps_over(store.manifest.splits["train"])
    layers = noise_layers_of(plain.model.num_layers, store.manifest.vocab_size)
    own = merge(recipe["noise"], {"model": {"noise": layers}})
    decided = {
        "student": student,
        "model": {"conditioning": "gumbel"},
        "training": {"num_steps": num_steps, "num_epochs": None},
        "optimization": {
            "learning_rate": recipe["learning_rate_factor"] * plain.optimization.learning_rate,
            "warmup_steps": min(plain.optimization.warmup_steps, num_steps // 10),
        },
    }
    return plain, compose_run([merge(layered([preset, own, *chosen], overrides), decided)])


def train_two_stage(
    parts: tuple[RunConfig, RunConfig], store: str | Path, out: Path, init_from: Path | None = None
) -> Path:
    """Train both parts, the first in ``out/plain``; the same call goes on where one was stopped.

    Args:
        parts: The runs.
        store: Path or URL of a finished store.
        out: Folder of the student with noise.
        init_from: A finished student without noise, in place of the first part; or a language
            model, with which the first part begins.

    Returns:
        The folder of the model with noise.

    Raises:
        UsageError: Also, before the first part, for a store that the second cannot train on.
    """
    plain, noise = parts
    build_student(noise, ShardStore.find(store), None)  # what it cannot be is said at once
    begun = (out / CONFIG_FILE).exists()  # then the source need not be there any more
    if init_from and not (out / PLAIN).exists() and (begun or find_source(init_from).language_model is None):
        return train(noise, store, out, init_from=init_from)
    for number, (config, folder) in enumerate(((plain, out / PLAIN), (noise, out)), 1):
        if is_first_process():
            stderr.print(f"part {number} of 2")
        train(config, store, folder, init_from=init_from)
        init_from = folder
    return out / MODEL
