"""What a bench compares: recipes, their settings and their seeds, read from TOML."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from shards.atomic import write_json_atomic
from shards.errors import UsageError
from shards.settings import read_toml, resolve

TEACHER = "the teacher"
"""What a student may start from besides another recipe's."""


@dataclass(frozen=True)
class Recipe:
    """One way to train a student.

    Attributes:
        name: What it is, for tables.
        student: mdlm, bd3lm or ar.
        conditioning: none or gumbel.
        settings: ``key=value`` settings of the trainer, over the plan's.
        init_from: Name of the recipe whose student (of the same seed) this one starts from; or
            ``the teacher``, whose layers and weights it then has.
        nfe: Forward passes per sample, instead of the plan's; empty for a sampler that has its own.
        group: The axis of an ablation that it belongs to, for tables and figures.
        store: Name of one of the plan's stores, instead of the one that all share.
        student_of: Name of the recipe whose student is judged, instead of training one.
        sampler: Sampler; maze only.
        sampling: Settings of it, over those that suit the student; maze only.
        verifier: Name of the recipe whose student verifies (``sampler`` apd).
        sweeps: Stories only: folder -> words of ``gdistill-sample``; else what suits the student.
        is_sampled: Stories only: whether it is judged, and not only a start for others.
    """

    name: str
    student: str = "mdlm"
    conditioning: str = "none"
    settings: tuple[str, ...] = ()
    init_from: str | None = None
    nfe: tuple[int, ...] | None = None
    group: str = ""
    store: str = ""
    student_of: str | None = None
    sampler: str = "ancestral"
    sampling: Mapping[str, Any] = field(default_factory=dict)
    verifier: str | None = None
    sweeps: Mapping[str, str] = field(default_factory=dict)
    is_sampled: bool = True

    @property
    def needs(self) -> list[str]:
        """Names of the recipes whose students this one uses."""
        names = (self.init_from, self.student_of, self.verifier)
        return [name for name in names if name and name != TEACHER]


@dataclass(frozen=True)
class StoreWords:
    """A further store: extracted by words of its own, or converted from the one that all share.

    ``extract``: words of ``gdistill-extract``, all but ``--out``; ``{home}`` is the bench's folder.
    ``convert``: words of ``gdistill-shards convert``, all but the stores.
    """

    name: str
    extract: tuple[str, ...] = ()
    convert: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.extract) == bool(self.convert):
            raise UsageError("a store is extracted or converted", where=self.name, got="both or none")


@dataclass(frozen=True)
class Plan:
    """A bench: how students are judged, and what is compared.

    Attributes:
        extract: Words of ``gdistill-extract``, all but ``--out``.
        preset: Recipe of the trainer that all start from; ``key=value`` ``settings`` go over it.
        seeds: Training seeds of every recipe; ``sample_seeds``: of every student.
        num_samples: Samples per sampling seed, of ``nfe`` forward passes each.
        stores: Further stores that recipes name.
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
    stores: tuple[StoreWords, ...] = ()

    def __post_init__(self) -> None:
        names = [recipe.name for recipe in self.recipes]
        for recipe in self.recipes:
            if names.count(recipe.name) > 1:
                raise UsageError("two recipes of one name", where="recipes", got=recipe.name)
            for other in recipe.needs:
                if other not in names:
                    raise UsageError("no such recipe", where=recipe.name, got=repr(other))
            is_bare = recipe.sampler == "ancestral" and not (recipe.sampling or recipe.student_of)
            if self.task == "stories" and not is_bare:
                raise UsageError("stories choose their own samplers", where=recipe.name)
            if recipe.store and recipe.store not in [spec.name for spec in self.stores]:
                raise UsageError("no such store", where=recipe.name, got=recipe.store)

    def begins_with_teacher(self, recipe: Recipe) -> bool:
        """Whether its student, or the one that it goes on from, has the teacher's layers."""
        while recipe.init_from not in (None, TEACHER):
            recipe = next(other for other in self.recipes if other.name == recipe.init_from)
        return recipe.init_from == TEACHER

    @property
    def runs(self) -> list[Run]:
        """Every recipe with every seed; those that use others' students come behind them."""
        ordered = sorted(self.recipes, key=self.depth)
        return [Run(recipe, seed) for seed in self.seeds for recipe in ordered]

    def depth(self, recipe: Recipe) -> int:
        """How many students come before its own, one made from the other.

        Raises:
            UsageError: When recipes need each other in a circle.
        """
        needs = {other.name: other.needs for other in self.recipes}
        behind = set(recipe.needs)
        for depth in range(len(needs) + 1):
            if not behind:
                return depth
            behind = {name for other in behind for name in needs[other]}
        raise UsageError("recipes need each other in a circle", where="recipes", got=recipe.name)


@dataclass(frozen=True)
class Run:
    """One student."""

    recipe: Recipe
    seed: int

    @property
    def folder(self) -> str:
        """A folder's name that tells recipes apart."""
        return f"{slug(self.recipe.name)}-seed{self.seed}"

    def folder_of(self, name: str | None) -> str:
        """The folder of another recipe's student of the same seed; its own without a name.

        Of the teacher too, which has no seed.
        """
        if name == TEACHER:
            return slug(TEACHER)
        return self.folder if name is None else f"{slug(name)}-seed{self.seed}"

    def command(self, plan: Plan, store: Path, home: Path) -> tuple[str, ...]:
        """The words of ``gdistill-train`` that make it."""
        settings = (*plan.settings, *self.recipe.settings, f"seed={self.seed}")
        words = ("gdistill-train", "run", "--store", str(store), "--preset", plan.preset)
        words += ("--student", self.recipe.student, "--conditioning", self.recipe.conditioning)
        words += ("--out", str(home / self.folder))
        if self.recipe.init_from is not None:
            words += ("--init-from", str(home / self.folder_of(self.recipe.init_from)))
        return (*words, *(word for setting in settings for word in ("--set", setting)))


def slug(name: str) -> str:
    """Letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def read_plan(path: Path, overrides: list[str], only: str = "") -> Plan:
    """The plan in a TOML file, with overrides, of the recipes whose name contains ``only``.

    The group's name is as good; recipes whose students the chosen ones use come along.

    Raises:
        UsageError: When no recipe has it.
    """
    plan = resolve(Plan, read_toml(path), overrides=overrides)
    wanted = {recipe.name for recipe in plan.recipes if only in recipe.name or only == recipe.group}
    if not wanted:
        known = sorted({recipe.group or recipe.name for recipe in plan.recipes})
        raise UsageError("no recipe of that name", where="--only", got=only, expected=known)
    while more := {name for r in plan.recipes if r.name in wanted for name in r.needs} - wanted:
        wanted |= more
    return replace(plan, recipes=tuple(r for r in plan.recipes if r.name in wanted))


def remember(path: Path, key: object, value: object) -> None:
    """Keep a finished piece of work with what it was made from."""
    write_json_atomic(path, {"key": key, "value": value})


def recall(path: Path, key: object) -> object | None:
    """The kept value, unless it was made from something else."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return kept["value"] if kept["key"] == json.loads(json.dumps(key)) else None
