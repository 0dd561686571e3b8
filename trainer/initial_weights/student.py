"""First weights from another student of ours, and the weights that bring noise in."""

from __future__ import annotations

from pathlib import Path

import torch

from shards.base import UsageError
from shards.store import Manifest
from trainer.students import Student, StudentConfig, read_model

STORE_BUFFERS = ("time_bounds", "conditioner.unigram_log_probs")
"""Buffers that the run and its store decide, not the model that weights come from."""
NOISE_PARTS = ("conditioner.", "backbone.noise_readings.")


def load_student_weights(student: Student, directory: Path, manifest: Manifest) -> None:
    """Start from a trained student of the same shape (its block size may differ).

    A conditioned student may start from one that has seen no noise. What it adds begins at zero
    and its noise embeddings are added (``injection``), so its first loss is the source's.

    Args:
        student: Receives the weights.
        directory: A model folder.
        manifest: The store to train on.

    Raises:
        UsageError: When there is no model, its vocabulary, row length or weights do not fit, or
            noise embeddings would replace what the source has learnt.
    """
    source = read_model(directory)
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
    """:func:`silence_noise`, where the noise leaves what the source has learnt as it is."""
    if student.settings.injection != "add":
        raise UsageError(
            "the noise would replace the mask embedding that the model has learnt",
            where="model.injection",
            got=f"{student.settings.injection}, and a model without noise in {directory}",
            expected="add",
            remedy="add --set model.injection=add",
        )
    return silence_noise(student)


def noise_parameters(student: Student) -> dict[str, torch.nn.Parameter]:
    """Name -> weight, of all that come with noise."""
    return {n: p for n, p in student.named_parameters() if n.startswith(NOISE_PARTS)}


def silence_noise(student: Student) -> set[str]:
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
