"""Causal language models that others trained: a teacher, a scorer of samples, a verifier.

In comes a folder or a hub id; out comes a network in evaluation mode that is what it says: every
weight there, each position seeing earlier tokens only. Code that lies beside a model runs only where
the user asked for it. What its configuration shows to be wrong is refused in the first second.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import snapshot_download
from jaxtyping import Float, Int
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from shards.atomic import canonical_json, sha256_file
from shards.console import without_library_bars
from shards.errors import GdistillError, UsageError, first_line
from shards.language_model.forward import DtypeName, Float32Head, install_float32_head

A_MODEL = "a causal language model of transformers"
SMALL_FILES = ["*.json", "*.txt", "*.model", "*.py", "*.jinja"]
CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
"""What configurations call the longest input; families without one (Mamba, Bloom) read any."""
NO_PART_OF_THE_MODEL = ("_name_or_path", "transformers_version", "dtype")
Role = Literal["teacher", "judge", "verifier", "student", "backbone", "source"]
"""What a model is wanted for: its name in messages."""


@dataclass(frozen=True)
class PretrainedFiles:
    """A model directory, local or downloaded, and its configuration.

    ``name`` is the hub id, or the last part of a local path: what a store remembers.
    """

    name: str
    folder: Path
    config: PreTrainedConfig
    trust_remote_code: bool = False
    role: Role = "teacher"

    @cached_property
    def text_config(self) -> PreTrainedConfig:
        """The part of the configuration that is about text; a model of several kinds nests it."""
        return self.config.get_text_config(decoder=True)

    @property
    def context_length(self) -> int | None:
        """Most tokens the model can see; None if its configuration sets no limit."""
        values = (getattr(self.text_config, field, None) for field in CONTEXT_FIELDS)
        return next((value for value in values if isinstance(value, int) and value > 0), None)

    @property
    def num_logits(self) -> int:
        """Width of the model's output; often padded beyond the tokenizer."""
        return self._size("vocab_size")

    @property
    def hidden_size(self) -> int:
        """Width of the last hidden state."""
        return self._size("hidden_size")

    def _size(self, field: str) -> int:
        value = getattr(self.text_config, field, None)
        if not isinstance(value, int):
            what, where = f"the {self.role} is no language model", self.folder / "config.json"
            got = f"a {self.config.model_type} without {field}"
            raise UsageError(what, where=where, got=got, expected=A_MODEL)
        return value

    @property
    def weight_files(self) -> list[Path]:
        """The weights: safetensors if there are any, else pickled tensors."""
        for single in ("model.safetensors", "pytorch_model.bin"):
            index = self.folder / f"{single}.index.json"
            if (self.folder / single).is_file():
                return [self.folder / single]
            if not index.is_file():
                continue
            try:
                weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                files = [self.folder / name for name in sorted(set(weight_map.values()))]
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise GdistillError("damaged weight index", where=index, got=error) from error
            missing = [file for file in files if not file.is_file()]
            if missing:
                what = f"a file of the {self.role}'s weights is missing"
                raise GdistillError(what, where=missing[0])
            return files
        what, expected = f"the {self.role} has no weights", "model.safetensors or its index"
        raise UsageError(what, where=self.folder, expected=expected)

    @property
    def has_safetensors(self) -> bool:
        """Whether the weights are safetensors (else they load with ``weights_only=True``)."""
        return all(file.suffix == ".safetensors" for file in self.weight_files)

    @cached_property
    def weights_sha256(self) -> str:
        """Hash of every tensor's name, type, shape and bytes, in whatever files they lie.

        Of pickled weights, the hash of the files.
        """
        if not self.has_safetensors:
            hashes = [sha256_file(file) for file in self.weight_files]
            return hashlib.sha256(canonical_json(hashes)).hexdigest()
        digest = hashlib.sha256()
        places: dict[str, Path] = {}
        for file in self.weight_files:
            with _opened(file) as tensors:
                places |= dict.fromkeys(tensors.keys(), file)
        for name, file in sorted(places.items()):
            with _opened(file) as tensors:
                part = tensors.get_slice(name)
                digest.update(canonical_json([name, part.get_dtype(), part.get_shape()]))
                values = tensors.get_tensor(name).flatten().view(torch.uint8)
                digest.update(values.numpy().data)
        return digest.hexdigest()

    @cached_property
    def config_sha256(self) -> str:
        """Hash of the configuration, without the fields that do not change what is computed."""
        values = {k: v for k, v in self.config.to_dict().items() if k not in NO_PART_OF_THE_MODEL}
        return hashlib.sha256(canonical_json(_plain(values))).hexdigest()


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """A safetensors file."""
    try:
        with safe_open(file, "pt") as tensors:
            yield tensors
    except (OSError, SafetensorError) as error:
        raise GdistillError("damaged safetensors file", where=file, got=error) from error


def _plain(value: Any) -> Any:
    """JSON-ready form of whatever a configuration holds."""
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def find_pretrained(
    location: str | Path,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    weights: bool = True,
    role: Role = "teacher",
    local_files_only: bool = False,
) -> PretrainedFiles:
    """The files of a local model directory (``~`` is the home directory) or, downloaded if need be, of a hub id.

    Args:
        weights: Whether to download the weights too.
        local_files_only: Take a hub model from the local cache or not at all.

    Raises:
        UsageError: If there is none, it has no configuration, or a revision of a folder is asked for.
    """
    path = Path(os.path.expanduser(location))
    if path.exists() or looks_local(str(location)):
        if revision is not None:  # a folder holds one state of a model
            what, where = "a local folder has no revisions", f"{role}.revision"
            got = f"{revision!r} of the folder {location}"
            expected = "the id of a model on the hub beside it"
            remedy = "leave the revision out, or name the hub model"
            raise UsageError(what, where=where, got=got, expected=expected, remedy=remedy)
        folder, name = path, path.resolve().name
    else:
        name = str(location)
        folder = _download(name, revision, weights, role, local_files_only)
    if not (folder / "config.json").is_file():
        there = folder.exists()
        what = "no language model there" if there else f"no such {role} folder"
        got = f"{folder} without config.json" if there else "nothing"
        expected = "a folder that transformers loads, or a hub id"
        raise UsageError(what, where=location, got=got, expected=expected)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # transformers lets errors of many libraries through
        what, where = f"cannot read the {role}'s configuration", folder / "config.json"
        got, expected = first_line(error), "a model type that transformers knows"
        raise UsageError(what, where=where, got=got, expected=expected) from error
    return PretrainedFiles(name, folder, config, trust_remote_code, role)


def find_tokenizer(location: str | Path, role: str = "", *, where: object = None, local_files_only: bool = True) -> Any:
    """The tokenizer of a folder or, from the local cache unless told, a hub id; without its code.

    A UsageError, if there is none, names ``where`` or the location.
    """
    try:
        place, here = os.path.expanduser(location), {"local_files_only": local_files_only}
        return AutoTokenizer.from_pretrained(place, **here, trust_remote_code=False)
    except Exception as error:  # transformers lets errors of many libraries through
        what = f"cannot load the {role}'s tokenizer" if role else "cannot load a tokenizer"
        where, got = where or location, first_line(error)
        expected = "a folder with tokenizer.json, or the hub id of a model"
        remedy = "copy the files that the tokenizer's save_pretrained writes into the folder"
        raise UsageError(what, where=where, got=got, expected=expected, remedy=remedy) from error


def looks_local(location: str) -> bool:
    """Whether a location is written like a path and not like a hub id."""
    return location.startswith((".", "/", "~")) or location.count("/") > 1


def _download(hub_id: str, revision: str | None, weights: bool, role: Role, local_files_only: bool) -> Path:
    """The snapshot of a hub model; of its weights safetensors, or pickles if it has no others."""

    def fetch(pattern: str) -> Path:
        patterns = [*SMALL_FILES, *([pattern] if weights else [])]
        options = {"allow_patterns": patterns, "local_files_only": local_files_only}
        return Path(snapshot_download(hub_id, revision=revision, **options))

    try:
        folder = fetch("model*.safetensors")
        if weights and not list(folder.glob("model*.safetensors")):
            folder = fetch("pytorch_model*.bin")
        return folder
    except Exception as error:  # the hub client raises types of several libraries
        what = f"cannot find the {role}"
        expected = "a local folder, or the id of a model on the hub"
        raise UsageError(what, where=hub_id, got=first_line(error), expected=expected) from error


def not_causal_lm(files: PretrainedFiles, error: BaseException) -> GdistillError:
    """A model that transformers cannot load, as one line."""
    kind = UsageError if "Unrecognized configuration class" in str(error) else GdistillError
    what, got = f"cannot load the {files.role}", first_line(error)
    return kind(what, where=files.folder, got=got, expected=A_MODEL)


# A causal language model, whole and causal, or one line that says why not.


@dataclass(frozen=True)
class CausalModel:
    """A model of transformers in evaluation mode, without gradients; token ids go to ``device``.

    ``head`` is the float32 output layer in place of its own, if one was asked for and its own is a
    plain linear layer.
    """

    files: PretrainedFiles
    network: Any
    head: Float32Head | None
    dtype: DtypeName
    device: torch.device


def load_causal_model(
    files: PretrainedFiles,
    dtype: DtypeName = "float32",
    device: torch.device | str = "cpu",
    *,
    vocab_size: int | None = None,
    attention: str | None = None,
    float32_logits: bool = False,
    device_map: str | None = None,
) -> CausalModel:
    """Load a model's weights and ask it, in one tiny forward pass, whether it is causal.

    Args:
        files: From :func:`find_pretrained`.
        dtype: Precision of weights and activations.
        device: A device that exists.
        vocab_size: V, the columns of the output that are real tokens; its whole width unless told.
        attention: Attention kernel by transformers' name; its own choice unless told.
        float32_logits: Put a float32 head in place of the output layer.
        device_map: How Accelerate spreads the layers over all devices here, in place of ``device``.

    Raises:
        UsageError: If there are no weights, it is no causal language model, looks ahead, cannot
            be spread so, or its logits cannot be had in float32 though they are asked for.
        GdistillError: If the weights are damaged or incomplete.
    """
    options: dict[str, Any] = {"use_safetensors": files.has_safetensors, "device_map": device_map}
    if attention:
        options["attn_implementation"] = attention
    try:
        with without_library_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                files.folder,
                config=files.config,
                dtype=getattr(torch, dtype),
                trust_remote_code=files.trust_remote_code,
                local_files_only=True,
                output_loading_info=True,
                **options,
            )
    except Exception as error:  # transformers lets errors of many libraries through
        if attention and attention in str(error):
            what, where = "the attention kernel cannot be used", f"attention, {files.role} {files.name}"
            expected = f"eager, sdpa, or another of transformers that works here: {first_line(error)}"
            raise UsageError(what, where=where, got=attention, expected=expected) from error
        if device_map is not None:
            what, remedy = f"the {files.role} cannot be spread like this", first_line(error)
            raise UsageError(what, where="device_map", got=device_map, remedy=remedy) from error
        raise not_causal_lm(files, error) from error
    network, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        what = f"the {files.role}'s weights are incomplete"
        got = f"no values for {missing[0]}{more}"
        remedy = "transformers would fill them with random numbers"
        raise GdistillError(what, where=files.folder, got=got, remedy=remedy)
    network, place = network.eval().requires_grad_(False), torch.device(device)
    if device_map is None:
        network = network.to(place)
    else:
        place = _input_device(network, files.role, device_map)
    head = install_float32_head(network) if float32_logits else None
    model = CausalModel(files, network, head, dtype, place)
    _probe(model, vocab_size or files.num_logits, float32_logits)
    return model


def _input_device(network: Any, role: str, device_map: str) -> torch.device:
    """Where token ids go: the device of the embedding."""
    head = network.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if weight is not None and weight.is_meta:
        what = f"the {role}'s output layer is kept outside of every device"
        remedy = "name a device for it, or use a machine with more memory"
        raise UsageError(what, where="device_map", got=device_map, remedy=remedy)
    embedding = network.get_input_embeddings().weight
    if embedding.is_meta:  # Accelerate brings it to the first device for every pass
        return torch.device(getattr(network, "device", "cpu"))
    return embedding.device


@torch.inference_mode()
def _probe(model: CausalModel, vocab_size: int, float32_logits: bool) -> None:
    """Refuse a model that looks ahead, or whose logits cannot be had in float32."""
    files, head = model.files, model.head
    rows = probe_rows(vocab_size, min(LENGTH, files.context_length or LENGTH))
    try:
        logits = model.network(input_ids=rows.to(model.device), use_cache=False).logits
        unused = head is None or head.last_logits is None
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever the model's own code raises
        what, expected = f"the {files.role} cannot score a row", "logits for token ids alone"
        got = first_line(error)
        raise GdistillError(what, where=files.name, got=got, expected=expected) from error
    finally:
        if head is not None:
            head.forget()
    if float32_logits and model.dtype != "float32" and (unused or logits.dtype != torch.float32):
        what = f"this {files.role}'s output layer gives no float32 logits"
        where, remedy = f"{files.name}, --dtype {model.dtype}", "use --dtype float32"
        got = "no plain linear layer" if unused else f"logits rounded to {logits.dtype}"
        expected = "logits that are not rounded: that would cost fidelity in every token"
        raise UsageError(what, where=where, got=got, expected=expected, remedy=remedy)
    moved = look_ahead(logits[..., :vocab_size].float(), TOLERANCES[model.dtype])
    if moved is not None:
        got = f"logits that move by {moved:.2g} of their spread when a later token changes"
        expected = "a model that sees earlier tokens only"
        remedy = "a BERT-type decoder needs is_decoder in its config.json"
        what = f"the {files.role} is not causal"
        raise UsageError(what, where=files.name, got=got, expected=expected, remedy=remedy)


# ``AutoModelForCausalLM`` loads a BERT as well, whose log p of a token has seen the token: so the model is asked.


LENGTH, NUM_VARIANTS = 8, 3
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.02}
"""How far logits may move by rounding alone, as a share of their spread over the vocabulary."""
NOISE_FACTOR = 8
"""... or by so many times what they differ between equal rows (sums in no fixed order on a GPU)."""


def probe_rows(vocab_size: int, length: int) -> Int[Tensor, "b l"]:
    """Two equal rows, then rows that differ from them in the last token alone; int64."""
    row = torch.arange(length) * vocab_size // length
    rows = row.repeat(2 + NUM_VARIANTS, 1)
    steps = 1 + torch.arange(NUM_VARIANTS) * max(1, vocab_size // (NUM_VARIANTS + 1))
    rows[2:, -1] = (rows[2:, -1] + steps) % vocab_size
    return rows


def look_ahead(logits: Float[Tensor, "b l v"], tolerance: float) -> float | None:
    """How far logits before the last position moved, by their spread; None if by rounding alone.

    Root mean squares over the vocabulary, at the worst position; logits that are not finite count as equal.
    """
    earlier = logits[:, :-1].nan_to_num(0.0, 0.0, 0.0)
    spread = earlier[0].std(-1)
    moves = (earlier[1:] - earlier[0]).square().mean(-1).sqrt() / spread
    if not moves.numel():
        return None
    noise, moved = float(moves[0].max()), float(moves[1:].max())
    return moved if moved > tolerance + NOISE_FACTOR * noise else None
