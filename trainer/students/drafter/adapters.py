"""LoRA that touches slots and leaves tokens as they are.

`peft` puts an adapter beside every linear layer of the network; two hooks on each let only the last
positions of a call through it. What the other positions get added is zero, so the keys and values
of the tokens are the frozen network's own, in whatever call they are computed.

The weights belong to the student, which is built, saved and loaded without the network: when it is
attached, they take the place of those that `peft` has made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from trainer.students.on_backbone.medusa import ZeroLinear

ADAPTER = "slots"


def linear_layers(network: PreTrainedModel) -> dict[str, list[int]]:
    """Name -> [in, out] of every linear layer that is adapted: all but the output layer."""
    head, found = network.get_output_embeddings(), {}
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear) and module is not head:
            found[name] = [module.in_features, module.out_features]
        elif isinstance(module, Conv1D):
            found[name] = [module.nx, module.nf]
    return found


class LowRank(nn.Module):
    """A and B of one layer: x -> B A x, zero at the beginning (Hu et al. 2021)."""

    def __init__(self, num_in: int, num_out: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(num_in, rank, bias=False)
        self.up = ZeroLinear(rank, num_out)


class SlotAdapters(nn.Module):
    """Low-rank adapters of a network's linear layers; B A is scaled by alpha / r = 2.

    Args:
        shapes: Of :func:`linear_layers`.
        rank: r.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.names = sorted(shapes)  # as JSON gives them back
        self.layers = nn.ModuleList(
            LowRank(shapes[name][0], shapes[name][1], rank) for name in self.names
        )
        self._num_last, self._length = 0, 0

    def attach(self, network: PreTrainedModel) -> None:
        """Put the adapters into the network, whose own parameters stay frozen."""
        targets = "|".join(name.replace(".", r"\.") for name in self.names)
        config = LoraConfig(r=self.rank, lora_alpha=2 * self.rank, target_modules=targets)
        config.fan_in_fan_out = any(isinstance(module, Conv1D) for module in network.modules())
        inject_adapter_in_model(config, network, ADAPTER)
        for name, own in zip(self.names, self.layers, strict=True):
            layer: Any = network.get_submodule(name)
            assert isinstance(layer, LoraLayer) and isinstance(own, LowRank)
            layer.lora_A[ADAPTER], layer.lora_B[ADAPTER] = own.down, own.up
            own.down.register_forward_pre_hook(self._cut)
            own.up.register_forward_hook(self._pad)

    @contextmanager
    def on_last(self, num_positions: int) -> Iterator[None]:
        """Within the context the last positions of every call are slots; none outside of it."""
        before, self._num_last = self._num_last, num_positions
        try:
            yield
        finally:
            self._num_last = before

    def _cut(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        self._length = inputs[0].shape[-2]
        return inputs[0][..., self._length - self._num_last :, :]

    def _pad(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return pad(output, (0, 0, self._length - self._num_last, 0))
