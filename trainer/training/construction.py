"""From a config and a store to a student, fresh or from the weights of another one, compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from shards.base import GdistillError, UsageError, derive_seed, did_you_mean, first_line
from shards.codec import Codec
from shards.store import Manifest, ShardStore
from trainer.students import (
    MDLM,
    STUDENTS,
    Block,
    Half,
    Rotary,
    Student,
    StudentConfig,
    StudentSettings,
    compiled_halves,
    find_model,
    full_attention,
    read_model,
)
from trainer.training.settings import RunConfig

STORE_BUFFERS = ("time_bounds", "conditioner.unigram_log_probs")
"""Buffers that the run and its store decide, not the model that weights come from."""
CONDITIONER_SETTINGS = (
    "injection",
    "noise_transform",
    "prior_weight",
    "noise_projection",
    "noise_rank",
    "noise_init",
    "noise_tau",
    "prior_noise_share",
)
KD_SETTINGS = {
    "token": ("kd_weight", "kd_temperature"),
    "through_time": ("kd_time_step", "kd_num_steps"),
}

COMPILED_TOLERANCES = {"fp32": 1e-4, "bf16": 0.05}
"""How far a compiled block may lie from itself uncompiled, as a share of what it adds (root mean
squares): some ten roundings, of 2^-24 and of 2^-9, lie between the two, and as much room again."""

NOISE_PARTS = ("conditioner.", "backbone.noise_readings.")


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
    _require_taught(config.model.kd, store)
    if config.model.prior_noise_share:
        require_fresh(store.codec, "model.prior_noise_share")
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
    if config.model.noise_init == "zero":
        _silence(student)
    if init_from is not None:
        load_initial_weights(student, init_from, manifest)
    if student.is_conditioned:
        student.config.codec = dict(manifest.codec)
    if student.conditioner is not None and student.settings.prior_weight:
        student.conditioner.set_unigram(_unigram(store))
    return student


def give_earlier_self(student: Student, directory: Path | None) -> None:
    """With ``kd=through_time`` the model that the run begins with also teaches it to the end.

    Args:
        student: At any step of the run.
        directory: ``--init-from``.

    Raises:
        UsageError: When there is no such model, or the student is no masked diffusion model.
    """
    if student.settings.kd != "through_time":
        return
    where = "model.kd=through_time"
    if not isinstance(student, MDLM):
        got = type(student).__name__
        raise UsageError("only diffusion has times", where=where, got=got, expected="mdlm or bd3lm")
    if directory is None:
        remedy = "--init-from the model, also when resuming"
        raise UsageError("there is no earlier model to learn from", where=where, remedy=remedy)
    earlier = read_model(find_model(directory))
    if not isinstance(earlier, MDLM) or type(earlier) is not type(student):
        raise UsageError(
            "the earlier model is of another kind",
            where=f"--init-from {directory}",
            got=type(earlier).__name__,
            expected=type(student).__name__,
        )
    student.learn_from(earlier)


def _refuse_idle_settings(config: RunConfig, kind: type[Student]) -> None:
    """Settings that would be left undone without a word."""
    idle = [(name, f"student {config.student}") for name in kind.foreign_settings]
    if config.model.conditioning == "none":
        idle += [(name, "model.conditioning=none") for name in CONDITIONER_SETTINGS]
    for kd, names in KD_SETTINGS.items():
        if config.model.kd != kd:
            idle += [(name, f"model.kd={config.model.kd}") for name in names]
    for name, chosen in idle:
        value = getattr(config.model, name)
        if value != getattr(StudentSettings(), name):
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
        require_fresh(store.codec, "model.kd=token")
    mode = store.manifest.tokens.get("mode", "parallel")
    if kd == "sequence" and mode != "sequential":
        raise UsageError(
            "sequence-level distillation trains on rows that the teacher wrote",
            where="model.kd=sequence",
            got=f"a store of {mode} extraction",
            expected="sequential extraction",
            remedy="gdistill-extract --mode sequential",
        )


def load_initial_weights(student: Student, directory: Path, manifest: Manifest) -> None:
    """Start from a trained student of the same shape (its block size may differ).

    A conditioned student may start from one that has seen no noise. What it adds begins at zero
    and its noise embeddings are added (``injection``), so its first loss is the source's.

    Args:
        student: Receives the weights.
        directory: A model folder, or the ``--out`` folder of a finished run.
        manifest: The store to train on.

    Raises:
        UsageError: When there is no model, its vocabulary, row length or weights do not fit, or
            noise embeddings would replace what the source has learnt.
    """
    source = read_model(find_model(directory))
    require_same_shape(source.config, manifest, f"--init-from {directory}")
    if source.config.frozen != student.config.frozen:
        raise UsageError(
            "the model stands on another backbone",
            where=f"--init-from {directory}",
            got=source.config.frozen,
            expected=student.config.frozen,
        )
    weights = source.state_dict()
    target = student.state_dict()
    for name in STORE_BUFFERS:
        weights.pop(name, None)
    wanted = set(target) - set(STORE_BUFFERS)
    if student.is_conditioned and not source.is_conditioned:
        wanted -= _silence_beside(student, directory)
    _require_weights({n: w.shape for n, w in weights.items()}, {n: target[n].shape for n in wanted})
    student.load_state_dict(weights, strict=False)


def _silence_beside(student: Student, directory: Path) -> set[str]:
    """:func:`_silence`, where the noise leaves what the source has learnt as it is."""
    if student.settings.injection != "add":
        raise UsageError(
            "the noise would replace the mask embedding that the model has learnt",
            where="model.injection",
            got=f"{student.settings.injection}, and a model without noise in {directory}",
            expected="add",
            remedy="add --set model.injection=add",
        )
    return _silence(student)


def noise_parameters(student: Student) -> dict[str, torch.nn.Parameter]:
    """Name -> weight, of all that come with noise."""
    return {n: p for n, p in student.named_parameters() if n.startswith(NOISE_PARTS)}


def _silence(student: Student) -> set[str]:
    """Zero the matrices that bring noise in; the names of all weights that come with noise."""
    added = set(noise_parameters(student))
    # Of W_r A only A is zeroed: were both, neither would ever have a gradient.
    kept = {"conditioner.weight"} if "conditioner.map.weight" in added else set()
    for name in added - kept:
        if name.endswith(".weight"):
            torch.nn.init.zeros_(student.get_parameter(name))
    return added


def require_same_shape(config: StudentConfig, manifest: Manifest, where: str) -> None:
    """Refuse a student of another vocabulary or row length than the store's."""
    for name in ("vocab_size", "row_length"):
        ours, theirs = getattr(config, name), getattr(manifest, name)
        if ours != theirs:
            raise UsageError(
                f"the student has another {name} than the store",
                where=where,
                got=ours,
                expected=f"{theirs} as in the store",
                remedy="extract with the tokenizer and row length the student was trained with",
            )


def _require_weights(got: dict[str, torch.Size], expected: dict[str, torch.Size]) -> None:
    missing, extra = sorted(set(expected) - set(got)), sorted(set(got) - set(expected))
    other = sorted(n for n in set(got) & set(expected) if got[n] != expected[n])
    if not (missing or extra or other):
        return
    shapes = [f"{n} {tuple(got[n])}, expected {tuple(expected[n])}" for n in other[:3]]
    parts = {"missing": missing[:3], "unexpected": extra[:3], "of another shape": shapes}
    found = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in parts.items() if names)
    raise UsageError(
        "the weights do not fit the student",
        where="--init-from",
        got=found,
        remedy="use the architecture and conditioning that the model was trained with",
    )


def _unigram(store: ShardStore) -> torch.Tensor:
    log_probs = store.resources.get("unigram_log_probs")
    if log_probs is None:
        raise UsageError(
            "prior_weight needs the corpus unigram and the store keeps none",
            where="model.prior_weight",
            remedy="extract with a codec that keeps it, or set model.prior_weight=0",
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
        rows = 2 if settings.time_conditioning else 1
        width = block.adaLN_modulation.in_features
        level = torch.randn(rows, width, generator=generator).to(device)

    def run(is_training: bool) -> Tensor:
        block.train(is_training)
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            given = x if is_training else x.detach()
            return block(given, level, rotary, full_attention) - given

    return run
