"""The last layer of a model: logits in float32 whatever the precision of the rest.

Logits of GPT-2 lie around -90, where bfloat16 steps by half a nat; rounding them costs 0.01 nats of
KL per token. The product of bfloat16 factors is exact in float32, so the head never rounds at all.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional


class Float32Head(nn.Module):
    """Takes the place of a model's output layer and remembers what went through it.

    Of a layer that is cut over several GPUs it takes the whole: each of them then has all logits.

    Attributes:
        last_hidden: [B, T, D] its last input, in the model's precision.
        last_logits: [B, T, V] its last output.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = _whole(linear.weight)
        self.bias = None if linear.bias is None else _whole(linear.bias)
        self.last_hidden: Tensor | None = None
        self.last_logits: Tensor | None = None
        self._wide = None
        if self.weight.dtype != torch.float32 and self.weight.device.type != "cuda":
            self._wide = self.weight.float()

    def forward(self, hidden: Float[Tensor, "b t d"]) -> Float[Tensor, "b t v"]:
        hidden = hidden.to(self.weight.device)  # the layer before may lie on another one
        self.last_hidden = hidden
        self.last_logits = self._logits(hidden)
        return self.last_logits

    def _logits(self, hidden: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        if self.weight.dtype == torch.float32:
            return functional.linear(hidden.float(), self.weight, bias)
        if self._wide is not None:
            return functional.linear(hidden.float(), self._wide, bias)
        flat = hidden.flatten(0, -2).to(self.weight.dtype)
        logits = torch.mm(flat, self.weight.T, out_dtype=torch.float32)
        logits = logits if bias is None else logits.add_(bias)
        return logits.unflatten(0, hidden.shape[:-1])

    def forget(self) -> None:
        """Let go of the remembered tensors."""
        self.last_hidden = self.last_logits = None


def _whole(parameter: Any) -> nn.Parameter:
    if isinstance(parameter, DTensor):
        whole: Any = parameter.detach()
        return nn.Parameter(whole.full_tensor(), requires_grad=False)
    return parameter


def install_float32_head(network: nn.Module) -> Float32Head | None:
    """Put a float32 head in place of the model's output layer, if that is a plain linear one."""
    linear = network.get_output_embeddings()  # type: ignore[operator]
    if type(linear) is not nn.Linear:
        return None
    head = Float32Head(linear)
    network.set_output_embeddings(head)  # type: ignore[operator]
    return head
