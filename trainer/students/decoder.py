"""The layers of a language model of transformers as a student's backbone.

The network runs as transformers wrote it; its attention alone is ours, through the library's door
for such kernels. It hands every call the pass that it belongs to: who attends to whom (any pattern
of :mod:`trainer.students.dit`), the keys and values of finished tokens, and the noise that
the states behind a layer read. Sliding windows of a network are so lifted.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import dropout
from transformers import AttentionInterface, AutoConfig, AutoModel

from shards.errors import UsageError, first_line
from trainer.students.conditioning import LayerNoise
from trainer.students.configuration import StudentSettings
from trainer.students.dit import Attend, Embedding, KeyValueCache, Level, States, ZeroLinear, noise_layers

ATTENTION = "gdistill_student"


class Pass:
    """One call of the network, as its attention and the hooks behind its layers see it.

    No dataclass: FSDP makes copies of those on the way into a layer.
    """

    def __init__(
        self, backbone: DecoderBackbone, attend: Attend, cache: KeyValueCache | None, noise: LayerNoise | None
    ) -> None:
        self.attend, self.cache, self.noise, self.dropout = attend, cache, noise, backbone.dropout
        self.noise_layers, self.head = backbone.noise_readings, backbone.output_layer.linear.weight


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    student_pass: Pass,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' signature: [B, heads, length, width] each -> [B, length, heads, width]."""
    ours = query.shape[-1] ** -0.5
    if scaling is not None and scaling != ours:
        query = query * (scaling / ours)
    if student_pass.cache is not None:
        layer: Any = module.layer_idx
        key, value = student_pass.cache.write(layer, key, value)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    attended = student_pass.attend(query, key.to(query.dtype), value.to(query.dtype))
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, _attention)


def _behind_layer(depth: int, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> Any:
    """Hook behind layer ``depth``: dropout of what it added, then the noise that is read there.

    A function of its arguments alone: a copied student's hooks are then the copy's.
    """
    run: Pass = named["student_pass"]
    states = output[0] if isinstance(output, tuple) else output
    if run.dropout and module.training:
        before = inputs[0] if inputs else named["hidden_states"]
        states = before + dropout(states - before, run.dropout)
    if run.noise is not None and str(depth) in run.noise_layers:
        states = run.noise_layers[str(depth)](states, run.noise, run.head)
    return (states, *output[1:]) if isinstance(output, tuple) else states


def layer_lists(network: Any) -> list[tuple[nn.Module, str]]:
    """Where the network keeps a list of as many modules as it has layers: parent and name."""
    count = network.config.get_text_config(decoder=True).num_hidden_layers
    return [
        (module, name)
        for module in network.base_model.modules()
        for name, child in module.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == count
    ]


def _layers(network: Any) -> nn.ModuleList:
    ((parent, name),) = layer_lists(network)
    return getattr(parent, name)


def empty_network(decoder: dict[str, Any]) -> Any:
    """The network of a configuration, initial weights, without token embeddings.

    Raises:
        UsageError: If transformers does not know it, or cannot run it with another attention.
    """
    try:
        config = AutoConfig.for_model(**decoder)
        network = AutoModel.from_config(config, attn_implementation=ATTENTION)
    except (KeyError, ValueError, TypeError, ImportError) as error:
        raise cannot_become_a_student(decoder.get("model_type"), first_line(error)) from error
    lists = layer_lists(network)
    if len(lists) != 1:
        raise cannot_become_a_student(decoder["model_type"], f"{len(lists)} lists of its layers")
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # the student's own is between layers
    for depth, layer in enumerate(_layers(network), start=1):
        layer.register_forward_hook(functools.partial(_behind_layer, depth), with_kwargs=True)
    network.set_input_embeddings(nn.Identity())
    return network


def cannot_become_a_student(model_type: object, got: str) -> UsageError:
    """For a network that cannot be had, or cannot attend to both sides."""
    return UsageError(
        "this language model cannot become a student",
        where=f"model.language_model, {model_type}",
        got=got,
        expected="a decoder of transformers that takes other attention kernels (Llama, GPT-2, ...)",
    )


class PlainHead(nn.Module):
    """Projection to V + 1 logits; the network has normalised its last states itself."""

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.linear = ZeroLinear(hidden_size, vocab_size + 1)

    def features(self, x: States, level: Level) -> States:
        """What the projection sees."""
        return x.to(self.linear.weight.dtype)

    def forward(self, features: Float[Tensor, "*shape d"]) -> Float[Tensor, "*shape v1"]:
        return self.linear(features)


class DecoderBackbone(nn.Module):
    """What :class:`DiT` is, from the layers of a language model; it knows no noise levels.

    Embedding and output layer have V + 1 rows, as all students', and are never tied.

    Args:
        settings: With ``language_model``, the network's configuration.
        vocab_size: V.

    Raises:
        UsageError: If that network cannot be had.
    """

    def __init__(self, settings: StudentSettings, vocab_size: int) -> None:
        super().__init__()
        assert settings.language_model is not None
        self.network = empty_network(settings.language_model)
        self.vocab_embed = Embedding(vocab_size + 1, settings.hidden_size, settings.embedding_init_std)
        self.output_layer = PlainHead(settings.hidden_size, vocab_size)
        self.noise_readings = noise_layers(settings, vocab_size)
        self.dropout, self.predicts_next = settings.dropout, settings.predicts_next
        shape = self.network.config.get_text_config(decoder=True)
        heads = shape.num_attention_heads
        self.head_width = getattr(shape, "head_dim", None) or shape.hidden_size // heads
        self.num_key_value_heads = getattr(shape, "num_key_value_heads", None) or heads

    @property
    def blocks(self) -> nn.ModuleList:
        """The network's layers."""
        return _layers(self.network)

    def embed_sigma(self, sigma: Float[Tensor, "b"]) -> None:
        """None: a language model knows no noise levels."""

    def forward(
        self,
        x: States,
        level: Level,
        positions: Int[Tensor, "l"],
        attend: Attend,
        cache: KeyValueCache | None = None,
        noise: LayerNoise | None = None,
    ) -> States:
        """Embeddings -> last hidden states, behind the network's own final norm.

        Where they predict the next token, the state of position i is put at i + 1, whose token it
        is about; position 0 is never predicted.
        """
        # A rank's share of a last batch may be empty, which the layers cannot reshape.
        rows = x if len(x) else x.new_zeros(1, *x.shape[1:])
        run = Pass(self, attend, cache, noise)
        states = self.network(
            inputs_embeds=rows, position_ids=positions[None], use_cache=False, student_pass=run
        ).last_hidden_state
        if self.predicts_next:  # the state behind nothing has no token to predict: it is dropped
            states = torch.cat((states[:, :1], states[:, :-1]), dim=1)
        return states[: len(x)]
