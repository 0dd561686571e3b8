"""The drafter: the backbone itself, with slots behind a prefix (see :mod:`.layout`).

Slot k of a starting point proposes the k-th token behind the prefix. It sees the prefix, the slots
before it, and of the noise

    own_noise = seen      that of slots 1..k: the token is decided, and is learnt (cross-entropy)
    own_noise = hidden    that of slots 1..k-1: the teacher's distribution of the token is decided,
                          and is learnt (KL); decoding adds the slot's own noise, argmax(h + tau xi)

Without noise a slot learns the teacher's mean distribution behind the prefix, and decodes alike.
One pass reads the row without adapters or gradients; its keys and values then serve all starting
points at once.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutput

from shards.base import UsageError
from shards.noise import Probabilities
from shards.store import Manifest
from trainer.objective import Batch, Places, row_uniforms
from trainer.students.base import LossOutput
from trainer.students.configuration import (
    MEDUSA_SETTINGS,
    StudentConfig,
    StudentSettings,
)
from trainer.students.drafter.adapters import SlotAdapters, linear_layers
from trainer.students.drafter.kernel import FLEX, attention_kernel, training_kernel
from trainer.students.drafter.layout import SlotLayout, flex_slot_mask, slot_mask
from trainer.students.drafter.signals import GumbelSignal, UniformSignal
from trainer.students.drafter.targets import Target, Truth, distribution_loss, token_loss
from trainer.students.fused_head import CHUNK_ROWS
from trainer.students.on_backbone.backbone import FrozenBackbone
from trainer.students.on_backbone.student import BackboneStudent

TARGETS: dict[str, Target] = {"seen": token_loss, "hidden": distribution_loss}
PROBE_TOLERANCES = {"float32": 1e-4, "bfloat16": 0.05}
"""How far tokens read as slots may lie from tokens, as a share of the hidden states' spread."""


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
    foreign_settings: ClassVar[tuple[str, ...]] = (
        *BackboneStudent.foreign_settings,
        *MEDUSA_SETTINGS,
    )

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
        self.adapters = SlotAdapters(frozen["linear_layers"], self.settings.lora_rank)
        self.slot_offsets = nn.Parameter(torch.zeros(self.num_slots, frozen["embedding_size"]))

    def _make_conditioner(self) -> GumbelSignal | UniformSignal | None:  # type: ignore[override]
        settings, size = self.settings, self.config.vocab_size
        width = (self.config.frozen or {})["embedding_size"]
        made = {
            "none": lambda: None,
            "gumbel": lambda: GumbelSignal(
                size, width, settings.noise_transform, settings.prior_weight
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
        self.adapters.attach(backbone.network)
        _require_whole_attention(backbone, self.config.row_length)
        self._require_slots(backbone)

    @property
    def num_slots(self) -> int:
        """K."""
        return self.settings.num_proposed + 1

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
        return length + self.num_slots * min(self.settings.num_starts, length - self.num_slots)

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
        where, index = _proposed(layout, batch.tokens)
        inputs = self.slot_inputs(batch.tokens, layout, self._noise_table(batch, where))
        kernel = training_kernel(
            self.language_model.network, self.settings.attention, batch.tokens.device
        )
        hidden = self.slot_states(batch.tokens, layout, inputs, kernel).flatten(0, 1)
        probabilities = None if self.sees_own_noise else batch.distribution(where)
        tokens = batch.tokens.gather(1, layout.places).flatten()
        losses = self._losses(hidden, tokens, probabilities, index)
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
                where="model.num_proposed",
                got=f"{self.num_slots} slots, rows of {batch.tokens.shape[1]} tokens",
                expected="more tokens than slots",
            )
        order = row_uniforms("starting points", batch, 0, possible).argsort(dim=1, stable=True)
        chosen = order[:, : self.settings.num_starts].sort(dim=1).values
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
        return own + values * is_told[..., None]

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
            network.base_model(input_ids=tokens, past_key_values=cache, use_cache=True)
        key_places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        with self.adapters.on_last(inputs.shape[1]), attention_kernel(network, kernel):
            output = network.base_model(
                inputs_embeds=inputs.to(network.dtype),
                position_ids=layout.positions,
                attention_mask=self.attention_mask(layout, key_places, 0),
                past_key_values=cache,
                use_cache=True,
            )
        return output.last_hidden_state

    def attention_mask(
        self, layout: SlotLayout, key_places: Int[Tensor, "b w"], num_read: int
    ) -> Any:
        """The slots' pattern as the backbone's attention wants it; see :func:`slot_mask`."""
        network = self.language_model.network
        kernel = network.config._attn_implementation
        if kernel == FLEX:
            return flex_slot_mask(layout, key_places, num_read)
        seen = slot_mask(layout, key_places, num_read)
        if kernel == "sdpa":
            return seen
        lowest = torch.finfo(network.dtype).min
        return torch.where(seen, 0.0, lowest).to(network.dtype)  # added to the scores

    def _losses(
        self,
        hidden: Float[Tensor, "n d"],
        tokens: Int[Tensor, "n"],
        probabilities: Probabilities | None,
        index: Int[Tensor, "n"],
    ) -> Float[Tensor, "n"]:
        """Loss of each slot; logits are held for one chunk of slots at a time."""
        target = TARGETS["seen" if self.sees_own_noise else "hidden"]

        def measure(states: Tensor, rows: slice) -> Tensor:
            chosen = None if probabilities is None else probabilities.select(index[rows])
            with torch.autocast(states.device.type, enabled=False):
                return target(self.logits(states), Truth(tokens[rows], chosen))

        width = CHUNK_ROWS.get(hidden.device.type, CHUNK_ROWS["cuda"])
        parts = [slice(first, first + width) for first in range(0, len(hidden), width)]
        losses = [checkpoint(measure, hidden[part], part, use_reentrant=False) for part in parts]
        return torch.cat(losses) if losses else hidden.new_zeros(0)

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

    @torch.no_grad()
    def _require_slots(self, backbone: FrozenBackbone) -> None:
        """Tokens read as slots, without adapters, must be those of the backbone.

        Raises:
            UsageError: If the model keeps no keys and values, or takes no mask of ours.
        """
        network, half, size = backbone.network, 4, backbone.vocab_size
        rows = (torch.arange(2 * half, device=network.device) % size)[None]
        places = torch.arange(half, device=network.device)[None]
        layout = SlotLayout(places.new_full((1, 1), half + 1), half, 2 * half + 1)
        got = "a forward pass that fails"
        try:
            wanted, cache = backbone.hidden(rows)[:, half:], DynamicCache()
            network.base_model(input_ids=rows[:, :half], past_key_values=cache, use_cache=True)
            found = network.base_model(
                inputs_embeds=network.get_input_embeddings()(rows[:, half:]),
                position_ids=layout.positions,
                attention_mask=self.attention_mask(layout, places, 0),
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state
            error = float((found - wanted).float().square().mean().sqrt() / wanted.float().std())
            got = f"hidden states that differ by {error:.2g} of their spread"
            if error <= PROBE_TOLERANCES[self.settings.backbone_dtype]:
                return
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as error:
            got = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise UsageError(
            "the backbone cannot read slots",
            where=f"backbone, {backbone.files.name}",
            got=got,
            expected="a transformer with a key/value cache that takes a four-dimensional mask",
        )


def _require_whole_attention(backbone: FrozenBackbone, row_length: int) -> None:
    """Refuse a backbone whose tokens see less than the row: slots are masked by hand.

    Raises:
        UsageError: Naming the window.
    """
    window = getattr(backbone.files.text_config, "sliding_window", None)
    if isinstance(window, int) and window < row_length:
        raise UsageError(
            "the backbone's attention has a window shorter than the rows",
            where=f"backbone, {backbone.files.name}",
            got=window,
            expected=f"at least {row_length}",
            remedy="train on shorter rows",
        )


def _proposed(
    layout: SlotLayout, tokens: Int[Tensor, "b l"]
) -> tuple[Places, Int[Tensor, "slots"]]:
    """The places that any slot proposes, each once, and which of them is each slot's."""
    proposed = torch.zeros_like(tokens, dtype=torch.bool).scatter(1, layout.places, True)
    where = Places.of(proposed)
    number = torch.zeros_like(tokens).index_put(
        where.index, torch.arange(len(where), device=tokens.device)
    )
    return where, number.gather(1, layout.places).flatten()
