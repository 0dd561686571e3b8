"""A frozen causal language model: its hidden states, its output layer, its identity."""

from __future__ import annotations

import os
from abc import ABC
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import linear

from shards.errors import UsageError
from shards.language_model.forward import DtypeName
from shards.language_model.loading import PretrainedFiles, find_pretrained, load_causal_model, looks_local
from shards.settings import to_mapping
from shards.store.manifest import Manifest
from trainer.students.base import Student
from trainer.students.configuration import StudentSettings

HEAD_TOLERANCES = {"float32": 1e-4, "bfloat16": 0.05}
"""How far the output layer's own product may lie from the logits, as a share of their spread."""


class FrozenBackbone:
    """The language model below a student. It is no module: nothing of it is trained or saved.

    Args:
        files: Where it came from.
        network: The model of transformers, in evaluation mode, without gradients.
        vocab_size: V; a padded output layer has more columns, which nobody sees.
        dtype: Precision of its weights.

    Raises:
        UsageError: If its logits are more than a linear layer of its last hidden state.
    """

    def __init__(self, files: PretrainedFiles, network: Any, vocab_size: int, dtype: DtypeName) -> None:
        self.files, self.network, self.vocab_size = files, network, vocab_size
        self.device = torch.device("cpu")
        self._require_linear_head(dtype)

    def to(self, device: torch.device) -> FrozenBackbone:
        """The same backbone, on that device."""
        if self.device != device:
            self.network.to(device)
            self.device = device
        return self

    @property
    def hidden_size(self) -> int:
        """Width D of the last hidden state."""
        return self._output_layer.weight.shape[1]

    @property
    def context_length(self) -> int | None:
        """Most tokens it can see; None without a limit."""
        return self.files.context_length

    @property
    def record(self) -> dict[str, Any]:
        """What a student remembers of it, as JSON."""
        return {
            "name": self.files.name,
            "weights_sha256": self.files.weights_sha256,
            "hidden_size": self.hidden_size,
            "num_parameters": sum(weight.numel() for weight in self.network.parameters()),
        }

    @torch.no_grad()
    def hidden(self, tokens: Int[Tensor, "b l"]) -> Float[Tensor, "b l d"]:
        """The last hidden states, as the output layer sees them; one forward pass."""
        if not len(tokens):  # a process's share of a last batch; transformers take no such rows
            return self._output_layer.weight.new_zeros(*tokens.shape, self.hidden_size)
        return self.network.base_model(input_ids=tokens, use_cache=False).last_hidden_state

    def logits(self, hidden: Float[Tensor, "*shape d"]) -> Float[Tensor, "*shape v"]:
        """The output layer over V tokens, in its own precision; gradients reach ``hidden``."""
        head, size = self._output_layer, self.vocab_size
        bias = None if head.bias is None else head.bias[:size]
        return linear(hidden.to(head.weight.dtype), head.weight[:size], bias)

    @property
    def _output_layer(self) -> Any:
        return self.network.get_output_embeddings()

    @torch.no_grad()
    def _require_linear_head(self, dtype: DtypeName) -> None:
        got = "no plain linear layer"
        if type(self._output_layer) is torch.nn.Linear:
            rows = torch.arange(min(8, self.vocab_size))[None]
            logits = self.network(input_ids=rows, use_cache=False).logits[..., : self.vocab_size]
            error = (self.logits(self.hidden(rows)) - logits).float().square().mean().sqrt()
            share = float(error / logits.float().std())
            if share <= HEAD_TOLERANCES[dtype]:
                return
            got = f"logits that differ from its product by {share:.2g} of their spread"
        what = "the backbone's output layer cannot be continued"
        expected = "logits = W h, with h the last hidden state"
        raise UsageError(what, where=f"backbone, {self.files.name}", got=got, expected=expected)


def attention_window(config: Any) -> int | None:
    """Tokens that a layer of a language model sees at most; None where all see the whole row."""
    kinds = getattr(config, "layer_types", None)
    is_used = {
        "sliding_window": kinds is None or "sliding_attention" in kinds,
        "attention_chunk_size": True,
        "window_size": "local" in getattr(config, "attention_layers", ()),  # GPT-Neo
    }
    found = [getattr(config, name, None) for name, used in is_used.items() if used]
    return min((window for window in found if isinstance(window, int)), default=None)


def load_backbone(location: str | Path, vocab_size: int, dtype: DtypeName) -> FrozenBackbone:
    """Load a backbone on the CPU.

    Args:
        location: Folder, or hub id.
        vocab_size: V of the shards or the student.
        dtype: Precision of its weights.

    Raises:
        UsageError: When there is none, it is not causal, or its head knows fewer tokens.
        GdistillError: When its weights are damaged or incomplete.
    """
    files = find_pretrained(location, role="backbone")
    if files.num_logits < vocab_size:
        raise UsageError(
            "the backbone knows fewer tokens than the shards",
            where=f"backbone, {files.name}",
            got=files.num_logits,
            expected=f"at least {vocab_size}",
            remedy="give the model that scored the shards",
        )
    loaded = load_causal_model(files, dtype, vocab_size=vocab_size)
    return FrozenBackbone(files, loaded.network, vocab_size, dtype)


def require_backbone(got: FrozenBackbone, weights_sha256: object, name: object, remedy: str) -> FrozenBackbone:
    """The backbone, if it has the weights of the expected model, which is called ``name``.

    Raises:
        UsageError: Naming both hashes.
    """
    if got.files.weights_sha256 == weights_sha256:
        return got
    raise UsageError(
        "another backbone",
        where=f"backbone, {got.files.name}",
        got=f"weights_sha256 {got.files.weights_sha256}",
        expected=f"{weights_sha256 or 'no recorded hash'} of {name}",
        remedy=remedy,
    )


# What students on a frozen backbone share: how they are made, kept and found their backbone.


class BackboneStudent(Student, ABC):
    """Base of the students that a frozen language model carries.

    A subclass builds what it trains in ``_build`` from ``self.config`` alone (``config.frozen``
    holds the backbone's record) and may hook into the network in ``attach``. The backbone is no
    submodule: optimiser, moving average, checkpoint and export never meet it.
    """

    reads: ClassVar[tuple[str, ...]] = (
        *(f"backbone.{name}" for name in ("location", "dtype", "num_proposed", "own_noise")),
        *("noise.transform", "noise.prior_weight"),
    )
    # A head's parts are called chunk by chunk, a drafter's within the backbone's own code.
    sharded_blocks = ()  # type: ignore[assignment]
    _attached: FrozenBackbone | None = None

    @classmethod
    def make(cls, settings: StudentSettings, manifest: Manifest) -> BackboneStudent:
        """See :class:`Student`; the backbone must be the one that scored the shards.

        Raises:
            UsageError: Without a backbone, or for another one than the shards' teacher.
        """
        place, dtype = settings.backbone.location, settings.backbone.dtype
        if place is None:
            what, where = "the student stands on a language model", "model.backbone.location"
            remedy = "--backbone FOLDER or a hub id: the teacher of the shards"
            raise UsageError(what, where=where, got="none", remedy=remedy)
        backbone = load_backbone(place, manifest.vocab_size, dtype)
        teacher = manifest.teacher
        remedy = "self-distillation: give the teacher of the shards, or extract from this backbone"
        require_backbone(backbone, teacher.get("weights_sha256"), teacher.get("id"), remedy)
        config = cls.configure(settings, manifest)
        config.frozen = cls.describe(backbone)
        student = cls(config)
        student.attach(backbone)
        return student

    @classmethod
    def describe(cls, backbone: FrozenBackbone) -> dict[str, Any]:
        """What the config keeps of the backbone: enough to build what is trained without it."""
        return backbone.record

    def attach(self, backbone: FrozenBackbone) -> None:
        """Stand on this backbone.

        Raises:
            UsageError: If it is not the one the student was trained on, naming both hashes.
        """
        frozen = self.config.frozen or {}
        remedy = "give the backbone that the student was trained on"
        require_backbone(backbone, frozen.get("weights_sha256"), frozen.get("name"), remedy)
        self._attached = backbone

    @property
    def language_model(self) -> FrozenBackbone:
        """The backbone, on the student's device."""
        if self._attached is None:
            self.complete(Path(self.name_or_path or "."))
        assert self._attached is not None
        return self._attached.to(self.device)

    def complete(self, directory: Path, backbone: str | None = None) -> None:
        """See :class:`Student`; looks where the config says, as seen from the model's folder."""
        settings = self.settings.backbone
        place = backbone or settings.location or ""
        if backbone is None and (directory / place / "config.json").is_file():
            place = str(directory / place)
        try:
            found = load_backbone(place, self.config.vocab_size, settings.dtype)
        except UsageError as error:
            frozen = self.config.frozen or {}
            known = f"{frozen.get('name')}, weights_sha256 {frozen.get('weights_sha256')}"
            raise UsageError(
                "the backbone of the student cannot be loaded",
                where=place,
                got=error.what if error.got in (None, "") else f"{error.what}: {error.got}",
                expected=known,
                remedy="--backbone FOLDER or hub id",
            ) from error
        self.attach(found)

    def published(self, directory: Path) -> dict[str, Any]:
        """See :class:`Student`; a local backbone is named as seen from the model's folder."""
        place = self.settings.backbone.location or ""
        if not (Path(place).expanduser().exists() or looks_local(place)):
            return {}
        target = Path(place).expanduser().resolve()
        place = os.path.relpath(target, directory.resolve())
        return {"backbone": {**to_mapping(self.settings.backbone), "location": place}}

    @property
    def sees_own_noise(self) -> bool:
        """Whether a proposal is told the noise of its own token, which decides it."""
        return self.is_conditioned and self.settings.backbone.own_noise == "seen"
