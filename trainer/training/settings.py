"""What one training run is: student, objective, optimiser, schedule of work.

A run is composed from a recipe (``presets/NAME.toml`` or a file), command-line flags and
``--set`` overrides, and written resolved as ``config.json`` beside its outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from shards.errors import UsageError, did_you_mean
from shards.noise.philox import NoiseKernel
from shards.settings import flatten, merge, nested, parse_override, read_toml, resolve, to_mapping
from shards.store.manifest import Manifest
from trainer.initial_weights import find_source
from trainer.students.registry import STUDENTS, StudentSettings, read_preset

RECIPES = Path(__file__).resolve().parents[1] / "presets"


def _require(condition: bool, name: str, got: object, expected: str) -> None:
    if not condition:
        raise UsageError("bad training setting", where=name, got=got, expected=expected)


@dataclass(frozen=True)
class OptimizationConfig:
    """AdamW, its learning rate over time, clipping and the moving average of the weights.

    Attributes:
        learning_rate: Peak learning rate.
        noise_learning_rate_ratio: Peak learning rate of the weights that bring noise in, over that:
            above 1 for a student that begins as a finished one without noise.
        beta1: First-moment decay.
        beta2: Second-moment decay.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay.
        schedule: After the warm-up, constant or a cosine down to ``final_learning_rate_ratio``.
        warmup_steps: Steps of linear warm-up.
        final_learning_rate_ratio: Where a cosine ends, as a share of the peak.
        max_grad_norm: Global gradient norm above which gradients are scaled down.
        ema_decay: d in min(d, (1 + n) / (10 + n)), the decay of the moving average at update n.
    """

    learning_rate: float = 3e-4
    noise_learning_rate_ratio: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: int = 2500
    final_learning_rate_ratio: float = 0.0
    max_grad_norm: float = 1.0
    ema_decay: float = 0.9999

    def __post_init__(self) -> None:
        positive = ("learning_rate", "noise_learning_rate_ratio", "eps", "max_grad_norm")
        for name in positive:
            value = getattr(self, name)
            _require(0 < value < math.inf, f"optimization.{name}", value, "above 0 and finite")
        for name in ("beta1", "beta2", "ema_decay"):
            value = getattr(self, name)
            _require(0 <= value < 1, f"optimization.{name}", value, "in [0, 1)")
        for name in ("weight_decay", "warmup_steps", "final_learning_rate_ratio"):
            value = getattr(self, name)
            _require(0 <= value < math.inf, f"optimization.{name}", value, "0 or more, finite")


@dataclass(frozen=True)
class TrainingConfig:
    """How much work, in which pieces, on what, and what is written along the way.

    Attributes:
        num_steps: Optimiser steps; give this or ``num_epochs``.
        num_epochs: Passes over the train split, in rows: the run ends with the step that has met
            ``num_epochs`` times its rows (a pass itself ends with its last full batch).
        global_batch_size: Rows per optimiser step over all processes.
        micro_batch_size: Rows per forward pass of one process; smaller ones accumulate gradients.
            None runs a process's whole share at once.
        precision: ``bf16`` is autocast over float32 weights; ``fp32`` is float32 throughout.
        device: ``auto`` is CUDA where there is one.
        sharding: ``ddp`` keeps the weights on every process, ``fsdp`` shards them (and the
            optimiser and the moving average).
        num_workers: Threads that read shards ahead; 0 reads in the training thread.
        num_noise_draws: Distinct draws that a row of a store of distributions meets, one per pass
            and then again from the first; None draws anew in every pass.
        noise_kernel: How keyed noise is computed, the same bits either way: ``compiled`` by
            torch.compile (three times faster on CPUs), ``eager``, or ``auto``, compiled on CUDA.
        compile: Whether transformer blocks run through torch.compile: ``on``, ``off``, or
            ``auto``, on CUDA where a trial at the start succeeds. Rounding and dropout differ.
        log_every_steps: Steps between lines of metrics.jsonl; step 1 always gets one.
        validate_every_steps: Steps between validations; the last step always gets one.
        validation_batch_size: Rows per validation batch over all processes; None is
            ``global_batch_size``.
        num_validation_rows: Rows of the validation split to use, from its beginning; None is all.
        checkpoint_every_steps: Steps between checkpoints; the last step always gets one.
        keep_last: Newest checkpoints to keep.
        keep_every_steps: Also keep checkpoints at multiples of this; None keeps no more.
        trackers: Beside metrics.jsonl: ``tensorboard``, and ``wandb`` where it is installed.
        peak_flops_per_second: Peak of one device for the utilisation figure (MFU); None looks the
            device up and leaves MFU out where it is unknown.
    """

    num_steps: int | None = None
    num_epochs: int | None = None
    global_batch_size: int = 512
    micro_batch_size: int | None = None
    precision: Literal["bf16", "fp32"] = "bf16"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    sharding: Literal["ddp", "fsdp"] = "ddp"
    num_workers: int = 2
    num_noise_draws: int | None = None
    noise_kernel: NoiseKernel = "auto"
    compile: Literal["auto", "on", "off"] = "auto"
    log_every_steps: int = 50
    validate_every_steps: int = 10_000
    validation_batch_size: int | None = None
    num_validation_rows: int | None = None
    checkpoint_every_steps: int = 5_000
    keep_last: int = 2
    keep_every_steps: int | None = None
    trackers: tuple[str, ...] = ("tensorboard",)
    peak_flops_per_second: float | None = None

    def __post_init__(self) -> None:
        amounts = (self.num_steps is None) + (self.num_epochs is None)
        _require(amounts == 1, "training.num_steps", "both or neither", "num_steps or num_epochs")
        for name, value in vars(self).items():
            if isinstance(value, int) and name != "num_workers":
                _require(value >= 1, f"training.{name}", value, "at least 1")
        _require(self.num_workers >= 0, "training.num_workers", self.num_workers, "0 or more")
        known = ("tensorboard", "wandb")
        for tracker in self.trackers:
            _require(tracker in known, "training.trackers", tracker, f"one of {known}")

    def steps_over(self, num_rows: int) -> int:
        """Steps of the run on a train split of ``num_rows`` rows."""
        if self.num_steps is not None:
            return self.num_steps
        return -(-(self.num_epochs or 1) * num_rows // self.global_batch_size)


@dataclass(frozen=True)
class RunConfig:
    """One training run.

    Attributes:
        training: Amount and pieces of work.
        student: Name in the student registry.
        seed: Decides initial weights, order, times, masks, noise draws and dropout.
        model: Architecture and objective of the student.
        optimization: Optimiser and schedule.
    """

    training: TrainingConfig
    student: str = "mdlm"
    seed: int = 0
    model: StudentSettings = field(default_factory=StudentSettings)
    optimization: OptimizationConfig = field(default_factory=OptimizationConfig)


OPERATIONAL = (
    "training.checkpoint_every_steps",
    "training.compile",
    "training.device",
    "training.keep_every_steps",
    "training.keep_last",
    "training.noise_kernel",
    "training.num_workers",
    "training.peak_flops_per_second",
    "training.sharding",
    "training.trackers",
    "model.attention",
)
"""Fields that may change when a run resumes: they decide how it runs, not what it computes."""


def operational_fields(config: RunConfig) -> set[str]:
    """Fields a resumed run may change.

    Without dropout, whose draws follow the micro-batches, their size is one. A run may also be
    prolonged unless its end decides what comes before: by a cosine down to it, or by the search
    for clips that the last validation makes.
    """
    fields: set[str] = {*OPERATIONAL}
    if not config.model.dropout:
        fields.add("training.micro_batch_size")
    if config.optimization.schedule == "constant" and not config.model.search_schedule:
        fields |= {"training.num_steps", "training.num_epochs"}
    return fields


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
    """The config that recipes, flags and overrides make together; later ones win.

    A source may name an ``architecture`` (a student preset), which its own ``model`` table and
    later sources refine. One that sets ``num_steps`` or ``num_epochs`` replaces the other.

    Raises:
        UsageError: For unknown keys (naming the nearest known one), bad values, or no amount of
            training.
    """
    return run_of(layered(sources, overrides))


def layered(sources: Iterable[Mapping[str, Any]], overrides: Iterable[str] = ()) -> dict[str, Any]:
    """The values that recipes, flags and overrides make together, not yet checked."""
    values: dict[str, Any] = {}
    for source in [*sources, *(nested(*parse_override(text)) for text in overrides)]:
        values = _layer(values, source)
    return values


def run_of(values: Mapping[str, Any]) -> RunConfig:
    """The config of layered values; see :func:`compose_run` for the errors."""
    if "training" not in values:
        remedy = "give --preset, --config or --set training.num_steps=N"
        raise UsageError("how long to train is not said", where="training", remedy=remedy)
    return resolve(RunConfig, values)


def _layer(values: dict[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
    source = dict(source)
    architecture = source.pop("architecture", None)
    if architecture is not None:
        values = merge(values, {"model": read_preset(str(architecture))})
    training = source.get("training")
    amounts = {"num_steps", "num_epochs"}
    if isinstance(training, Mapping) and len(amounts & set(training)) == 1:
        kept = {k: v for k, v in values.get("training", {}).items() if k not in amounts}
        values = {**values, "training": kept}
    return merge(values, source)


# What makes two runs the same run: the resolved config and the store, compared field by field.


STORE_FIELDS = (
    "vocab_size",
    "row_length",
    "codec",
    "teacher",
    "tokenizer",
    "tokens",
    "splits",
    "seed",
    "bos_id",
    "eos_id",
    "mask_id",
    "format_version",
)
MEANT_BEFORE = {"config.model.own_noise": "seen"}
"""What runs did before a setting came, where its default is another; else the default is it."""


def store_essentials(manifest: Manifest) -> dict[str, Any]:
    """What a model must remember of the store it was trained on, and the store's seal."""
    document = manifest.to_json()
    return {**{name: document[name] for name in STORE_FIELDS}, "sha256": manifest.sha256}


def run_identity(config: RunConfig, manifest: Manifest, init_from: Path | None) -> dict[str, Any]:
    """Everything that decides what a run computes, as JSON."""
    return {
        "config": to_mapping(config),
        "store": store_essentials(manifest),
        "init_from": _start(init_from),
    }


def _start(init_from: Path | None) -> dict[str, Any] | None:
    """The first weights by their content; a run that has begun no longer needs the files."""
    if init_from is None:
        return None
    try:
        digest = find_source(init_from).weights_sha256
    except UsageError:
        digest = None
    return {"weights_sha256": digest, "place": str(init_from)}


def require_same_run(
    saved: Mapping[str, Any], ours: Mapping[str, Any], free: Set[str]
) -> dict[str, Any]:
    """Refuse to resume a run as another one.

    Args:
        saved: Identity in the checkpoint; of an older version it may lack settings that came later.
        ours: Identity asked for now.
        free: Config fields that may differ.

    Returns:
        Ours, with what of the first weights only the checkpoint still knows.

    Raises:
        UsageError: Naming the first field that differs, with both values.
    """
    start = _same_start(saved.get("init_from"), ours.get("init_from"))
    before, now = (flatten({**run, "init_from": None}) for run in (saved, ours))
    defaults = {"config": to_mapping(RunConfig(TrainingConfig(num_steps=1)))}
    before = {**flatten(defaults), **MEANT_BEFORE, **before}
    foreign = STUDENTS[ours["config"]["student"]].foreign_settings
    ignored = {f"config.{name}" for name in (*free, *(f"model.{name}" for name in foreign))}
    for name in [*now, *(name for name in before if name not in now)]:
        old, new = before.get(name), now.get(name)  # what is absent is none
        if old != new and name not in ignored:
            raise UsageError(
                "this run was started with another setting",
                where=name.removeprefix("config."),
                got=repr(new),
                expected=f"{old!r} as in the checkpoint",
                remedy="resume with the old value, or give another --out",
            )
    return {**ours, "init_from": start}


def _same_start(saved: Any, ours: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The same first weights, wherever they lie now; where they cannot be read, the same place.

    Raises:
        UsageError: For other weights, or when it cannot be told.
    """
    # Runs of older versions remember the place alone, as a string.
    before = {"weights_sha256": None, "place": saved} if isinstance(saved, str) else saved
    if before is None or ours is None:
        same = before is ours
    elif before["weights_sha256"] and ours["weights_sha256"]:
        same = before["weights_sha256"] == ours["weights_sha256"]
    else:
        same = before["place"] == ours["place"]
    if not same:
        raise UsageError(
            "this run was started from other weights",
            where="--init-from",
            got=_told(ours),
            expected=f"{_told(before)}, as in the checkpoint",
            remedy="resume with the same weights, or give another --out",
        )
    return before if ours is None or not ours["weights_sha256"] else ours


def _told(start: Mapping[str, Any] | None) -> str:
    if start is None:
        return "none"
    digest = start["weights_sha256"]
    return f"{start['place']} ({f'weights {digest[:12]}' if digest else 'weights not known'})"
