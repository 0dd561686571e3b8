"""What a training begins with: its student, AdamW over the weights, and their moving average."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

from shards.errors import UsageError, did_you_mean
from shards.settings import derive_seed, flatten, to_mapping
from shards.store.store import ShardStore
from trainer.students.configuration import StudentSettings, unread_settings
from trainer.students.registry import STUDENTS, Student
from trainer.training.settings import OptimizationConfig, RunConfig


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
        value = getattr(config.model, name, None) if name not in model else model[name]
        if value != defaults.get(name):
            what, got = "a setting that this student does not read", f"{value} with {chosen}"
            remedy = "leave it out, or choose the student that reads it"
            raise UsageError(what, where=f"model.{name}", got=got, remedy=remedy)


def _require_store(config: RunConfig, store: ShardStore) -> None:
    """Refuse a store that lacks what the student is to learn from."""
    model, codec = config.model, store.codec
    distribution = {"kd.kind=token": model.kd.kind == "token"}
    distribution |= {"noise.prior_share": bool(model.noise.prior_share)}
    for name, is_needed in distribution.items():
        if is_needed and not codec.is_fresh:
            what = "the store keeps one draw of the noise, not the teacher's distribution"
            got, remedy = f"codec {codec.name}", "extract with one of them"
            expected = "codec posterior or hidden"
            raise UsageError(what, where=f"model.{name}", got=got, expected=expected, remedy=remedy)
    draws_anew = codec.is_fresh and model.conditioning == "gumbel"
    if config.training.num_noise_draws is not None and not draws_anew:
        what, where = "there are no draws to count", "training.num_noise_draws"
        got = f"codec {codec.name}, model.conditioning={model.conditioning}"
        expected = "a codec that draws anew, and Gumbel noise as conditioning"
        raise UsageError(what, where=where, got=got, expected=expected, remedy="leave it out")
    mode = store.manifest.tokens.get("mode", "parallel")
    if model.kd.kind == "sequence" and mode != "sequential":
        what = "sequence-level distillation trains on rows that the teacher wrote"
        where, remedy = "model.kd.kind=sequence", "gdistill-extract --mode sequential"
        got, expected = f"a store of {mode} extraction", "sequential extraction"
        raise UsageError(what, where=where, got=got, expected=expected, remedy=remedy)
    if model.noise.prior_weight and store.resources.get("unigram_log_probs") is None:
        what = "prior_weight needs the corpus unigram and the store keeps none"
        where = "model.noise.prior_weight"
        remedy = f"extract with a codec that keeps it, or set {where}=0"
        raise UsageError(what, where=where, remedy=remedy)


def learning_rate(config: OptimizationConfig, step: int, num_steps: int) -> float:
    """Learning rate of optimiser step ``step`` (counted from 0) of ``num_steps``.

    (step + 1) / warmup_steps of the peak during the warm-up; then constant, or a half cosine that
    reaches 0 at the last step.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    span = max(1, num_steps - 1 - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def make_optimizer(parameters: Iterable[nn.Parameter], config: OptimizationConfig) -> torch.optim.AdamW:
    """AdamW with the fused kernel, except over sharded parameters."""
    parameters = list(parameters)
    sharded = any(isinstance(parameter, DTensor) for parameter in parameters)
    return torch.optim.AdamW(
        parameters,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        weight_decay=config.weight_decay,
        fused=not sharded,
        foreach=sharded,
    )


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients so that their global L2 norm is at most ``max_norm``.

    Returns:
        The norm before clipping, a float32 scalar; not finite when any gradient is not.
    """
    norm = clip_grad_norm_(parameters, max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def ema_decay(update: int, limit: float) -> float:
    """min(limit, (1 + n) / (10 + n)) for the n-th update, n counted from 1."""
    return min(limit, (1 + update) / (10 + update))


class ExponentialMovingAverage:
    """Shadow weights s <- s - (1 - d) (s - w), in the precision (and sharding) of the weights.

    Attributes:
        shadows: Parameter name -> averaged weights.
        num_updates: Updates so far.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay, self.num_updates = decay, 0
        self._parameters = dict(module.named_parameters())
        self.shadows = {name: w.detach().clone() for name, w in self._parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the current weights."""
        self.num_updates += 1
        decay = ema_decay(self.num_updates, self.decay)
        shadows, weights = (list(each.values()) for each in (self.shadows, self._parameters))
        torch._foreach_lerp_(shadows, weights, 1.0 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within the context the module carries the averaged weights."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for name, shadow in self.shadows.items():
            weights = self._parameters[name]
            kept = weights.clone()
            weights.copy_(shadow)
            shadow.copy_(kept)
