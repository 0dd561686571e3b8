"""What one training run is, and the names of what lies in its folder. Needs no torch.

A run is composed from a recipe (``presets/NAME.toml`` or a file), command-line flags and
``--set`` overrides, and written resolved as ``config.json`` beside its outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from shards.errors import UsageError, did_you_mean
from shards.settings import check_bounds, merge, nested, parse_override, read_toml, resolve, setting
from trainer.students.configuration import StudentSettings, read_preset

RECIPES = Path(__file__).resolve().parents[1] / "presets"
AMOUNTS = {"num_steps", "num_epochs"}
CONFIG_FILE, METRICS_FILE, STATE_FILE = "config.json", "metrics.jsonl", "state.json"
CHECKPOINTS, MODEL, PREFIX = "checkpoints", "model", "step-"
PLAIN = "plain"
"""Folder of the first part of a two-stage training, below the run's."""


def checkpoint_steps(directory: Path) -> list[int]:
    """Steps of all whole checkpoints in ``OUT/checkpoints``, ascending.

    Raises:
        UsageError: When the folder cannot be read.
    """
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
        num_workers: Threads that read shards ahead; 0 reads in the training thread.
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
    """The settings of a named recipe.

    Raises:
        UsageError: For an unknown name, with the nearest known one.
    """
    known = sorted(path.stem for path in RECIPES.glob("*.toml"))
    if name not in known:
        hint = did_you_mean(name, known, f"known presets: {known}")
        raise UsageError("unknown preset", where="--preset", got=name, remedy=hint)
    return read_toml(RECIPES / f"{name}.toml")


def compose_run(sources: Iterable[Mapping[str, Any]], overrides: Iterable[str] = ()) -> RunConfig:
    """The config that recipes, flags and overrides make together; see :func:`layered`.

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
        architecture, training = source.pop("architecture", None), source.get("training")
        if architecture is not None:
            values = merge(values, {"model": read_preset(str(architecture))})
        if isinstance(training, Mapping) and len(AMOUNTS & set(training)) == 1:
            before = values.get("training", {})
            values["training"] = {k: v for k, v in before.items() if k not in AMOUNTS}
        values = merge(values, source)
    return values
