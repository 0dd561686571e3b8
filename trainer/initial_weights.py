"""What a student starts from: another student of ours, or a language model of transformers."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from shards.errors import UsageError, first_line
from shards.language_model.loading import (
    PretrainedFiles,
    find_pretrained,
    load_causal_model,
    looks_local,
)
from shards.store.manifest import Manifest
from shards.store.store import ShardStore
from trainer.students.backbone import attention_window
from trainer.students.decoder import DecoderBackbone, cannot_become_a_student
from trainer.students.dit import causal_attention
from trainer.students.folder import find_model, load_tokenizer, read_model, weights_sha256
from trainer.students.registry import Student, StudentConfig

OWN_TYPES = "gdistill-"
"""What model types of ours begin with."""
NO_PART_OF_THE_NETWORK = (
    "_name_or_path",
    "architectures",
    "dtype",
    "transformers_version",
    "use_cache",
)


@dataclasses.dataclass(frozen=True)
class Source:
    """Where first weights are.

    Attributes:
        folder: The model's folder.
        language_model: Its files; None for a student of ours.
    """

    folder: Path
    language_model: PretrainedFiles | None = None

    @property
    def weights_sha256(self) -> str:
        """Hash of the weights."""
        model = self.language_model
        return weights_sha256(self.folder) if model is None else model.weights_sha256


def find_source(place: str | Path) -> Source:
    """A student's folder, the ``--out`` of its run, or a language model's folder or hub id.

    Raises:
        UsageError: When there is none of these.
    """
    path = Path(place).expanduser()
    if not (path.exists() or looks_local(str(place))):
        return Source(path, find_pretrained(str(place), role="source"))
    folder = find_model(path)
    if str(_read_config(folder).get("model_type")).startswith(OWN_TYPES):
        return Source(folder)
    return Source(folder, find_pretrained(folder, role="source"))


def is_language_model(place: str | Path) -> bool:
    """Whether that is a language model of transformers; see :func:`find_source`."""
    return find_source(place).language_model is not None


def network_settings(
    place: str | Path | None, kind: type[Student], run_folder: Path | None = None
) -> dict[str, Any]:
    """Settings of a student that starts there, as a source of ``compose_run``.

    Args:
        place: ``--init-from``.
        kind: The student; one that can lets states predict the next token, as in the model.
        run_folder: Of the run; once begun, it knows the network without its source.

    Returns:
        Network and widths of a language model, which go before those of presets; else nothing.

    Raises:
        UsageError: When nothing is there, or it is no student and no language model.
    """
    if place is None:
        return {}
    try:
        source = find_source(place)
    except UsageError:
        begun = {} if run_folder is None else _read_config(run_folder)
        if not begun:
            raise
        found = begun.get("model", {})
    else:
        found = _read_config(source.folder)
        if source.language_model is not None:
            shifts = "predicts_next" in kind.reads
            network = _network_config(source.language_model)
            found = {"language_model": network, "predicts_next": shifts}
    if found.get("language_model") is None:
        return {}
    return {"model": _sizes(found["language_model"], found["predicts_next"])}


def _sizes(network: dict[str, Any], predicts_next: bool) -> dict[str, Any]:
    values = dict(network)
    shape = AutoConfig.for_model(values.pop("model_type"), **values)
    try:
        sizes = shape.hidden_size, shape.num_hidden_layers, shape.num_attention_heads
    except AttributeError as error:  # no attention: a state space model, RWKV
        raise cannot_become_a_student(network.get("model_type"), first_line(error)) from error
    names = ("hidden_size", "num_layers", "num_heads")
    return {
        "language_model": network,
        "predicts_next": predicts_next,
        **dict(zip(names, sizes, strict=True)),
    }


def _network_config(files: PretrainedFiles) -> dict[str, Any]:
    values = json.loads(files.text_config.to_json_string())
    values["model_type"] = files.text_config.model_type
    return {name: value for name, value in values.items() if name not in NO_PART_OF_THE_NETWORK}


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


# A language model's weights into a student that has its network.


TOLERANCE = 1e-4
"""How far logits may lie from the model's own by rounding, as a share of their spread."""


def adopt_language_model(student: Student, files: PretrainedFiles, store: ShardStore) -> None:
    """Give a student the weights of a language model.

    The mask's embedding begins as the mean of all others, its logit at 0 (it is never predicted).
    Attending to the left alone, the student then says what the model says, which is tried.

    Args:
        student: With the network of that model (see :func:`network_settings`).
        files: The model.
        store: What the student is trained on.

    Raises:
        UsageError: For another vocabulary, a model that reads fewer tokens than a row has, or one
            whose layers do more than the student's.
        GdistillError: If its weights are damaged or incomplete.
    """
    manifest, backbone = store.manifest, student.backbone
    if not isinstance(backbone, DecoderBackbone):
        got = f"a {type(backbone).__name__}"
        raise _does_not_fit(files, "network", got, "the model's: compose with network_settings")
    _require_vocabulary(files, store)
    room = files.context_length
    if room is not None and room < manifest.row_length:
        raise _does_not_fit(files, "rows", manifest.row_length, f"at most {room} tokens")
    window = attention_window(files)
    if window is not None and window < manifest.row_length:
        got = f"a sliding window of {window} tokens, which a student would lift"
        raise _does_not_fit(files, "attention", got, f"at least the {manifest.row_length} of a row")
    size = manifest.vocab_size
    model = load_causal_model(files, "float32", vocab_size=size).network
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    width = student.settings.hidden_size
    if type(outputs) is not nn.Linear or inputs.weight.shape[1] != width:
        got = f"{type(outputs).__name__} of states, embeddings of {inputs.weight.shape[1]}"
        raise _does_not_fit(files, "ends", got, f"a linear output layer, embeddings of {width}")
    embedding = next(name for name, part in model.base_model.named_modules() if part is inputs)
    weights = {
        name: value
        for name, value in model.base_model.state_dict().items()
        if not name.startswith(f"{embedding}.")
    }
    found = backbone.network.load_state_dict(weights, strict=False)
    if found.missing_keys or found.unexpected_keys:
        raise _does_not_fit(files, "weights", str(found), "those of its configuration")
    with torch.no_grad():
        _fill(backbone.vocab_embed.embedding, inputs.weight[:size], inputs.weight[:size].mean(0))
        linear = backbone.output_layer.linear
        _fill(linear.weight, outputs.weight[:size], torch.zeros(width))
        bias = torch.zeros(size) if outputs.bias is None else outputs.bias[:size]
        _fill(linear.bias, bias, torch.zeros(()))
    _require_same_logits(backbone, model, files, manifest)


def _fill(target: Tensor, known: Tensor, mask: Tensor) -> None:
    target[:-1], target[-1] = known, mask


@torch.no_grad()
def _require_same_logits(
    backbone: DecoderBackbone, model: Any, files: PretrainedFiles, manifest: Manifest
) -> None:
    """Over a whole row, attending to the left, the student must say what the model says.

    So a network is refused that does more than its layers and its head: capped or scaled logits.
    """
    length, size = manifest.row_length, manifest.vocab_size
    tokens = (torch.arange(length) * 7919 % size)[None]
    expected = model(input_ids=tokens, use_cache=False).logits[..., :size]
    training = backbone.training
    backbone.eval()
    positions = torch.arange(length)
    try:
        hidden = backbone(backbone.vocab_embed(tokens), None, positions, causal_attention)
    except (RuntimeError, AttributeError, LookupError, TypeError, ValueError) as error:
        kind = files.text_config.model_type  # its layers are not handed what it is called with
        raise cannot_become_a_student(kind, f"{type(error).__name__}: {error}") from error
    backbone.train(training)
    if backbone.predicts_next:
        hidden, expected = hidden[:, 1:], expected[:, :-1]
    logits = backbone.output_layer(backbone.output_layer.features(hidden, None))[..., :size]
    errors = (logits - expected).square().mean(dim=-1)[0].sqrt() / expected.std()
    if bool((errors <= TOLERANCE).all()):
        return
    got = f"logits that differ by {float(errors.max()):.2g} of their spread from the model's own"
    raise _does_not_fit(files, "layers", got, "logits = W h, and nothing but attention between")


def _require_vocabulary(files: PretrainedFiles, store: ShardStore) -> None:
    """The same tokens under the same ids, as far as tokenizers lie beside both."""
    size = store.manifest.vocab_size
    if files.num_logits < size:
        raise _does_not_fit(files, "vocabulary", files.num_logits, f"at least {size} tokens")
    with tempfile.TemporaryDirectory() as folder:
        store.copy_files("tokenizer", Path(folder))
        ours, theirs = load_tokenizer(Path(folder)), load_tokenizer(files.folder)
        if ours is None or theirs is None:
            return
        known, given = ({i: t for t, i in each.get_vocab().items()} for each in (ours, theirs))
    other = [i for i in range(size) if known.get(i) != given.get(i)]
    if other:
        first = other[0]
        got = f"{len(other)} other tokens, the first {given.get(first)!r} as id {first}"
        raise _does_not_fit(files, "tokenizer", got, f"{known.get(first)!r}, as in the store")


def _does_not_fit(files: PretrainedFiles, part: str, got: object, expected: str) -> UsageError:
    return UsageError(
        "the language model does not fit the student",
        where=f"--init-from {files.name}, {part}",
        got=got,
        expected=expected,
        remedy="start from the teacher of the shards, or extract with this model's tokenizer",
    )


# First weights from another student of ours, and the weights that bring noise in.


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
    if student.settings.noise.injection != "add":
        raise UsageError(
            "the noise would replace the mask embedding that the model has learnt",
            where="model.noise.injection",
            got=f"{student.settings.noise.injection}, and a model without noise in {directory}",
            expected="add",
            remedy="add --set model.noise.injection=add",
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


# First weights of a student, from wherever ``--init-from`` leads.


def load_initial_weights(student: Student, place: str | Path, store: ShardStore) -> None:
    """Start from a trained student of the same shape, or from the language model below a student.

    Noise that is added (``injection``) begins silent behind both: the first loss is the source's.

    Args:
        student: Receives the weights.
        place: See :func:`find_source`.
        store: What the student is trained on.

    Raises:
        UsageError: When nothing is there, or it does not fit; see the two.
    """
    source = find_source(place)
    if source.language_model is None:
        load_student_weights(student, source.folder, store.manifest)
        return
    if student.is_conditioned and student.settings.noise.injection == "add":
        silence_noise(student)
    adopt_language_model(student, source.language_model, store)
