"""What one training run is, the student it begins with, and the names of what lies in its folder.

A run is composed from a recipe (``presets/NAME.toml`` or a file), command-line flags and
``--set`` overrides, and written resolved as ``config.json`` beside its outputs. Needs no torch
before a student is built.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shards.errors import UsageError, did_you_mean
from shards.settings import (
    check_bounds,
    derive_seed,
    flatten,
    merge,
    nested,
    parse_override,
    resolve,
    setting,
    to_mapping,
)
from trainer.students.configuration import StudentSettings, read_named, read_preset, unread_settings

if TYPE_CHECKING:
    from shards.store.store import ShardStore
    from trainer.students.registry import Student

RECIPES = Path(__file__).resolve().parents[1] / "presets"
AMOUNTS = {"num_steps", "num_epochs"}
CONFIG_FILE, METRICS_FILE, STATE_FILE = "config.json", "metrics.jsonl", "state.json"
CHECKPOINTS, MODEL, PREFIX = "checkpoints", "model", "step-"
PLAIN = "plain"
"""Folder of the first part of a two-stage training, below the run's."""


def checkpoint_steps(directory: Path) -> list[int]:
    """Steps of all whole checkpoints in ``OUT/checkpoints``, ascending."""
    try:
        names = [path.name for path in directory.iterdir()] if directory.exists() else []
        whole = [name for name in names if (directory / name / STATE_FILE).exists()]
    except OSError as error:
        got, remedy = error.strerror, "give another --out"
        raise UsageError("cannot read there", where=directory, got=got, remedy=remedy) from error
    numbers = (name.removeprefix(PREFIX) for name in whole if name.startswith(PREFIX))
    return sorted(int(number) for number in numbers if number.isdigit())


@dataclass(frozen=True)
class OptimizationConfig:
    """AdamW, its learning rate over time, clipping and the moving average of the weights.

    Attributes:
        learning_rate: Peak learning rate.
        beta1: First-moment decay.
        beta2: Second-moment decay.
        weight_decay: Decoupled weight decay.
        schedule: After the warm-up: constant, or half a cosine down to 0 at the last step.
        warmup_steps: Steps of linear warm-up.
        max_grad_norm: Global gradient norm above which gradients are scaled down.
        ema_decay: d in min(d, (1 + n) / (10 + n)), the average's decay at update n.
    """

    learning_rate: float = setting(3e-4, within="(0, inf)")
    beta1: float = setting(0.9, within="[0, 1)")
    beta2: float = setting(0.999, within="[0, 1)")
    weight_decay: float = setting(0.0, within="[0, inf)")
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: int = setting(2500, within="[0, inf)")
    max_grad_norm: float = setting(1.0, within="(0, inf)")
    ema_decay: float = setting(0.9999, within="[0, 1)")

    def __post_init__(self) -> None:
        check_bounds(self, "optimization")

    def rate_at(self, step: int, num_steps: int) -> float:
        """Learning rate of optimiser step ``step`` (counted from 0) of ``num_steps``.

        (step + 1) / warmup_steps of the peak during the warm-up; then constant, or a half cosine
        that reaches 0 at the last step.
        """
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.learning_rate
        progress = (step - self.warmup_steps) / max(1, num_steps - 1 - self.warmup_steps)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class TrainingConfig:
    """How much work, in which pieces, on what, and what is written along the way.

    Attributes:
        num_steps: Optimiser steps; this or num_epochs.
        num_epochs: Passes: the run ends with the step that has met so many times the rows.
        global_batch_size: Rows per step over all processes.
        micro_batch_size: Rows per forward pass; gradients accumulate. none: a process's share.
        precision: bf16 is autocast over float32 weights; fp32 is float32 throughout.
        device: auto is CUDA where there is one.
        sharding: ddp keeps weights, optimiser and average on every process; fsdp shards them.
        num_workers: Threads that read shards ahead; 0 reads one batch ahead.
        num_noise_draws: Draws of its noise that a row meets, pass by pass, in a circle; none: ever
            new.
        noise_kernel: Keyed noise by torch.compile or not, the same bits; auto compiles it on CUDA.
        log_every_steps: Steps between lines of metrics.jsonl; step 1 always gets one.
        validate_every_steps: Steps between validations; the last step always gets one.
        num_validation_rows: Rows of the validation split to use, from its beginning; none is all.
        checkpoint_every_steps: Steps between checkpoints; the last step always gets one.
        keep_last: Newest checkpoints to keep.
        keep_every_steps: Also keep checkpoints at multiples of this; none keeps no more.
        trackers: Beside metrics.jsonl: tensorboard, and wandb where it is installed.
    """

    num_steps: int | None = setting(None, within="[1, inf)")
    num_epochs: int | None = setting(None, within="[1, inf)")
    global_batch_size: int = setting(512, within="[1, inf)")
    micro_batch_size: int | None = setting(None, within="[1, inf)")
    precision: Literal["bf16", "fp32"] = "bf16"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    sharding: Literal["ddp", "fsdp"] = "ddp"
    num_workers: int = setting(2, within="[0, inf)")
    num_noise_draws: int | None = setting(None, within="[1, inf)")
    noise_kernel: Literal["auto", "eager", "compiled"] = "auto"
    log_every_steps: int = setting(50, within="[1, inf)")
    validate_every_steps: int = setting(10_000, within="[1, inf)")
    num_validation_rows: int | None = setting(None, within="[1, inf)")
    checkpoint_every_steps: int = setting(5_000, within="[1, inf)")
    keep_last: int = setting(2, within="[1, inf)")
    keep_every_steps: int | None = setting(None, within="[1, inf)")
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ("tensorboard",)

    def __post_init__(self) -> None:
        check_bounds(self, "training")
        if (self.num_steps is None) == (self.num_epochs is None):
            got = "neither" if self.num_steps is None else "both"
            expected = "num_steps or num_epochs"
            raise UsageError("how long to train", where="training", got=got, expected=expected)

    def steps_over(self, num_rows: int) -> int:
        """Steps of the run on a train split of ``num_rows`` rows."""
        rows = (self.num_epochs or 0) * num_rows
        return self.num_steps or -(-rows // self.global_batch_size)


@dataclass(frozen=True)
class RunConfig:
    """One training run.

    Attributes:
        training: Amount and pieces of work.
        student: Name in the student registry.
        seed: Decides initial weights, order, times, masks, noise draws and dropout.
    """

    training: TrainingConfig
    student: str = "mdlm"
    seed: int = 0
    model: StudentSettings = field(default_factory=StudentSettings)
    optimization: OptimizationConfig = field(default_factory=OptimizationConfig)


def read_recipe(name: str) -> dict[str, Any]:
    """The settings of a named recipe."""
    return read_named(RECIPES, name, "unknown preset", "--preset")


def compose_run(sources: Iterable[Mapping[str, Any]], overrides: Iterable[str] = ()) -> RunConfig:
    """The config that recipes, flags and overrides make together (:func:`layered`).

    Raises:
        UsageError: For unknown keys (naming the nearest known one), bad values, or no amount of training.
    """
    values = layered(sources, overrides)
    if "training" not in values:
        remedy = "give --preset, --config or --set training.num_steps=N"
        raise UsageError("how long to train is not said", where="training", remedy=remedy)
    return resolve(RunConfig, values)


def layered(sources: Iterable[Mapping[str, Any]], overrides: Iterable[str] = ()) -> dict[str, Any]:
    """The values that recipes, flags and overrides make together, not yet checked; later ones win.

    A source may name an ``architecture`` (a student preset), which its own ``model`` table and later sources refine.
    One that sets ``num_steps`` or ``num_epochs`` replaces the other.
    """
    words: dict[str, Any] = {}
    for text in overrides:
        words = merge(words, nested(*parse_override(text)))
    values: dict[str, Any] = {}
    for source in map(dict, [*sources, words]):
        for table in ("model", "training"):
            if not isinstance(source.get(table, {}), Mapping):
                raise UsageError("wrong type in config", where=table, got=source[table], expected="a table")
        architecture = source.pop("architecture", None)
        if architecture is not None:
            values = merge(values, {"model": read_preset(str(architecture))})
        if len(AMOUNTS & set(source.get("training", {}))) == 1:
            before = values.get("training", {})
            values["training"] = {k: v for k, v in before.items() if k not in AMOUNTS}
        values = merge(values, source)
    return values


# What a run begins with, checked against its store; here alone torch is imported.


def student_class(name: str) -> type[Student]:
    """The student of that name; an unknown one is a UsageError with the nearest known one."""
    from trainer.students.registry import STUDENTS

    if name not in STUDENTS:
        hint = did_you_mean(name, STUDENTS, f"known students: {sorted(STUDENTS)}")
        raise UsageError("unknown student", where="student", got=name, remedy=hint)
    return STUDENTS[name]


def build_student(config: RunConfig, store: ShardStore, init_from: Path | None) -> Student:
    """The student at step 0; initial weights depend on the run seed alone, or are those of ``init_from``.

    Raises:
        UsageError: When student, settings, store and first weights do not fit each other.
    """
    import torch

    manifest, kind = store.manifest, student_class(config.student)
    _refuse_idle_settings(config, kind)
    _require_store(config, store)
    torch.manual_seed(derive_seed(config.seed, "initial weights"))
    student = kind.make(config.model, manifest)
    if init_from is not None:
        from trainer.initial_weights import load_initial_weights

        load_initial_weights(student, init_from, store)
    if student.is_conditioned:
        student.config.codec = dict(manifest.codec)
    if student.conditioner is not None and config.model.noise.prior_weight:
        student.conditioner.set_unigram(store.resources["unigram_log_probs"].float())
    return student


def _refuse_idle_settings(config: RunConfig, kind: type[Student]) -> None:
    """Settings that would be left undone without a word."""
    model, defaults = (flatten(to_mapping(each)) for each in (config.model, StudentSettings()))
    idle = dict.fromkeys(unread_settings(kind.reads), f"student {config.student}")
    if config.model.conditioning == "none":
        idle |= dict.fromkeys((n for n in model if n.startswith("noise.")), "conditioning=none")
    if config.model.kd.kind != "token":
        idle |= dict.fromkeys(("kd.weight", "kd.temperature"), f"kd.kind={config.model.kd.kind}")
    for name, chosen in sorted(idle.items()):
        value = model[name] if name in model else getattr(config.model, name)
        if value != defaults.get(name):
            what, got = "a setting that this student does not read", f"{value} with {chosen}"
            remedy = "leave it out, or choose the student that reads it"
            raise UsageError(what, where=f"model.{name}", got=got, remedy=remedy)


def _require_store(config: RunConfig, store: ShardStore) -> None:
    """Refuse a store that lacks what the student is to learn from."""
    model, codec = config.model, store.codec
    for where, is_needed in (
        ("kd.kind=token", model.kd.kind == "token"),
        ("noise.prior_share", model.noise.prior_share),
    ):
        if is_needed and not codec.is_fresh:
            what = "the store keeps one draw of the noise, not the teacher's distribution"
            got, expected = f"codec {codec.name}", "codec posterior or hidden"
            remedy = "extract with one of them"
            raise UsageError(what, where=f"model.{where}", got=got, expected=expected, remedy=remedy)
    draws_anew = codec.is_fresh and model.conditioning == "gumbel"
    if config.training.num_noise_draws is not None and not draws_anew:
        got = f"codec {codec.name}, model.conditioning={model.conditioning}"
        remedy = "leave training.num_noise_draws out, or train with Gumbel noise of a codec that draws anew"
        raise UsageError("there are no draws to count", where="training.num_noise_draws", got=got, remedy=remedy)
    mode = store.manifest.tokens.get("mode", "parallel")
    if model.kd.kind == "sequence" and mode != "sequential":
        what, remedy = "sequence-level distillation needs rows of the teacher", "gdistill-extract --mode sequential"
        raise UsageError(what, where="model.kd.kind", got=f"a store of {mode} extraction", remedy=remedy)
    if model.noise.prior_weight and store.resources.get("unigram_log_probs") is None:
        remedy = "extract with a codec that keeps it, or set model.noise.prior_weight=0"
        raise UsageError("the store keeps no corpus unigram", where="model.noise.prior_weight", remedy=remedy)
