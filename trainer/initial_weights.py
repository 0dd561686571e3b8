"""What a student starts from: another student of ours, or a language model of transformers."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from shards.errors import UsageError, first_line
from shards.language_model.loading import PretrainedFiles, find_pretrained, load_causal_model, looks_local
from shards.store.manifest import Manifest
from shards.store.store import ShardStore
from trainer.students.backbone import attention_window
from trainer.students.decoder import DecoderBackbone, cannot_become_a_student
from trainer.students.dit import causal_attention
from trainer.students.folder import find_model, load_tokenizer, read_model, weights_sha256
from trainer.students.registry import Student

OWN_TYPES = "gdistill-"
"""What model types of ours begin with."""
NO_PART_OF_THE_NETWORK = {"_name_or_path", "architectures", "dtype", "transformers_version", "use_cache"}
TOLERANCE = 1e-4
"""How far logits may lie from the model's own by rounding, as a share of their spread."""
COMPARED_AT_ONCE = 64
"""Positions: logits of a whole row are held once, of the model itself."""
STORE_BUFFERS = {"time_bounds", "conditioner.unigram_log_probs"}
"""Buffers that the run and its store decide, not the model that weights come from."""


@dataclass(frozen=True)
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
    if str(read_config(folder).get("model_type")).startswith(OWN_TYPES):
        return Source(folder)
    return Source(folder, find_pretrained(folder, role="source"))


def network_settings(place: str | Path | None, kind: type[Student], run_folder: Path | None = None) -> dict[str, Any]:
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
        found = read_config(source.folder)
        if source.language_model is not None:
            config = source.language_model.text_config
            values = {**json.loads(config.to_json_string()), "model_type": config.model_type}
            network = {n: v for n, v in values.items() if n not in NO_PART_OF_THE_NETWORK}
            found = {"language_model": network, "predicts_next": "predicts_next" in kind.reads}
    except UsageError:
        begun = {} if run_folder is None else read_config(run_folder)
        if not begun:
            raise
        found = begun.get("model", {})
    network = found.get("language_model")
    if network is None:
        return {}
    shape = AutoConfig.for_model(**network)
    try:
        return {
            "model": {
                "language_model": network,
                "predicts_next": found["predicts_next"],
                "hidden_size": shape.hidden_size,
                "num_layers": shape.num_hidden_layers,
                "num_heads": shape.num_attention_heads,
            }
        }
    except AttributeError as error:  # no attention: a state space model, RWKV
        raise cannot_become_a_student(network.get("model_type"), first_line(error)) from error


def read_config(folder: Path) -> dict[str, Any]:
    """A folder's ``config.json``; empty where there is none to read."""
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


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
    if student.is_conditioned and student.adds_noise:
        silence_noise(student)
    adopt_language_model(student, source.language_model, store)


# First weights from another student of ours, and the weights that bring noise in.


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
    source, where = read_model(directory), f"--init-from {directory}"
    for name in ("vocab_size", "row_length"):
        ours, theirs = getattr(source.config, name), getattr(manifest, name)
        if ours != theirs:
            what, expected = (f"the student has another {name} than the store", f"the store's {theirs}")
            remedy = "extract with the tokenizer and row length the student was trained with"
            raise UsageError(what, where=where, got=ours, expected=expected, remedy=remedy)
    got, expected = source.config.frozen, student.config.frozen
    if got != expected:
        what = "the model stands on another backbone"
        raise UsageError(what, where=where, got=got, expected=expected)
    weights = {n: w for n, w in source.state_dict().items() if n not in STORE_BUFFERS}
    wanted = {n: w for n, w in student.state_dict().items() if n not in STORE_BUFFERS}
    if student.is_conditioned and not source.is_conditioned:
        if not student.adds_noise:
            injection = student.settings.noise.injection
            what = "the noise would replace the mask embedding that the model has learnt"
            got = f"{injection}, and a model without noise in {directory}"
            place, remedy = "model.noise.injection", "add --set model.noise.injection=add"
            raise UsageError(what, where=place, got=got, expected="add", remedy=remedy)
        added = silence_noise(student)
        wanted = {n: w for n, w in wanted.items() if n not in added}
    wrong = misfit(weights, wanted)
    if wrong:
        remedy = "use the architecture and conditioning that the model was trained with"
        what = "the weights do not fit the student"
        raise UsageError(what, where="--init-from", got=wrong, remedy=remedy)
    student.load_state_dict(weights, strict=False)


def misfit(given: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    """Which weights are missing, left over or of another shape, the first of each; empty where all fit."""
    both = sorted(given.keys() & wanted.keys())
    shapes = {n: (tuple(given[n].shape), tuple(wanted[n].shape)) for n in both}
    parts = {
        "missing": sorted(wanted.keys() - given.keys()),
        "unexpected": sorted(given.keys() - wanted.keys()),
        "of another shape": [f"{n} {got}, expected {own}" for n, (got, own) in shapes.items() if got != own],
    }
    return "; ".join(f"{kind}: {', '.join(names[:3])}" for kind, names in parts.items() if names)


def silence_noise(student: Student) -> set[str]:
    """Zero the matrices that bring noise in; the names of all weights that come with noise."""
    parts = ("conditioner.", "backbone.noise_readings.")
    added = {name: p for name, p in student.named_parameters() if name.startswith(parts)}
    # Of W_r A only A is zeroed: were both, neither would ever have a gradient.
    kept = {"conditioner.weight"} if "conditioner.map.weight" in added else set()
    for name in added.keys() - kept:
        if name.endswith(".weight"):
            torch.nn.init.zeros_(added[name])
    return set(added)


# A language model's weights into a student that has its network.


def adopt_language_model(student: Student, files: PretrainedFiles, store: ShardStore) -> None:
    """Give a student the weights of a language model.

    The mask's embedding begins as the mean of all others, its logit at 0 (it is never predicted).
    Attending to the left alone, the student then says what the model says, which is tried.

    Args:
        student: With the network of that model (:func:`network_settings`).
        files: The model.
        store: What the student is trained on.

    Raises:
        UsageError: For another vocabulary, a model that reads fewer tokens than a row has, or one
            whose layers do more than the student's.
        GdistillError: If its weights are damaged or incomplete.
    """

    def does_not_fit(part: str, got: object, expected: str) -> UsageError:
        return UsageError(
            "the language model does not fit the student",
            where=f"--init-from {files.name}, {part}",
            got=got,
            expected=expected,
            remedy="start from the teacher of the shards, or extract with this model's tokenizer",
        )

    backbone, size, length = student.backbone, store.manifest.vocab_size, store.manifest.row_length
    if not isinstance(backbone, DecoderBackbone):
        got = f"a {type(backbone).__name__}"
        raise does_not_fit("network", got, "the model's: compose with network_settings")
    if files.num_logits < size:
        raise does_not_fit("vocabulary", files.num_logits, f"at least {size} tokens")
    other = other_tokens(store, files)
    if other:
        place, ours, theirs = other[0]
        got = f"{len(other)} other tokens, the first {theirs!r} as id {place}"
        raise does_not_fit("tokenizer", got, f"{ours!r}, as in the store")
    if files.context_length is not None and files.context_length < length:
        raise does_not_fit("rows", length, f"at most {files.context_length} tokens")
    window = attention_window(files.text_config)
    if window is not None and window < length:
        got = f"a sliding window of {window} tokens, which a student would lift"
        raise does_not_fit("attention", got, f"at least the {length} of a row")
    model = load_causal_model(files, "float32", vocab_size=size).network
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    width = student.settings.hidden_size
    if type(outputs) is not nn.Linear or inputs.weight.shape[1] != width:
        got = f"{type(outputs).__name__} of states, embeddings of {inputs.weight.shape[1]}"
        raise does_not_fit("ends", got, f"a linear output layer, embeddings of {width}")
    named = model.base_model.named_modules()
    embedding = next(name for name, part in named if part is inputs)
    weights = model.base_model.state_dict()
    weights = {n: w for n, w in weights.items() if not n.startswith(f"{embedding}.")}
    found = backbone.network.load_state_dict(weights, strict=False)
    if found.missing_keys or found.unexpected_keys:
        raise does_not_fit("weights", str(found), "those of its configuration")
    linear, known = backbone.output_layer.linear, inputs.weight[:size]
    with torch.no_grad():
        _fill(backbone.vocab_embed.embedding, known, known.mean(0))
        _fill(linear.weight, outputs.weight[:size], torch.zeros(width))
        bias = torch.zeros(size) if outputs.bias is None else outputs.bias[:size]
        _fill(linear.bias, bias, torch.zeros(()))
    apart = _difference(backbone, model, files, length)
    if not apart <= TOLERANCE:
        got = f"logits that differ by {apart:.2g} of their spread from the model's own"
        raise does_not_fit("layers", got, "logits = W h, and nothing but attention between")


def _fill(target: Tensor, known: Tensor, mask: Tensor) -> None:
    target[:-1], target[-1] = known, mask


@torch.no_grad()
def _difference(backbone: DecoderBackbone, model: Any, files: PretrainedFiles, length: int) -> float:
    """How far the student's logits lie from the model's over a whole row that attends to the left.

    A share of their spread, at the worst position. A network that does more than its layers and its
    head, such as capped or scaled logits, shows itself here.
    """
    size = backbone.vocab_embed.embedding.shape[0] - 1
    positions = torch.arange(length)
    tokens = (positions * 7919 % size)[None]
    expected = model(input_ids=tokens, use_cache=False).logits[..., :size]
    training = backbone.training
    backbone.eval()
    try:
        hidden = backbone(backbone.vocab_embed(tokens), None, positions, causal_attention)
    except (RuntimeError, AttributeError, LookupError, TypeError, ValueError) as error:
        kind = files.text_config.model_type  # its layers are not handed what it is called with
        raise cannot_become_a_student(kind, f"{type(error).__name__}: {error}") from error
    backbone.train(training)
    if backbone.predicts_next:
        hidden, expected = hidden[:, 1:], expected[:, :-1]
    head, pairs = backbone.output_layer, zip(*(x.split(COMPARED_AT_ONCE, 1) for x in (hidden, expected)), strict=True)
    found = ((head(head.features(states, None))[..., :size], wanted) for states, wanted in pairs)
    errors = [(logits - wanted).square().mean(dim=-1).amax() for logits, wanted in found]
    return float(torch.stack(errors).amax().sqrt() / expected.std())


def other_tokens(store: ShardStore, files: PretrainedFiles) -> list[tuple[int, Any, Any]]:
    """Ids below V with another token in the model: id, the store's, the model's.

    Compared as far as tokenizers lie beside both.
    """
    with tempfile.TemporaryDirectory() as folder:
        store.copy_files("tokenizer", Path(folder))
        ours, theirs = load_tokenizer(Path(folder)), load_tokenizer(files.folder)
    if ours is None or theirs is None:
        return []
    known, given = ({i: t for t, i in each.get_vocab().items()} for each in (ours, theirs))
    ids = range(store.manifest.vocab_size)
    return [(i, known.get(i), given.get(i)) for i in ids if known.get(i) != given.get(i)]
