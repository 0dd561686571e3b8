"""From a config and a store to a student, fresh or from the weights of another one, compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from shards.codec.protocol import Codec
from shards.errors import GdistillError, UsageError, did_you_mean, first_line
from shards.provenance import derive_seed
from shards.settings import flatten, to_mapping
from shards.store.store import ShardStore
from trainer.initial_weights import load_initial_weights, noise_parameters
from trainer.students.configuration import unread_settings
from trainer.students.dit import Block, Half, Rotary, compiled_halves, full_attention
from trainer.students.registry import STUDENTS, Student, StudentSettings
from trainer.training.settings import RunConfig

COMPILED_TOLERANCES = {"fp32": 1e-4, "bf16": 0.05}
"""How far a compiled block may lie from itself uncompiled, as a share of what it adds (root mean
squares): some ten roundings, of 2^-24 and of 2^-9, lie between the two, and as much room again."""


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
    """The student at step 0; initial weights depend on the run seed alone."""
    manifest = store.manifest
    kind = student_class(config.student)
    _refuse_idle_settings(config, kind)
    _require_taught(config.model.kd.kind, store)
    if config.model.noise.prior_share:
        require_fresh(store.codec, "model.noise.prior_share")
    if config.training.num_noise_draws is not None and not (
        store.codec.is_fresh and config.model.conditioning == "gumbel"
    ):
        raise UsageError(
            "there are no draws to count",
            where="training.num_noise_draws",
            got=f"codec {store.codec.name}, model.conditioning={config.model.conditioning}",
            expected="a codec that draws anew, and Gumbel noise as conditioning",
            remedy="leave it out",
        )
    torch.manual_seed(derive_seed(config.seed, "initial weights"))
    student = kind.make(config.model, manifest)
    if config.optimization.noise_learning_rate_ratio != 1 and not noise_parameters(student):
        raise UsageError(
            "no weight brings noise in",
            where="optimization.noise_learning_rate_ratio",
            got=f"{config.student}, model.conditioning={config.model.conditioning}",
            remedy="leave it out",
        )
    if init_from is not None:
        load_initial_weights(student, init_from, store)
    if student.is_conditioned:
        student.config.codec = dict(manifest.codec)
    if student.conditioner is not None and student.settings.noise.prior_weight:
        student.conditioner.set_unigram(_unigram(store))
    return student


def _refuse_idle_settings(config: RunConfig, kind: type[Student]) -> None:
    """Settings that would be left undone without a word."""
    idle = [(name, f"student {config.student}") for name in unread_settings(kind.reads)]
    model, defaults = (flatten(to_mapping(each)) for each in (config.model, StudentSettings()))
    if config.model.conditioning == "none":
        idle += [(name, "model.conditioning=none") for name in model if name.startswith("noise.")]
    if config.model.kd.kind != "token":
        chosen = f"model.kd.kind={config.model.kd.kind}"
        idle += [("kd.weight", chosen), ("kd.temperature", chosen)]
    for name, chosen in sorted(idle):
        value = getattr(config.model, name, None) if name not in model else model[name]
        if value != defaults.get(name):
            raise UsageError(
                "a setting of another student",
                where=f"model.{name}",
                got=f"{value} with {chosen}",
                remedy="leave it out, or choose the student it belongs to",
            )


def require_fresh(codec: Codec, where: str) -> None:
    """Refuse a store that keeps one draw of the noise where the distribution is needed."""
    if not codec.is_fresh:
        raise UsageError(
            "the store keeps one draw of the noise, not the teacher's distribution",
            where=where,
            got=f"codec {codec.name}",
            expected="codec posterior or hidden",
            remedy="extract with one of them",
        )


def _require_taught(kd: str, store: ShardStore) -> None:
    """Refuse a store that lacks what the student is to learn from its teacher."""
    if kd == "token":
        require_fresh(store.codec, "model.kd.kind=token")
    mode = store.manifest.tokens.get("mode", "parallel")
    if kd == "sequence" and mode != "sequential":
        raise UsageError(
            "sequence-level distillation trains on rows that the teacher wrote",
            where="model.kd.kind=sequence",
            got=f"a store of {mode} extraction",
            expected="sequential extraction",
            remedy="gdistill-extract --mode sequential",
        )


def _unigram(store: ShardStore) -> torch.Tensor:
    log_probs = store.resources.get("unigram_log_probs")
    if log_probs is None:
        raise UsageError(
            "prior_weight needs the corpus unigram and the store keeps none",
            where="model.noise.prior_weight",
            remedy="extract with a codec that keeps it, or set model.noise.prior_weight=0",
        )
    return log_probs.float()


def compile_blocks(
    student: Student, config: RunConfig, device: torch.device, backend: str = "inductor"
) -> str:
    """Compile the student's transformer blocks as ``training.compile`` says, after a trial.

    A copy of a block is run on the device, forward and backward in training and forward in
    evaluation, and compared with itself uncompiled. The graphs are those of the run.

    Returns:
        Why ``auto`` left them as they are on a CUDA device; else empty.

    Raises:
        UsageError: If ``on`` is asked of a student that has no blocks of its own.
        GdistillError: If ``on`` cannot be had.
    """
    choice = config.training.compile
    blocks = [module for module in student.modules() if isinstance(module, Block)]
    if choice == "off" or (choice == "auto" and (device.type != "cuda" or not blocks)):
        return ""
    if not blocks:
        got, remedy = f"student {config.student}", "leave it out"
        raise UsageError(
            "no blocks to compile", where="training.compile=on", got=got, remedy=remedy
        )
    halves = compiled_halves(backend)
    obstacle = _compile_obstacle(student, halves, config.training.precision, device)
    if obstacle and choice == "on":
        raise GdistillError(
            "cannot compile the blocks",
            where=f"training.compile=on, {device}",
            got=obstacle,
            remedy="install a C++ compiler (and Triton for GPUs), or set training.compile=off",
        )
    if not obstacle:
        for block in blocks:
            block.halves = halves
    return obstacle


def blocks_in_use(student: Student) -> str:
    """How transformer blocks run: ``compiled`` or ``eager``."""
    blocks = (module for module in student.modules() if isinstance(module, Block))
    return "compiled" if any(block.is_compiled for block in blocks) else "eager"


def _compile_obstacle(
    student: Student, halves: tuple[Half, Half], precision: str, device: torch.device
) -> str:
    """Why a copy of the first block cannot be compiled there; else empty."""
    generator = torch.Generator().manual_seed(0)  # the run's own draws stay as they are
    block = copy.deepcopy(next(part for part in student.modules() if isinstance(part, Block)))
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.05, generator=generator)
    run = _trial(student, block.to(device), precision, device, generator)
    try:
        with torch.no_grad():
            plain = run(False)
            block.halves = halves
            moved = run(False)
        run(True).sum().backward()
    except Exception as error:  # whatever a compiler may lack
        return first_line(error)
    error = float((moved - plain).square().mean().sqrt() / plain.square().mean().sqrt())
    if not error <= COMPILED_TOLERANCES[precision]:
        return f"compiled, it differs from itself by {error:.2g} of what it adds"
    return ""


def _trial(
    student: Student,
    block: Block,
    precision: str,
    device: torch.device,
    generator: torch.Generator,
) -> Callable[[bool], Tensor]:
    """What a block adds to two rows of the student's length."""
    settings = student.settings
    length, head_width = student.num_read_tokens, student.backbone.head_width
    x = torch.randn(2, length, settings.hidden_size, generator=generator).to(device)
    x.requires_grad_()
    rotary = Rotary.of(torch.arange(length, device=device), head_width)
    level: Tensor | None = None
    if block.adaLN_modulation is not None:
        rows = 2 if settings.diffusion.time_conditioning else 1
        width = block.adaLN_modulation.in_features
        level = torch.randn(rows, width, generator=generator).to(device)

    def run(is_training: bool) -> Tensor:
        block.train(is_training)
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            given = x if is_training else x.detach()
            return block(given, level, rotary, full_attention) - given

    return run
