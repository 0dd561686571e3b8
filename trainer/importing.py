"""The authors' Lightning checkpoints -> our Hugging Face layout.

``torch.load(weights_only=True)`` reads them. They also hold a config of OmegaConf and a tokenizer:
every class that PyTorch refuses goes in as an :class:`Inert` stand-in of its name, which remembers
its state, so no code of a named class runs, and none is imported.

Their backbone lies under ``backbone.`` (with ``_orig_mod.`` where it was compiled); the teacher
and everything of the trainer is left behind. Their EMA is a list without names, in the order in
which the backbone registered its parameters, which is the order of the state dict without
buffers.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from shards.atomic import sha256_file, write_json_atomic
from shards.console import without_library_bars
from shards.errors import GdistillError, UsageError, first_line
from shards.language_model.loading import find_tokenizer
from shards.settings import from_mapping
from trainer.initial_weights import misfit
from trainer.students.base import before_float32
from trainer.students.registry import STUDENTS, Student, StudentSettings


class Inert:
    """Stands for an object of a class that is not loaded, and for the class; it keeps its state."""

    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        """Whatever the object would have been made of is dropped."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _as_dict(*factory: Any) -> dict[Any, Any]:
    """In place of a defaultdict, whose entries a pickle sets one by one."""
    return {}


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The dict that ``torch.save`` wrote, tensors on the CPU, what is no tensor plain or inert.

    Raises:
        UsageError: When the file is absent.
        GdistillError: When it is no torch zip archive, or damaged; the reason is given.
    """
    if not path.is_file():
        raise UsageError("no such checkpoint", where=path)
    if not zipfile.is_zipfile(path):
        expected = "a zip archive written by torch.save (PyTorch 1.6 or later)"
        raise GdistillError("cannot read the checkpoint", where=path, expected=expected)
    try:
        with zipfile.ZipFile(path) as archive:
            total = sum(record.file_size for record in archive.infolist())
        # torch.save compresses nothing: an archive that unpacks to more than its size is a bomb.
        if total > path.stat().st_size:
            raise ValueError(f"{total:,} B unpacked; torch.save stores records uncompressed")
        names = get_unsafe_globals_in_checkpoint(path)
        stands = [(_as_dict if n == "collections.defaultdict" else Inert, n) for n in names]
        with safe_globals(stands):  # type: ignore[arg-type]
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle may raise anything at all
        reason = first_line(error)
        raise GdistillError("cannot read the checkpoint", where=path, got=reason) from error
    if not isinstance(loaded, dict):
        raise GdistillError("not a checkpoint", where=path, got=type(loaded).__name__, expected="a dict")
    return loaded


def plain_config(value: Any) -> Any:
    """A config as plain dicts and values, also from the inert remains of an OmegaConf tree.

    An OmegaConf node pickles its children as state ``_content`` and a leaf's value as ``_val``.
    """
    if isinstance(value, Inert):
        state = value.state if isinstance(value.state, dict) else {}
        return plain_config(state.get("_content", state.get("_val")))
    if isinstance(value, dict):
        return {str(key): plain_config(entry) for key, entry in value.items()}
    return [plain_config(entry) for entry in value] if isinstance(value, list | tuple) else value


NOISE_WEIGHT = "gumbel_noise_embed.linear.weight"
ROTARY = "rotary_emb.inv_freq"
"""A buffer; all other entries of the backbone are parameters."""
SIGMA_WEIGHT = "sigma_map.mlp.0.weight"
PREFIX = "backbone."
IGNORED = ("teacher_model.", "sampling_eps_min", "sampling_eps_max")
REFERENCE = re.compile(r"\$\{([\w.]+)\}")
"""How the authors' configs point from one value to another."""
MAX_REFERENCES = 8


def our_parameters(reference: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The authors' backbone parameters (no prefix) under our names and in our layout.

    Only the noise projection changes shape: theirs is (D, V), ours (V, D).
    """
    ours = {f"{PREFIX}{name}": value for name, value in reference.items() if name not in (ROTARY, NOISE_WEIGHT)}
    if NOISE_WEIGHT in reference:
        ours["conditioner.weight"] = reference[NOISE_WEIGHT].T.contiguous()
    return ours


def backbone_of(state: Mapping[Any, Any]) -> tuple[dict[str, Tensor], list[str]]:
    """Backbone entries without prefix, in order, and the keys that are neither it nor ignored."""
    backbone: dict[str, Tensor] = {}
    unexpected = []
    for key, value in state.items():
        name = key if isinstance(key, str) else f"a {type(key).__name__}"
        if name.startswith(PREFIX) and isinstance(value, Tensor):
            backbone[name.removeprefix(PREFIX).replace("_orig_mod.", "")] = value
        elif not name.startswith(IGNORED):
            unexpected.append(name)
    return backbone, unexpected


def with_ema(backbone: Mapping[str, Tensor], ema: Any) -> dict[str, Tensor]:
    """The backbone with its parameters replaced by the EMA's, by position in the list.

    Raises:
        GdistillError: When the list is absent or does not fit in length or in any shape.
    """
    shadows = ema.get("shadow_params") if isinstance(ema, dict) else None
    shadows = [s for s in shadows if isinstance(s, Tensor)] if isinstance(shadows, list) else None
    names = [name for name in backbone if name != ROTARY]
    if not shadows:
        remedy = "import the raw weights (without EMA) if those will do"
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
    """Architecture from the shapes; what shapes do not show from the checkpoint's own config.

    Raises:
        GdistillError: Where the keys are not those of the authors' DiT.
    """
    level = backbone.get(SIGMA_WEIGHT)
    needed = {"vocab_embed.embedding": 2, ROTARY: 1, "blocks.0.mlp.0.weight": 2}
    for name, num_axes in {**needed, **({} if level is None else {SIGMA_WEIGHT: 2})}.items():
        shape = tuple(backbone[name].shape) if name in backbone else ()
        if len(shape) != num_axes or 0 in shape:
            what, where = "not a checkpoint of the authors' DiT", f"state_dict: {PREFIX}{name}"
            expected = f"keys under {PREFIX} as the README of the released files lists them"
            raise GdistillError(what, where=where, got=shape or "nothing", expected=expected)
    numbers = {name.split(".")[1] for name in backbone if name.startswith("blocks.")}
    if numbers != set(map(str, range(len(numbers)))):
        got, expected = sorted(numbers)[:8], "blocks 0, 1, 2 and so on"
        raise GdistillError("blocks are missing", where="state_dict", got=got, expected=expected)
    width = backbone["vocab_embed.embedding"].shape[1]
    values = {
        "hidden_size": width,
        "num_layers": len(numbers),
        "num_heads": width // (2 * backbone[ROTARY].shape[0]),
        "condition_size": 128 if level is None else level.shape[0],
        "mlp_ratio": backbone["blocks.0.mlp.0.weight"].shape[0] // width,
        "dropout": setting(config, "model.dropout", 0.1),
        "conditioning": "gumbel" if NOISE_WEIGHT in backbone else "none",
        "noise": {"injection": setting(config, "model.gumbel_inject_mode", "replace")},
        "diffusion": {
            "schedule": setting(config, "noise.type", "loglinear"),
            "time_conditioning": setting(config, "algo.time_conditioning", False),
            "loss_weighting": "rate" if setting(config, "algo.mdlm_loss_scale", False) else "schedule",
            "min_time": bounds[0],
            "max_time": bounds[1],
        },
    }
    return from_mapping(StudentSettings, values, where="the checkpoint's config")


Value = TypeVar("Value", bool, int, float, str)


def setting(config: Mapping[str, Any], path: str, default: Value, references: int = MAX_REFERENCES) -> Value:
    """A value of the checkpoint's config, of the default's type; the default where it is absent.

    ``${other.path}`` is followed.

    Raises:
        GdistillError: For a value of another type.
    """
    value, kind = config, type(default)
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(value, str) and (reference := REFERENCE.fullmatch(value)):
        return setting(config, reference[1], default, references - 1) if references else default
    if value is None:
        return default
    if kind is float and type(value) is int:
        return float(value)  # type: ignore[return-value]
    if type(value) is not kind:
        place, got = f"config: {path}", f"{value!r:.80}"
        raise GdistillError("not a setting", where=place, got=got, expected=kind.__name__)
    return value  # type: ignore[return-value]


def student_from(
    checkpoint: Mapping[str, Any],
    *,
    ema: bool = True,
    row_length: int | None = None,
    block_size: int | None = None,
    bos_and_eos: tuple[int | None, int | None] | None = None,
) -> tuple[str, Student]:
    """A student with the weights of a loaded checkpoint.

    Args:
        checkpoint: The dict of :func:`trainer.importing.read_checkpoint`.
        ema: EMA weights (what the authors evaluate) or the raw ones.
        row_length: Tokens per row, when the checkpoint's config does not say.
        block_size: Tokens per block, likewise.
        bos_and_eos: Of the tokenizer; without one, GPT-2's: the last token is both.

    Returns:
        Registry name and student: without a noise level it is the autoregressive baseline, with
        [x_t ; x_0] BD3-LM.

    Raises:
        UsageError: When neither the checkpoint nor the caller says how long rows or blocks are.
        GdistillError: When keys are missing, unexpected or of another shape; all are listed.
    """
    state = checkpoint.get("state_dict")
    if not isinstance(state, dict):
        raise GdistillError("not a Lightning checkpoint", got="no state_dict")
    backbone, unexpected = backbone_of(state)
    hyper_parameters = plain_config(checkpoint.get("hyper_parameters"))
    config = hyper_parameters.get("config") if isinstance(hyper_parameters, dict) else None
    config = config if isinstance(config, dict) else {}
    settings, name = settings_from(backbone, config, _clips(state)), "ar"
    if SIGMA_WEIGHT in backbone:
        is_block = setting(config, "algo.cross_attn", "sampling_eps_min" in state)
        name = "bd3lm" if is_block else "mdlm"
    length = row_length or _stated(config, "model.length", "row length", "1024 for OpenWebText's")
    if name == "bd3lm":
        size = block_size or _stated(config, "block_size", "block size", "4, 8 or 16")
        settings = replace(settings, block_size=size)
    parameters = our_parameters(with_ema(backbone, checkpoint.get("ema")) if ema else backbone)
    _require_memory(parameters)
    vocab_size = backbone["vocab_embed.embedding"].shape[0] - 1
    bos, eos = bos_and_eos or (vocab_size - 1, vocab_size - 1)
    data = {"vocab_size": vocab_size, "row_length": length, "bos_token_id": bos, "eos_token_id": eos}
    student = STUDENTS[name](STUDENTS[name].config_class.build(settings, **data))
    _load_exactly(student, parameters, unexpected)
    return name, student.eval()


def _clips(state: Mapping[Any, Any]) -> tuple[float, float]:
    bounds = []
    for name, default in (("sampling_eps_min", 1e-3), ("sampling_eps_max", 1.0)):
        value = state.get(name, default)
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if not isinstance(value, int | float):
            got, where = f"{value!r:.80}", f"state_dict: {name}"
            raise GdistillError("not a clip of t", where=where, got=got, expected="one number")
        bounds.append(before_float32(float(value)))
    return bounds[0], bounds[1]


def _stated(config: Mapping[str, Any], path: str, what: str, example: str) -> int:
    value = setting(config, path, 0)
    if value >= 1:
        return value
    where, remedy = f"config: {path}", f"pass --{what.replace(' ', '-')} ({example} students)"
    got = value or "nothing"
    raise UsageError(f"the checkpoint does not say its {what}", where=where, got=got, remedy=remedy)


def _require_memory(parameters: Mapping[str, Tensor]) -> None:
    """Refuse tensors that claim more than is stored: a few bytes could ask for all memory."""
    values = parameters.values()
    claimed = sum(value.numel() * value.element_size() for value in values)
    if all(v.device.type == "cpu" and v.layout == torch.strided and not v.is_quantized for v in values):
        storages = [value.untyped_storage() for value in values]
        if claimed <= sum({each.data_ptr(): each.nbytes() for each in storages}.values()):
            return
    got, expected = f"{claimed:,} bytes", "weights that are stored whole, on the CPU"
    raise GdistillError("not the weights of a model", got=got, expected=expected)


def _load_exactly(student: Student, parameters: Mapping[str, Tensor], unexpected: list[str]) -> None:
    own = dict(student.named_parameters())
    wrong = misfit({**dict.fromkeys(unexpected, torch.empty(0)), **parameters}, own)
    if wrong:
        raise GdistillError("the checkpoint does not fit", where=type(student).__name__, got=wrong)
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
    tokenizer: str | None = None,
) -> tuple[Student, dict[str, Any]]:
    """Convert one of the authors' checkpoints into a Hugging Face folder.

    Args:
        ckpt: ``mdlm-owt.ckpt`` or the like.
        out: Folder to make; must be absent or empty.
        ema: EMA weights (the default, as in the authors' evaluation) or the raw ones.
        row_length: See :func:`student_from`.
        block_size: See :func:`student_from`.
        tokenizer: Folder of the tokenizer that the students were trained with (or its hub id, from
            the local cache). It goes into the folder, so that samples have text.

    Returns:
        The student, and what ``import.json`` says of where it came from.

    Raises:
        UsageError: When the checkpoint is absent, the folder is taken, or the tokenizer is another.
        GdistillError: When the file cannot be read or does not fit.
    """
    ckpt, out, words = Path(ckpt), Path(out), None
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError("the output folder is taken", where=out, remedy="name a new one")
    if tokenizer is not None:
        words = find_tokenizer(tokenizer, where=f"--tokenizer {tokenizer}")
    ends = None if words is None else (words.bos_token_id, words.eos_token_id)
    checkpoint = read_checkpoint(ckpt)
    name, student = student_from(checkpoint, ema=ema, row_length=row_length, block_size=block_size, bos_and_eos=ends)
    if words is not None and len(words) != student.config.vocab_size:
        got, expected = f"{len(words):,} tokens", f"{student.config.vocab_size:,} as the student's"
        raise UsageError("not its tokenizer", where="--tokenizer", got=got, expected=expected)
    with without_library_bars():
        student.save_pretrained(out)
        if words is not None:
            words.save_pretrained(out)
    step = checkpoint.get("global_step")
    record = {
        "file": ckpt.name,
        "sha256": sha256_file(ckpt),
        "weights": "ema" if ema else "raw",
        "student": name,
        "global_step": step if isinstance(step, int) else None,
    }
    write_json_atomic(out / "import.json", record)
    return student, record
