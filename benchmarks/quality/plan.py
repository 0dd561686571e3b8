"""What a bench compares: recipes, their settings and their seeds, read from TOML."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from shards.base import UsageError, read_toml, resolve


@dataclass(frozen=True)
class Recipe:
    """One way to train a student.

    Attributes:
        name: What it is, for tables.
        student: mdlm, bd3lm or ar.
        conditioning: none or gumbel.
        settings: ``key=value`` settings of the trainer, over the plan's.
        init_from: Name of the recipe whose student (of the same seed) this one starts from.
        nfe: Forward passes per sample, instead of the plan's.
    """

    name: str
    student: str = "mdlm"
    conditioning: str = "none"
    settings: tuple[str, ...] = ()
    init_from: str | None = None
    nfe: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Plan:
    """A bench.

    Attributes:
        task: How students are judged.
        extract: Words of ``gdistill-extract``, all but ``--out``.
        recipes: What is compared.
        preset: Recipe of the trainer that all start from.
        settings: ``key=value`` settings that all share.
        seeds: Training seeds of every recipe.
        sample_seeds: Sampling seeds of every student.
        num_samples: Samples per sampling seed.
        nfe: Forward passes per sample.
        judge: ``gdistill-extract`` words of a second store, on which a judge that is not the
            teacher is trained, all but corpus and teacher.
        judge_settings: Settings of that judge, a student of kind ``ar``.
    """

    task: Literal["maze", "stories"]
    extract: tuple[str, ...]
    recipes: tuple[Recipe, ...]
    preset: str = "tiny"
    settings: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (1, 2)
    sample_seeds: tuple[int, ...] = (11, 12)
    num_samples: int = 2000
    nfe: tuple[int, ...] = (1, 2, 4)
    judge: tuple[str, ...] = ()
    judge_settings: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        names = [recipe.name for recipe in self.recipes]
        for recipe in self.recipes:
            if names.count(recipe.name) > 1:
                raise UsageError("two recipes of one name", where="recipes", got=recipe.name)
            if recipe.init_from is not None and recipe.init_from not in names:
                raise UsageError("no such recipe", where="init_from", got=recipe.init_from)

    @property
    def runs(self) -> list[Run]:
        """Every recipe with every seed; those that start from others come behind them."""
        ordered = sorted(self.recipes, key=lambda recipe: recipe.init_from is not None)
        return [Run(recipe, seed) for seed in self.seeds for recipe in ordered]


@dataclass(frozen=True)
class Run:
    """One student."""

    recipe: Recipe
    seed: int

    @property
    def folder(self) -> str:
        """A folder's name that tells recipes apart."""
        return f"{slug(self.recipe.name)}-seed{self.seed}"

    def command(self, plan: Plan, store: Path, home: Path) -> tuple[str, ...]:
        """The words of ``gdistill-train`` that make it."""
        settings = (*plan.settings, *self.recipe.settings, f"seed={self.seed}")
        words = ("gdistill-train", "run", "--store", str(store), "--preset", plan.preset)
        words += ("--student", self.recipe.student, "--conditioning", self.recipe.conditioning)
        words += ("--out", str(home / self.folder))
        if self.recipe.init_from is not None:
            words += ("--init-from", str(home / f"{slug(self.recipe.init_from)}-seed{self.seed}"))
        return (*words, *(word for setting in settings for word in ("--set", setting)))


def slug(name: str) -> str:
    """Letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def read_plan(path: Path, overrides: list[str], only: str = "") -> Plan:
    """The plan in a TOML file, with overrides, of the recipes whose name contains ``only``.

    Raises:
        UsageError: When no recipe has it.
    """
    plan = resolve(Plan, read_toml(path), overrides=overrides)
    chosen = tuple(recipe for recipe in plan.recipes if only in recipe.name)
    if not chosen:
        names = [recipe.name for recipe in plan.recipes]
        raise UsageError("no recipe of that name", where="--only", got=only, expected=names)
    return replace(plan, recipes=chosen)


def remember(path: Path, key: object, value: object) -> None:
    """Keep a finished piece of work with what it was made from."""
    from shards.base import write_json_atomic

    write_json_atomic(path, {"key": key, "value": value})


def recall(path: Path, key: object) -> object | None:
    """The kept value, unless it was made from something else."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return kept["value"] if kept["key"] == json.loads(json.dumps(key)) else None
