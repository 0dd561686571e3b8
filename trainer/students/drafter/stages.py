"""The decoder layers of a language model, run in parts.

A slot that is to know which token the one before it takes waits below the last layers until the
network has said so, and goes on from there::

    h <- h + gate W[argmax_x(l + tau xi)]      l: logits of the slot before, xi: its noise

W are the noise embeddings, which begin as token embeddings. The slots' layers are run after the
tokens' pass, not beside it: L + d + (L - d) R layers in a row for R readings at depth d of L.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import DynamicCache

from shards.base import UsageError
from trainer.students.decoder import layer_lists


class TokenReading(nn.Module):
    """What is added to the state of a slot once the token before it is known.

    Args:
        width: D of the backbone.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(width))

    def reset_parameters(self) -> None:
        """One: the token's embedding as it is."""
        nn.init.ones_(self.gate)

    def forward(
        self,
        logits: Float[Tensor, "n v"],
        shares: Float[Tensor, "n v"],
        table: Float[Tensor, "v d"],
    ) -> Float[Tensor, "n d"]:
        """The gated embedding of argmax(l + tau xi); gradients reach gate and table.

        Args:
            logits: l of the slots before.
            shares: softmax(tau xi) of their places.
            table: W.
        """
        return self.gate * table[(logits + shares.log()).argmax(dim=-1)]


class Stages:
    """The decoder layers of one network.

    Args:
        network: Of transformers.
        depths: Layers below each part that is to be run.

    Raises:
        UsageError: If it has no list of ``num_hidden_layers`` layers, or none above a depth.
    """

    def __init__(self, network: Any, depths: Sequence[int]) -> None:
        count = network.config.get_text_config(decoder=True).num_hidden_layers
        lists = layer_lists(network)
        if len(lists) != 1:
            raise UsageError(
                "the backbone's layers cannot be run in parts",
                where="model.noise_readings",
                got=f"{len(lists)} lists of {count} layers in {type(network).__name__}",
                expected="one",
            )
        if list(depths) != sorted(depths) or depths[-1] >= count:
            raise UsageError(
                "no such places to read the noise",
                where="model.noise_readings",
                got=list(depths),
                expected=f"rising depths in 1..{count - 1}: the backbone has {count} layers",
            )
        self.count = count
        self._parent, self._name = lists[0]

    def forget(self, cache: DynamicCache, depth: int, num_new: int) -> None:
        """Drop the last keys and values of the layers above a depth, which are run again."""
        layers: Any = cache.layers
        for layer in layers[depth:]:
            layer.crop(-num_new)

    @contextmanager
    def only(
        self, first: int, last: int, states: Float[Tensor, "b n d"] | None = None
    ) -> Iterator[dict[int, Tensor]]:
        """Within the context a call of the network runs the layers first + 1 .. last alone.

        Args:
            first: Layers below the part.
            last: Layers up to the part's end.
            states: What the part reads in place of what the network hands it.

        Yields:
            The states behind each depth that was run, filled by the call.
        """
        whole = getattr(self._parent, self._name)
        part, behind = whole[first:last], {}

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if args:
                return (states, *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": states}

        def keep(depth: int) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                behind[depth] = output[0] if isinstance(output, tuple) else output

            return hook

        hooks = [
            layer.register_forward_hook(keep(first + index + 1)) for index, layer in enumerate(part)
        ]
        if states is not None:
            hooks.append(part[0].register_forward_pre_hook(enter, with_kwargs=True))
        setattr(self._parent, self._name, part)
        try:
            yield behind
        finally:
            setattr(self._parent, self._name, whole)
            for handle in hooks:
                handle.remove()
