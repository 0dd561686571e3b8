"""A frozen causal language model: its hidden states, its output layer, its identity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import linear

from shards.base import UsageError
from shards.language_model import DtypeName, PretrainedFiles, find_pretrained, load_causal_model

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

    def __init__(
        self, files: PretrainedFiles, network: Any, vocab_size: int, dtype: DtypeName
    ) -> None:
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
        raise UsageError(
            "the backbone's output layer cannot be continued",
            where=f"backbone, {self.files.name}",
            got=got,
            expected="logits = W h, with h the last hidden state",
        )


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


def require_backbone(
    got: FrozenBackbone, weights_sha256: object, name: object, remedy: str
) -> FrozenBackbone:
    """The backbone, if it has the weights that are expected.

    Args:
        got: The loaded one.
        weights_sha256: The expected hash; None where none was recorded.
        name: Of the expected model, for the message.
        remedy: What to do otherwise.

    Raises:
        UsageError: Naming both hashes.
    """
    ours = got.files.weights_sha256
    if ours != weights_sha256:
        raise UsageError(
            "another backbone",
            where=f"backbone, {got.files.name}",
            got=f"weights_sha256 {ours}",
            expected=f"{weights_sha256 or 'no recorded hash'} of {name}",
            remedy=remedy,
        )
    return got
