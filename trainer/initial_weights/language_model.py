"""A language model's weights into a student that has its network."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shards.base import UsageError
from shards.language_model import PretrainedFiles, load_causal_model
from shards.store import ShardStore
from trainer.students import DecoderBackbone, Student, causal_attention, load_tokenizer

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
    _require_same_logits(backbone, model, files, size)


def _fill(target: Tensor, known: Tensor, mask: Tensor) -> None:
    target[:-1], target[-1] = known, mask


@torch.no_grad()
def _require_same_logits(
    backbone: DecoderBackbone, model: Any, files: PretrainedFiles, vocab_size: int
) -> None:
    """Refuse a network that does more than its layers and its head: capped or scaled logits, .."""
    length = min(8, files.context_length or 8)
    tokens = (torch.arange(length) * vocab_size // length)[None]
    expected = model(input_ids=tokens, use_cache=False).logits[..., :vocab_size]
    training = backbone.training
    backbone.eval()
    positions = torch.arange(length)
    hidden = backbone(backbone.vocab_embed(tokens), None, positions, causal_attention)
    backbone.train(training)
    if backbone.predicts_next:
        hidden, expected = hidden[:, 1:], expected[:, :-1]
    logits = backbone.output_layer(backbone.output_layer.features(hidden, None))[..., :vocab_size]
    error = float((logits - expected).square().mean().sqrt() / expected.std())
    if not error <= TOLERANCE:
        got = f"logits that differ by {error:.2g} of their spread from the model's own"
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
