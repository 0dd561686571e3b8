"""The authors' Lightning checkpoints -> our Hugging Face layout.

Their backbone lies under ``backbone.`` (with ``_orig_mod.`` where it was compiled); the teacher and
everything of the trainer is left behind. Their EMA is a list without names, in the order in which
the backbone registered its parameters, which is the order of the state dict without buffers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shards.base import (
    GdistillError,
    UsageError,
    sha256_file,
    without_library_bars,
    write_json_atomic,
)
from trainer.importing.inert_pickle import plain_config, read_checkpoint
from trainer.students import STUDENTS, Student, StudentSettings

NOISE_WEIGHT = "gumbel_noise_embed.linear.weight"
ROTARY = "rotary_emb.inv_freq"
BUFFERS = (ROTARY,)
PREFIX = "backbone."
COMPILED = "_orig_mod."
IGNORED = ("teacher_model.", "sampling_eps_min", "sampling_eps_max")


@dataclass(frozen=True)
class Imported:
    """What an import did.

    Attributes:
        student: Registry name of the student.
        out: Folder of the model.
        num_parameters: Parameters imported.
        weights: ``ema`` or ``raw``.
        global_step: Optimizer steps of the checkpoint; None when it does not say.
    """

    student: str
    out: Path
    num_parameters: int
    weights: str
    global_step: int | None


def our_parameters(reference: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The authors' backbone parameters (no prefix) under our names and in our layout.

    Only the noise projection changes shape: theirs is (D, V), ours (V, D).
    """
    ours: dict[str, Tensor] = {}
    for name, value in reference.items():
        if name == NOISE_WEIGHT:
            ours["conditioner.weight"] = value.T.contiguous()
        elif name not in BUFFERS:
            ours[f"{PREFIX}{name}"] = value
    return ours


def backbone_of(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Backbone entries without prefix, in order, and the keys that are neither it nor ignored."""
    backbone: dict[str, Tensor] = {}
    unexpected = []
    for key, value in state.items():
        if key.startswith(IGNORED):
            continue
        if key.startswith(PREFIX):
            backbone[key.removeprefix(PREFIX).replace(COMPILED, "")] = value
        else:
            unexpected.append(key)
    return backbone, unexpected


def with_ema(backbone: Mapping[str, Tensor], ema: Any) -> dict[str, Tensor]:
    """The backbone with its parameters replaced by the EMA's, by position in the list.

    Raises:
        GdistillError: When the list is absent or does not fit in length or in any shape.
    """
    shadows = ema.get("shadow_params") if isinstance(ema, dict) else None
    names = [name for name in backbone if name not in BUFFERS]
    remedy = "import the raw weights (without EMA) if those will do"
    if not shadows:
        raise GdistillError("the checkpoint has no EMA weights", where="ema", remedy=remedy)
    if len(shadows) != len(names):
        got, expected = f"{len(shadows)} tensors", f"{len(names)}, one per parameter"
        raise GdistillError("the EMA does not fit", where="ema", got=got, expected=expected)
    for name, shadow in zip(names, shadows, strict=True):
        if shadow.shape != backbone[name].shape:
            got, expected = tuple(shadow.shape), tuple(backbone[name].shape)
            raise GdistillError("the EMA does not fit", where=name, got=got, expected=expected)
    return {**backbone, **dict(zip(names, shadows, strict=True))}


def settings_from(
    backbone: Mapping[str, Tensor], config: Mapping[str, Any], bounds: tuple[float, float]
) -> StudentSettings:
    """Architecture from the shapes; what shapes do not show from the checkpoint's own config."""
    _require_architecture(backbone)
    width = backbone["vocab_embed.embedding"].shape[1]
    level = backbone.get("sigma_map.mlp.0.weight")
    return StudentSettings(
        hidden_size=width,
        num_layers=1 + max(int(k.split(".")[1]) for k in backbone if k.startswith("blocks.")),
        num_heads=width // (2 * backbone[ROTARY].shape[0]),
        condition_size=128 if level is None else level.shape[0],
        mlp_ratio=backbone["blocks.0.mlp.0.weight"].shape[0] // width,
        dropout=float(_lookup(config, "model.dropout", 0.1)),
        conditioning="gumbel" if NOISE_WEIGHT in backbone else "none",
        injection=_lookup(config, "model.gumbel_inject_mode", "replace"),
        noise_schedule=_lookup(config, "noise.type", "loglinear"),
        time_conditioning=bool(_lookup(config, "algo.time_conditioning", False)),
        loss_weighting="rate" if _lookup(config, "algo.mdlm_loss_scale", False) else "schedule",
        min_time=bounds[0],
        max_time=bounds[1],
    )


def _require_architecture(backbone: Mapping[str, Tensor]) -> None:
    needed = ("vocab_embed.embedding", ROTARY, "blocks.0.mlp.0.weight")
    missing = [name for name in needed if name not in backbone]
    if missing:
        raise GdistillError(
            "not a checkpoint of the authors' DiT",
            where="state_dict",
            got=f"no {PREFIX}{missing[0]}",
            expected=f"keys under {PREFIX} as the README of the released files lists them",
        )


def _lookup(config: Mapping[str, Any], path: str, default: Any) -> Any:
    value: Any = config
    for key in path.split("."):
        if not isinstance(value, Mapping) or value.get(key) is None:
            return default
        value = value[key]
    return value


def student_name(backbone: Mapping[str, Tensor], config: Mapping[str, Any], clipped: bool) -> str:
    """Registry name: no noise level is the autoregressive baseline, [x_t ; x_0] is BD3-LM."""
    if "sigma_map.mlp.0.weight" not in backbone:
        return "ar"
    return "bd3lm" if _lookup(config, "algo.cross_attn", clipped) else "mdlm"


def student_from(
    checkpoint: Mapping[str, Any],
    *,
    ema: bool = True,
    row_length: int | None = None,
    block_size: int | None = None,
) -> tuple[str, Student]:
    """A student with the weights of a loaded checkpoint.

    Args:
        checkpoint: The dict of :func:`trainer.importing.inert_pickle.read_checkpoint`.
        ema: EMA weights (what the authors evaluate) or the raw ones.
        row_length: Tokens per row, when the checkpoint's config does not say.
        block_size: Tokens per block, likewise.

    Raises:
        GdistillError: When keys are missing, unexpected or of another shape; all are listed.
    """
    state = checkpoint.get("state_dict")
    if not isinstance(state, Mapping):
        raise GdistillError("not a Lightning checkpoint", got="no state_dict")
    backbone, unexpected = backbone_of(state)
    hyper_parameters = plain_config(checkpoint.get("hyper_parameters")) or {}
    config = _lookup(hyper_parameters, "config", {})
    low, high = (float(state.get(f"sampling_eps_{k}", d)) for k, d in (("min", 1e-3), ("max", 1)))
    # The clips as they were before float32 rounded them: 1e-3 is open, 1.00000005e-3 is not.
    settings = settings_from(backbone, config, (round(low, 6), round(high, 6)))
    name = student_name(backbone, config, "sampling_eps_min" in state)
    length = row_length or _lookup(config, "model.length", None)
    if length is None:
        remedy = "pass the row length (1024 for the released files)"
        raise UsageError("the checkpoint does not say how long a row is", remedy=remedy)
    if name == "bd3lm":
        settings = replace(settings, block_size=block_size or _lookup(config, "block_size", None))
    vocab_size = backbone["vocab_embed.embedding"].shape[0] - 1
    student_class = STUDENTS[name]
    student = student_class(
        student_class.config_class.build(
            settings,
            vocab_size=vocab_size,
            row_length=int(length),
            bos_token_id=vocab_size - 1,
            eos_token_id=vocab_size - 1,
        )
    )
    parameters = our_parameters(with_ema(backbone, checkpoint.get("ema")) if ema else backbone)
    _load_exactly(student, parameters, unexpected)
    return name, student.eval()


def _load_exactly(
    student: Student, parameters: Mapping[str, Tensor], unexpected: list[str]
) -> None:
    own = dict(student.named_parameters())
    missing = sorted(own.keys() - parameters.keys())
    unexpected = unexpected + sorted(parameters.keys() - own.keys())
    shapes = [
        f"{name} {tuple(parameters[name].shape)} for {tuple(own[name].shape)}"
        for name in own.keys() & parameters.keys()
        if own[name].shape != parameters[name].shape
    ]
    if missing or unexpected or shapes:
        raise GdistillError(
            "the checkpoint does not fit",
            where=type(student).__name__,
            got=f"missing {missing}, unexpected {unexpected}, other shapes {sorted(shapes)}",
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(parameters[name])


def import_checkpoint(
    ckpt: str | Path,
    out: str | Path,
    ema: bool = True,
    *,
    row_length: int | None = None,
    block_size: int | None = None,
) -> Imported:
    """Convert one of the authors' checkpoints into a Hugging Face folder.

    Args:
        ckpt: ``mdlm-owt.ckpt`` or the like.
        out: Folder to make; must be absent or empty.
        ema: EMA weights (the default, as in the authors' evaluation) or the raw ones.
        row_length: See :func:`student_from`.
        block_size: See :func:`student_from`.

    Raises:
        UsageError: When the checkpoint is absent or the folder is taken.
        GdistillError: When the file cannot be read or does not fit.
    """
    ckpt, out = Path(ckpt), Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError("the output folder is taken", where=out, remedy="name a new one")
    checkpoint = read_checkpoint(ckpt)
    name, student = student_from(checkpoint, ema=ema, row_length=row_length, block_size=block_size)
    with without_library_bars():
        student.save_pretrained(out)
    step = checkpoint.get("global_step")
    weights = "ema" if ema else "raw"
    source = {"file": ckpt.name, "sha256": sha256_file(ckpt), "weights": weights}
    write_json_atomic(out / "import.json", {**source, "student": name, "global_step": step})
    return Imported(name, out, sum(p.numel() for p in student.parameters()), weights, step)
