"""From a config and a store to a student, fresh or from the weights of another one."""

from __future__ import annotations

from pathlib import Path

import torch

from shards.codec.protocol import Codec
from shards.errors import UsageError, did_you_mean
from shards.provenance import derive_seed
from shards.settings import flatten, to_mapping
from shards.store.store import ShardStore
from trainer.initial_weights import load_initial_weights, noise_parameters
from trainer.students.configuration import unread_settings
from trainer.students.registry import STUDENTS, Student, StudentSettings
from trainer.training.settings import RunConfig


def student_class(name: str) -> type[Student]:
    """The student of that name.

    Raises:
        UsageError: For an unknown name, with the nearest known one.
    """
    if name not in STUDENTS:
        hint = did_you_mean(name, STUDENTS, f"known students: {sorted(STUDENTS)}")
        raise UsageError("unknown student", where="student", got=name, remedy=hint)
    return STUDENTS[name]


def build_student(config: RunConfig, store: ShardStore, init_from: Path | None) -> Student:
    """The student at step 0; initial weights depend on the run seed alone.

    Args:
        config: The run.
        store: What it trains on.
        init_from: A model to begin with; None begins with drawn weights.

    Raises:
        UsageError: When student, settings, store and first weights do not fit each other.
    """
    manifest, model = store.manifest, config.model
    kind = student_class(config.student)
    _refuse_idle_settings(config, kind)
    _require_store(config, store)
    torch.manual_seed(derive_seed(config.seed, "initial weights"))
    student = kind.make(model, manifest)
    if config.optimization.noise_learning_rate_ratio != 1 and not noise_parameters(student):
        raise UsageError(
            "no weight brings noise in",
            where="optimization.noise_learning_rate_ratio",
            got=f"{config.student}, model.conditioning={model.conditioning}",
            remedy="leave it out",
        )
    if init_from is not None:
        load_initial_weights(student, init_from, store)
    if student.is_conditioned:
        student.config.codec = dict(manifest.codec)
    if student.conditioner is not None and model.noise.prior_weight:
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
        value = getattr(config.model, name, None) if name not in model else model[name]
        if value != defaults.get(name):
            raise UsageError(
                "a setting that this student does not read",
                where=f"model.{name}",
                got=f"{value} with {chosen}",
                remedy="leave it out, or choose the student that reads it",
            )


def _require_store(config: RunConfig, store: ShardStore) -> None:
    """Refuse a store that lacks what the student is to learn from."""
    model, draws = config.model, config.training.num_noise_draws
    if model.kd.kind == "token":
        require_fresh(store.codec, "model.kd.kind=token")
    if model.noise.prior_share:
        require_fresh(store.codec, "model.noise.prior_share")
    if draws is not None and not (store.codec.is_fresh and model.conditioning == "gumbel"):
        raise UsageError(
            "there are no draws to count",
            where="training.num_noise_draws",
            got=f"codec {store.codec.name}, model.conditioning={model.conditioning}",
            expected="a codec that draws anew, and Gumbel noise as conditioning",
            remedy="leave it out",
        )
    mode = store.manifest.tokens.get("mode", "parallel")
    if model.kd.kind == "sequence" and mode != "sequential":
        raise UsageError(
            "sequence-level distillation trains on rows that the teacher wrote",
            where="model.kd.kind=sequence",
            got=f"a store of {mode} extraction",
            expected="sequential extraction",
            remedy="gdistill-extract --mode sequential",
        )
    if model.noise.prior_weight and store.resources.get("unigram_log_probs") is None:
        raise UsageError(
            "prior_weight needs the corpus unigram and the store keeps none",
            where="model.noise.prior_weight",
            remedy="extract with a codec that keeps it, or set model.noise.prior_weight=0",
        )


def require_fresh(codec: Codec, where: str) -> None:
    """Refuse a store that keeps one draw of the noise where the distribution is needed.

    Raises:
        UsageError: Naming the setting ``where``.
    """
    if not codec.is_fresh:
        raise UsageError(
            "the store keeps one draw of the noise, not the teacher's distribution",
            where=where,
            got=f"codec {codec.name}",
            expected="codec posterior or hidden",
            remedy="extract with one of them",
        )
