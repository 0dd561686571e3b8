"""LoRA that touches slots and leaves tokens as they are.

`peft` puts an adapter beside every linear layer of the network; two hooks on each let only the last
positions of a call through it. What the other positions get added is zero, so the keys and values
of the tokens are the frozen network's own, in whatever call they are computed.

The weights belong to the student, which is built, saved and loaded without the network: when it is
attached, they take the place of those that `peft` has made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.pytorch_utils import Conv1D

from shards.errors import UsageError
from shards.noise.kinds import KeyedPosterior, KeyedPrior, Noise, Probabilities
from shards.noise.murmur3 import EngineKeys
from shards.noise.philox import PositionKeys, stream_bits
from shards.store.manifest import Manifest
from trainer.objective.batch import Batch, Places
from trainer.objective.corruption import row_uniforms
from trainer.students.backbone import BackboneStudent, FrozenBackbone
from trainer.students.base import LossOutput
from trainer.students.conditioning import GumbelConditioner
from trainer.students.configuration import StudentSettings
from trainer.students.drafter.layout import (
    SlotLayout,
    Stages,
    TokenReading,
    attention_kernel,
    kernel_mask,
    proposed_places,
    require_slots,
    require_whole_attention,
    states_at,
    training_kernel,
)
from trainer.students.fused_head import CHUNK_ROWS
from trainer.students.hugging_face import StudentConfig
from trainer.students.medusa import ZeroLinear
from trainer.students.noise_attention import noise_shares

ADAPTER = "slots"
UNIFORM_STREAM = 4
"""Of the keyed generator; the streams before it draw prior noise."""
VOCABULARY_TILE = 4096


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


# What a slot is told of the noise: nothing, the Gumbel noise of a token, or one uniform of it. A
# signal is an embedding that is added to the slot's own.


class GumbelSignal(GumbelConditioner):
    """softmax(tau xi + w log q) W."""

    def reset_parameters(self) -> None:
        """Zero, until the drafter puts in the token embeddings of its backbone."""
        nn.init.zeros_(self.weight)


class UniformSignal(nn.Module):
    """One uniform u per token (Parallel Token Prediction, Draxler et al., arXiv 2512.21323).

    Interpolates between the rows of W, which lie at u = 0, 1 / (V - 1), .., 1: as many weights as a
    Gumbel signal has.
    """

    prior_weight = 0.0

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(vocab_size, hidden_size))

    def reset_parameters(self) -> None:
        """Zero: what the noise adds is learnt from nothing."""
        nn.init.zeros_(self.weight)

    def forward(
        self, noise: Noise, tau: float = 1.0, table: Tensor | None = None
    ) -> Float[Tensor, "n d"]:
        """Embeddings of n positions' uniforms; a temperature changes F, not u, and W is its own."""
        place = token_uniforms(noise) * (len(self.weight) - 1)
        below = place.long().clamp(max=len(self.weight) - 2)
        share = (place - below).to(self.weight.dtype)[:, None]
        return torch.lerp(self.weight[below], self.weight[below + 1], share)


def token_uniforms(noise: Noise) -> Float[Tensor, "n"]:
    """u in [0, 1) with F^-1(u) the token, F its distribution function by id, float64.

    A posteriori u = F(x - 1) + p_x z, z uniform; a priori u = z, of the same keys. That is exact
    for the distribution that the store gives back: p_x is the teacher's own, but F(x - 1) sums what
    the codec kept of the others. ``posterior`` with ``num_entries`` >= V rounds log p to float16,
    ``hidden`` rounds the hidden state; with fewer entries the tail follows the corpus' unigram, and
    u is off by as much of its mass as lies at other ids.

    Raises:
        UsageError: For noise from a codec that keeps a draw and no distribution, or of an engine,
            which draws no uniform per token.
    """
    if isinstance(noise, KeyedPrior):
        return _uniforms(noise.keys)
    if not isinstance(noise, KeyedPosterior):
        raise no_distribution(noise)
    below = torch.zeros(len(noise.tokens), dtype=torch.float64, device=noise.device)
    total = below.clone()
    for start in range(0, noise.vocab_size, VOCABULARY_TILE):
        stop = min(start + VOCABULARY_TILE, noise.vocab_size)
        probs = noise.probabilities.tile(start, stop).double()
        is_below = torch.arange(start, stop, device=noise.device) < noise.tokens[:, None]
        below += (probs * is_below).sum(dim=1)
        total += probs.sum(dim=1)
    own = noise.token_log_probs.double().exp()
    return ((below + own * _uniforms(noise.keys)) / total).clamp(max=1 - 2.0**-53)


def _uniforms(keys: PositionKeys | EngineKeys) -> Float[Tensor, "n"]:
    if isinstance(keys, EngineKeys):
        raise UsageError("an engine's noise has no uniforms", remedy="draft by gdistill-sample")
    return (stream_bits(keys, UNIFORM_STREAM, 1)[:, 0].double() + 0.5) * 2.0**-32


def no_distribution(noise: Noise) -> UsageError:
    """For noise whose codec has kept a draw."""
    return UsageError(
        "the shards keep noise and no distribution",
        where="codec",
        got=type(noise).__name__,
        expected="the codec posterior or hidden",
        remedy="extract with --codec posterior, or model.backbone.own_noise=seen with Gumbel noise",
    )


# What a slot's prediction is measured against, one number per slot.


@dataclass(frozen=True)
class Truth:
    """What the row and its store say about n places.

    Attributes:
        tokens: [n] the row's tokens.
        probabilities: The teacher's; None where they are not asked for.
    """

    tokens: Int[Tensor, "n"]
    probabilities: Probabilities | None


Target = Callable[[Tensor, Truth], Tensor]
"""(logits [n, V] float32, truth) -> losses [n], nats."""


def token_loss(logits: Float[Tensor, "n v"], truth: Truth) -> Float[Tensor, "n"]:
    """-log q(x): a slot that has seen its own noise knows the token."""
    return cross_entropy(logits, truth.tokens, reduction="none")


def distribution_loss(logits: Float[Tensor, "n v"], truth: Truth) -> Float[Tensor, "n"]:
    """KL(p || q) to the teacher's stored distribution.

    The noise before a place decides the tokens before it, and so p: a slot that knows all of it and
    not its own can reach 0.
    """
    assert truth.probabilities is not None
    probs = truth.probabilities.tile(0, logits.shape[1])
    return -(torch.special.entr(probs) + probs * logits.log_softmax(dim=-1)).sum(dim=-1)


def slot_losses(
    target: Target,
    logits: Callable[[Tensor], Tensor],
    hidden: Float[Tensor, "n d"],
    truth: Truth,
    index: Int[Tensor, "n"],
) -> Float[Tensor, "n"]:
    """Loss of each slot; logits are held for one chunk of slots at a time.

    Args:
        target: The loss.
        logits: Of hidden states.
        hidden: Last hidden states of the slots.
        truth: Their tokens, and the teacher's probabilities at the places that any of them
            proposes.
        index: Which of these places is each slot's.
    """

    def measure(states: Tensor, rows: slice) -> Tensor:
        known = truth.probabilities
        chosen = None if known is None else known.select(index[rows])
        with torch.autocast(states.device.type, enabled=False):
            return target(logits(states), Truth(truth.tokens[rows], chosen))

    width = CHUNK_ROWS.get(hidden.device.type, CHUNK_ROWS["cuda"])
    parts = [slice(first, first + width) for first in range(0, len(hidden), width)]
    if len(parts) <= 1:  # nothing to let go of: computing it again would spare no memory
        return measure(hidden, slice(None)) if parts else hidden.new_zeros(0)
    return torch.cat(
        [checkpoint(measure, hidden[part], part, use_reentrant=False) for part in parts]
    )


# The drafter: the backbone itself, with slots behind a prefix (see :mod:`.layout`).
#
# Slot k of a starting point proposes the k-th token behind the prefix. It sees the prefix, the
# slots before it, and of the noise
#
#     own_noise = seen      that of slots 1..k: the token is decided, and is learnt (cross-entropy)
#     own_noise = hidden    that of slots 1..k-1: the teacher's distribution of the token is
#     decided,
#                           and is learnt (KL); decoding adds the slot's own noise, argmax(h + tau
#                           xi)
#
# Without noise a slot learns the teacher's mean distribution behind the prefix, and decodes alike.
# With ``noise.layers`` slots wait below the last layers until they are told the token before them
# (see :mod:`.stages`): argmax(l + tau xi) needs the last layer's l, so no layer before can know it.
# One pass reads the row without adapters or gradients; its keys and values then serve all starting
# points at once.


class DrafterConfig(StudentConfig):
    """Config of :class:`Drafter`."""

    model_type = "gdistill-drafter"


class Drafter(BackboneStudent):
    """K slots of the backbone, of which the first proposes what the backbone says itself.

    That one carries the noise of its place to the others; ``num_proposed`` = K - 1 tokens are
    proposed behind it.
    """

    config_class = DrafterConfig
    default_sampler = "drafter"
    reads = (
        *BackboneStudent.reads,
        *("noise.layers", "backbone.lora_rank", "backbone.num_starts"),
    )
    _stages: Stages | None = None

    @classmethod
    def describe(cls, backbone: FrozenBackbone) -> dict[str, Any]:
        """See :class:`BackboneStudent`."""
        embeddings = backbone.network.get_input_embeddings().weight
        return {
            **backbone.record,
            "embedding_size": embeddings.shape[1],
            "linear_layers": linear_layers(backbone.network),
        }

    @classmethod
    def make(cls, settings: StudentSettings, manifest: Manifest) -> BackboneStudent:
        """See :class:`BackboneStudent`.

        Gumbel noise begins as the tokens that it favours: xi adds
        sum_j softmax(tau xi + w log q)_j (e_j - mean e), e_j token embeddings.
        """
        student = super().make(settings, manifest)
        assert isinstance(student, Drafter)
        table = student.language_model.network.get_input_embeddings().weight
        embeddings = table[: manifest.vocab_size].detach().float()
        if isinstance(student.conditioner, GumbelSignal):
            with torch.no_grad():
                student.conditioner.weight.copy_(embeddings - embeddings.mean(dim=0))
        return student

    def _build(self, config: StudentConfig) -> None:
        frozen = config.frozen or {}
        self.adapters = SlotAdapters(frozen["linear_layers"], self.settings.backbone.lora_rank)
        self.slot_offsets = nn.Parameter(torch.zeros(self.num_slots, frozen["embedding_size"]))
        self.readings = nn.ModuleList(
            TokenReading(frozen["hidden_size"]) for _ in self.settings.noise.layers
        )
        widths = frozen["hidden_size"], frozen["embedding_size"]
        seen = self.settings.backbone.own_noise == "seen"
        if self.readings and (seen or widths[0] != widths[1]):
            raise UsageError(
                "slots cannot read which token the one before them takes",
                where="model.noise.layers",
                got=f"own_noise {'seen' if seen else 'hidden'}, states, embeddings of {widths}",
                expected="own_noise hidden, and one width",
            )

    def _make_conditioner(self) -> GumbelSignal | UniformSignal | None:  # type: ignore[override]
        settings, size = self.settings, self.config.vocab_size
        width = (self.config.frozen or {})["embedding_size"]
        made = {
            "none": lambda: None,
            "gumbel": lambda: GumbelSignal(
                size, width, settings.noise.transform, settings.noise.prior_weight
            ),
            "uniform": lambda: UniformSignal(size, width),
        }
        return made[settings.conditioning]()

    def attach(self, backbone: FrozenBackbone) -> None:
        """See :class:`BackboneStudent`.

        Raises:
            UsageError: Also for a backbone that cannot read slots.
        """
        super().attach(backbone)
        depths = self.settings.noise.layers
        self._stages = Stages(backbone.network, depths) if depths else None
        self.adapters.attach(backbone.network)
        require_whole_attention(backbone, self.config.row_length)
        require_slots(backbone, self.settings.backbone.dtype, self._stages)

    @property
    def num_slots(self) -> int:
        """K."""
        return self.settings.backbone.num_proposed + 1

    @property
    def reads_codec(self) -> bool:
        """See :class:`Student`; without noise it learns the teacher's distribution."""
        return True

    @property
    def sharded_blocks(self) -> tuple[nn.Module, ...]:
        """See :class:`Student`; none: the network calls the parts of an adapter one by one."""
        return ()

    @property
    def num_read_tokens(self) -> int:
        """The row, and the slots of its starting points."""
        length = self.config.row_length
        return length + self.num_slots * min(
            self.settings.backbone.num_starts, length - self.num_slots
        )

    def loss(self, batch: Batch, *, time_bounds: tuple[float, float] | None = None) -> LossOutput:
        """Mean loss of the slots of ``num_starts`` starting points a row, keyed by the batch.

        ``token_nlls`` holds at a place the sum over the slots that propose it, nats: of -log q(x)
        where own noise is seen, else of KL(p || q).

        Args:
            batch: Rows with the noise or the distribution of their store.
            time_bounds: Without meaning here.

        Raises:
            UsageError: For rows of no more than K tokens, or a batch without what is needed.
        """
        layout = self.draw_layout(batch)
        where, index = proposed_places(layout, batch.tokens)
        inputs = self.slot_inputs(batch.tokens, layout, self._noise_table(batch, where))
        kernel = training_kernel(
            self.language_model.network, self.settings.attention, batch.tokens.device
        )
        hidden = self.slot_states(batch.tokens, layout, inputs, kernel).flatten(0, 1)
        probabilities = None if self.sees_own_noise else batch.distribution(where)
        truth = Truth(batch.tokens.gather(1, layout.places).flatten(), probabilities)
        target = token_loss if self.sees_own_noise else distribution_loss
        losses = slot_losses(target, self.logits, hidden, truth, index)
        per_token = torch.zeros(batch.tokens.shape, device=losses.device)
        return LossOutput(
            loss=losses.mean() if len(losses) else hidden.sum() * 0.0,
            token_nlls=per_token.scatter_add(
                1, layout.places, losses.detach().view_as(layout.places)
            ),
            num_tokens=losses.numel(),
            num_masked=losses.numel(),
            num_blocks=1,
        )

    def draw_layout(self, batch: Batch) -> SlotLayout:
        """Different starting points of each row, keyed by (seed, epoch, row).

        Raises:
            UsageError: For rows of no more than K tokens.
        """
        possible = batch.tokens.shape[1] - self.num_slots
        if possible < 1:
            raise UsageError(
                "rows too short for the slots",
                where="model.backbone.num_proposed",
                got=f"{self.num_slots} slots, rows of {batch.tokens.shape[1]} tokens",
                expected="more tokens than slots",
            )
        order = row_uniforms("starting points", batch, 0, possible).argsort(dim=1, stable=True)
        chosen = order[:, : self.settings.backbone.num_starts].sort(dim=1).values
        return SlotLayout(chosen + 1, self.num_slots, batch.tokens.shape[1])

    def _noise_table(self, batch: Batch, where: Places) -> Float[Tensor, "b l e"] | None:
        if not self.is_conditioned:
            return None
        if batch.noise is None:
            remedy = "read it from a store whose codec gives noise"
            raise UsageError("the batch carries no noise", where="conditioning", remedy=remedy)
        embedded = self.embed_noise(batch.noise.at(where))
        blank = embedded.new_zeros(*batch.tokens.shape, embedded.shape[-1])
        return blank.index_put(where.index, embedded)

    def slot_inputs(
        self,
        tokens: Int[Tensor, "b t"],
        layout: SlotLayout,
        noise_table: Float[Tensor, "b l e"] | None,
    ) -> Float[Tensor, "b n e"]:
        """What the slots are fed: the last token before them, their number, and the noise.

        All slots of a point begin as the token embedding that the backbone reads at that place, so
        that untrained the first proposes nearly what the backbone says; beginning as the mean
        embedding cost 0.08 nats of validation KL after 1,000 steps.

        Args:
            tokens: The rows; those before the starting points are read.
            layout: The slots.
            noise_table: Noise embeddings by row position; None without noise.
        """
        embed = self.language_model.network.get_input_embeddings()
        last = embed(tokens.gather(1, layout.starts - 1)).detach().float()
        own = (last[:, :, None] + self.slot_offsets).flatten(1, 2)
        if noise_table is None:
            return own
        told = layout.places - (0 if self.sees_own_noise else 1)
        is_told = (told >= layout.prefix_lengths) & (told < noise_table.shape[1])
        index = told.clamp(0, noise_table.shape[1] - 1)[..., None]
        values = noise_table.gather(1, index.expand(-1, -1, noise_table.shape[-1]))
        values, width = values * is_told[..., None], own.shape[-1]
        return torch.cat((own + values[..., :width], values[..., width:]), dim=-1)

    def slot_states(
        self,
        tokens: Int[Tensor, "b l"],
        layout: SlotLayout,
        inputs: Float[Tensor, "b n e"],
        kernel: str | None = None,
    ) -> Float[Tensor, "b n d"]:
        """Last hidden states of the slots; gradients reach the adapters and the inputs.

        Args:
            tokens: The rows.
            layout: The slots.
            inputs: Of :meth:`slot_inputs`.
            kernel: Attention of the slots by transformers' name; the network's own unless told.
        """
        if not len(tokens):  # a process's share of a last batch; transformers take no such rows
            return inputs.new_zeros(*inputs.shape[:2], self.language_model.hidden_size)
        network, cache = self.language_model.network, DynamicCache()
        with torch.no_grad(), self.adapters.on_last(0):
            known = network.base_model(input_ids=tokens, past_key_values=cache, use_cache=True)
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        with attention_kernel(network, kernel):
            last = states_at(known.last_hidden_state, layout.starts - 1)
            return self.read_slots(cache, layout, inputs, places, last)

    def read_slots(
        self,
        cache: DynamicCache,
        layout: SlotLayout,
        inputs: Float[Tensor, "b n e"],
        key_places: Int[Tensor, "b w"],
        last: Float[Tensor, "b s d"],
    ) -> Float[Tensor, "b n d"]:
        """Last hidden states of slots behind tokens that have been read.

        With ``noise.layers`` the layers above each of these depths are run by themselves, once
        the slots have read the token that the one before them takes: the backbone's own behind
        ``last`` at once, what slots say of theirs from the second reading on.

        Args:
            cache: Keys and values of the tokens; those of the slots are left in it.
            layout: The slots.
            inputs: Of :meth:`slot_inputs`.
            key_places: Row positions of the cached tokens.
            last: Last hidden states of the tokens before the starting points.
        """
        depths = self.settings.noise.layers
        width, num_new = self.slot_offsets.shape[1], inputs.shape[1]
        network, shares = self.language_model.network, inputs[..., width:]
        call = {
            "inputs_embeds": inputs[..., :width].to(network.dtype),
            "position_ids": layout.positions,
            "attention_mask": self.attention_mask(layout, key_places, 0),
            "past_key_values": cache,
            "use_cache": True,
        }
        with self.adapters.on_last(num_new):
            if not depths:
                return network.base_model(**call).last_hidden_state
            assert self._stages is not None
            with self._stages.only(0, depths[0]) as behind:
                network.base_model(**call)
            states: Tensor | None = None
            for depth, reading in zip(depths, self.readings, strict=True):
                if states is not None:
                    self._stages.forget(cache, depth, num_new)
                entered = behind[depth] + self._read_tokens(reading, last, states, shares)
                with self._stages.only(depth, self._stages.count, entered) as above:
                    states = network.base_model(**call).last_hidden_state
                behind |= above
        assert states is not None
        return states

    def _read_tokens(
        self,
        reading: nn.Module,
        last: Float[Tensor, "b s d"],
        states: Float[Tensor, "b n d"] | None,
        shares: Float[Tensor, "b n v"],
    ) -> Float[Tensor, "b n d"]:
        """What each slot is added for the token before it, where that is known; else 0."""
        assert self.conditioner is not None
        known, (num_rows, num_points, width) = last[:, :, None], last.shape
        if states is not None:
            said = states.view(num_rows, num_points, self.num_slots, width)
            known = torch.cat((known, said[:, :, 1:-1].to(known.dtype)), dim=2)
        told = shares.view(num_rows, num_points, self.num_slots, -1)[:, :, 1 : 1 + known.shape[2]]
        logits = self.logits(known).flatten(0, 2)
        added = reading(logits, told.flatten(0, 2), self.conditioner.weight)
        added = added.view(known.shape).to(known.dtype)
        rest = self.num_slots - 1 - known.shape[2]
        return torch.nn.functional.pad(added, (0, 0, 1, rest)).view(num_rows, -1, width)

    def embed_noise(self, noise: Noise, tau: float = 1.0) -> Float[Tensor, "n e"]:
        """See :class:`Student`; the shares of ``noise.layers`` are softmax(tau xi) alone."""
        if self.conditioner is None or not self.readings:
            return super().embed_noise(noise, tau)
        return torch.cat((self.conditioner(noise, tau), noise_shares(noise, tau, 0.0)), dim=-1)

    def attention_mask(
        self, layout: SlotLayout, key_places: Int[Tensor, "b w"], num_read: int
    ) -> Any:
        """See :func:`kernel_mask`."""
        return kernel_mask(self.language_model.network, layout, key_places, num_read)

    def logits(self, states: Float[Tensor, "*shape d"]) -> Float[Tensor, "*shape v"]:
        """The backbone's own output layer over V tokens, float32."""
        return self.language_model.logits(states).float()

    def forward(
        self,
        input_ids: Int[Tensor, "b l"],
        noise_embeddings: Float[Tensor, "b k e"] | None = None,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> CausalLMOutput:
        """Logits [B, K, V] of the K slots behind whole prefixes.

        Args:
            input_ids: The prefixes.
            noise_embeddings: Of the K tokens behind them (``embed_noise``).
            attention_mask: As tokenizers give it; all of it must be 1.
            **options: Of Hugging Face's callers; what would be ignored is refused.

        Raises:
            UsageError: For padding, labels, or a conditioned student without noise.
        """
        self._refuse_unread(attention_mask, options)
        if self.is_conditioned and noise_embeddings is None:
            remedy = "pass student.embed_noise(noise), or call student.generate"
            raise UsageError("the slots need their noise", where="noise_embeddings", remedy=remedy)
        num_rows, length = input_ids.shape
        starts = torch.full((num_rows, 1), length, device=input_ids.device)
        layout = SlotLayout(starts, self.num_slots, length + self.num_slots)
        table = None
        if noise_embeddings is not None:
            table = torch.nn.functional.pad(noise_embeddings, (0, 0, length, 0))
        states = self.slot_states(input_ids, layout, self.slot_inputs(input_ids, layout, table))
        return CausalLMOutput(logits=self.logits(states))
