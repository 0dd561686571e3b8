"""The drafter: one layer that proposes a frozen language model's next tokens, one after another.

EAGLE's form (Li et al., arXiv 2401.15077), trained over several of its own steps as EAGLE-3 (arXiv
2503.01840). Let the backbone know the states h of the tokens before x_t, and nothing of x_t yet.
Step i = 0, 1, .. reads one row and proposes the token at t + 1 + i::

    r_0 = e(x_t) + A [m, h]_{t-1}      m behind the middle layer, h behind the last
    r_i = e(d_i) + B o_{i-1}           d_i the draft of the step before
    o_i = layer(r_i),   logits = head(g o_i)

e and head are the backbone's. The layer begins as a copy of the backbone's last one and attends to
*that one's* keys and values of the text, so a drafter keeps no cache of its own; A and B begin at
zero and g at one. The states are brought to one scale, near that of embeddings.

It reads no noise. The sampler looks at the noise to choose which drafts the backbone shall read
(:mod:`trainer.sampling.own_backbone`): that is worth more than a drafter that knows it
(benchmarks/results/drafting.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import CausalLMOutput

from shards.errors import UsageError, first_line
from shards.store.manifest import Manifest
from trainer.objective.batch import Batch
from trainer.objective.corruption import row_uniforms
from trainer.students.backbone import BackboneStudent, FrozenBackbone
from trainer.students.base import LossOutput
from trainer.students.configuration import StudentSettings
from trainer.students.decoder import layer_lists
from trainer.students.fused_head import CHUNK_ROWS
from trainer.students.hugging_face import StudentConfig
from trainer.students.medusa import ZeroLinear

Runner = Callable[[Tensor, Tensor, Tensor, DynamicCache], Tensor]
KL_WEIGHT = 0.5
"""Of KL(p || q) beside total variation: the first has gradients where q misses p altogether, the
second is what verification loses."""
STEP_DECAY = 0.85
"""Step i counts 0.85^i in the loss: a draft is of use only where those before it stay."""
LAST_READER = "commit 2090fb1"
TREE_TOLERANCES = {"float32": 1e-4, "bfloat16": 0.05}
"""How far tokens read as a tree may lie from the same rows, as a share of the states' spread."""


class DrafterConfig(StudentConfig):
    """Config of :class:`Drafter`."""

    model_type = "gdistill-drafter"

    def __post_init__(self, **kwargs: Any) -> None:
        if "linear_layers" in (self.frozen or {}):
            what = "a drafter of low-rank adapters on slots, which are no more"
            remedy = f"{LAST_READER} of gdistill reads it; or train a drafter anew"
            raise UsageError(what, where="config.json: frozen.linear_layers", remedy=remedy)
        super().__post_init__(**kwargs)


class Drafter(BackboneStudent):
    """A layer beside a frozen language model; K = ``num_proposed`` steps are trained."""

    config_class = DrafterConfig
    default_sampler = "drafter"
    reads = tuple(
        f"backbone.{name}" for name in ("location", "dtype", "num_proposed", "num_starts")
    )

    @classmethod
    def describe(cls, backbone: FrozenBackbone) -> dict[str, Any]:
        """See :class:`BackboneStudent`."""
        embeddings = backbone.network.get_input_embeddings().weight
        shapes = {n: list(w.shape) for n, w in _layers(backbone)[-1].named_parameters()}
        return {**backbone.record, "embedding_size": embeddings.shape[1], "layer": shapes}

    @classmethod
    def make(cls, settings: StudentSettings, manifest: Manifest) -> Drafter:
        """See :class:`BackboneStudent`; the layer is a copy of the backbone's last."""
        student = super().make(settings, manifest)
        assert isinstance(student, Drafter)
        with torch.no_grad():
            for name, weight in _layers(student.language_model)[-1].named_parameters():
                student.layer[_key(name)].copy_(weight)
        return student

    def _build(self, config: StudentConfig) -> None:
        frozen = config.frozen or {}
        width, entry = frozen["hidden_size"], frozen["embedding_size"]
        shapes = frozen["layer"]
        self.names = sorted(shapes)
        self.layer = nn.ParameterDict(
            {_key(name): nn.Parameter(torch.zeros(shapes[name])) for name in self.names}
        )
        self.from_states, self.from_row = ZeroLinear(2 * width, entry), ZeroLinear(width, entry)
        self.gain = nn.Parameter(torch.ones(width))

    def _make_conditioner(self) -> None:
        if (got := self.settings.conditioning) != "none":
            what = "a drafter reads no noise: its sampler does"
            raise UsageError(what, where="model.conditioning", got=got, expected="none")

    def attach(self, backbone: FrozenBackbone) -> None:
        """See :class:`BackboneStudent`.

        Raises:
            UsageError: Also for a backbone that reads no trees, or whose last layer does not run
                by itself.
        """
        super().attach(backbone)
        layers, self._is_llama = _layers(backbone), False
        self._middle = (layers[max(0, len(layers) // 2 - 1)],)  # bare, it would be a submodule
        embeddings = backbone.network.get_input_embeddings().weight
        self._scale = 5 * float(embeddings.float().square().mean().sqrt())
        self._require_trees(backbone)

    @property
    def sharded_blocks(self) -> tuple[nn.Module, ...]:
        """See :class:`Student`; none: the layer runs within the backbone's own code."""
        return ()

    @property
    def num_read_tokens(self) -> int:
        """The row, and K rows behind each starting point."""
        settings, length = self.settings.backbone, self.config.row_length
        return length + settings.num_proposed * min(settings.num_starts, length)

    @property
    def flops_per_row(self) -> float:
        """2 per frozen weight and token of the row, 6 per trained one and drafted row."""
        length = self.config.row_length
        frozen = 2.0 * (self.config.frozen or {})["num_parameters"] * length
        return frozen + 6.0 * self.num_parameters() * (self.num_read_tokens - length)

    def loss(self, batch: Batch, *, time_bounds: tuple[float, float] | None = None) -> LossOutput:
        """0.5 KL(p || q) + TV(p, q), the mean over K steps behind ``num_starts`` positions a row.

        p is the backbone's distribution, computed here: the store gives rows alone, and which of
        their tokens count. Steps read the
        row's own tokens in the place of their drafts. ``token_nlls`` holds at a place the sum of
        KL(p || q) over the drafts of it, nats.

        Args:
            batch: Rows.
            time_bounds: Without meaning here.

        Raises:
            UsageError: For rows of fewer than K + 2 tokens.
        """
        tokens, (num_rows, length) = batch.tokens, batch.tokens.shape
        num_steps = self.settings.backbone.num_proposed
        if length < num_steps + 2:
            what, where = "rows too short for the drafter's steps", "model.backbone.num_proposed"
            expected = f"at most {length - 2} for rows of {length} tokens"
            raise UsageError(what, where=where, got=num_steps, expected=expected)
        order = row_uniforms("starting points", batch, 0, length - 1 - num_steps).argsort(dim=1)
        starts = order[:, : self.settings.backbone.num_starts].sort(dim=1).values + 1
        per_token = torch.zeros(tokens.shape, device=tokens.device)
        if not num_rows:  # a process's share of a last batch; transformers take no such rows
            nothing = sum((weight.sum() * 0.0 for weight in self.parameters()), per_token.sum())
            return LossOutput(nothing, per_token, 0, 0, 1)
        states, cache = self.read(tokens)
        read = states.chunk(2, dim=-1)[1]
        seen = torch.arange(length, device=tokens.device) < starts[..., None]
        own = torch.eye(starts.shape[1], dtype=torch.bool, device=tokens.device)
        own = own.expand(num_rows, -1, -1)
        rows = self.first_rows(tokens.gather(1, starts), _at(states, starts - 1))
        total, run = torch.zeros((), device=tokens.device), self.runner()
        count = num_steps * starts.numel() if batch.counted is None else 0
        for step in range(num_steps):
            seen = torch.cat((seen, own), dim=-1)
            output = run(rows, starts + step, seen, cache)
            kl, lost = self._divergences(
                output.flatten(0, 1), _at(read, starts + step).flatten(0, 1)
            )
            places = starts + step + 1
            if batch.counted is not None:
                learnt = batch.counted.gather(1, places)
                kl, lost = (part * learnt.flatten() for part in (kl, lost))
                count += int(learnt.sum())
            total = total + STEP_DECAY**step * (KL_WEIGHT * kl + lost).mean() / num_steps
            per_token.scatter_add_(1, places, kl.detach().float().view_as(places))
            rows = self.next_rows(tokens.gather(1, places), output)
        return LossOutput(total, per_token, count, count, 1)

    def _divergences(
        self, drafted: Float[Tensor, "n d"], known: Float[Tensor, "n d"]
    ) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
        """KL(p || q) in nats and TV(p, q); logits are held for one chunk of rows at a time."""

        def measure(ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
            with torch.autocast(ours.device.type, enabled=False):
                log_q = self.logits(ours).log_softmax(dim=-1)
                log_p = self.language_model.logits(theirs).float().log_softmax(dim=-1)
                p = log_p.exp()
                kl = (p * (log_p - log_q)).sum(dim=-1)
                return kl, 1 - torch.minimum(p, log_q.exp()).sum(dim=-1)

        size = CHUNK_ROWS.get(drafted.device.type, CHUNK_ROWS["cuda"])
        pairs = list(zip(drafted.split(size), known.split(size), strict=True))
        if len(pairs) == 1:  # nothing to let go of: computing it again would spare no memory
            return measure(*pairs[0])
        parts = [checkpoint(measure, *pair, use_reentrant=False) for pair in pairs]
        kls, losses = zip(*parts, strict=True)  # type: ignore[arg-type]
        return torch.cat(kls), torch.cat(losses)

    @torch.no_grad()
    def read(self, tokens: Int[Tensor, "b l"]) -> tuple[Float[Tensor, "b l d2"], DynamicCache]:
        """[m, h] of every token, and the keys and values that the layer attends to."""
        # First the network: a student that transformers loads stands on its backbone from here on.
        cache, network = DynamicCache(), self.language_model.network
        with self.watch() as middle:
            last = network.base_model(
                input_ids=tokens, past_key_values=cache, use_cache=True
            ).last_hidden_state
        return torch.cat((middle[0], last), dim=-1), last_layer_cache(cache)

    def first_rows(
        self, tokens: Int[Tensor, "b n"], states: Float[Tensor, "b n d2"]
    ) -> Float[Tensor, "b n e"]:
        """r_0 of tokens whose states are not known, from the two states before each."""
        halves = states.unflatten(-1, (2, -1))
        return self._embed(tokens) + self.from_states(self._even(halves).flatten(-2))

    def next_rows(
        self, tokens: Int[Tensor, "b n"], outputs: Float[Tensor, "b n d"]
    ) -> Float[Tensor, "b n e"]:
        """r_i of drafted tokens, from o_{i-1} of the rows that they follow."""
        return self._embed(tokens) + self.from_row(self._even(outputs))

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.language_model.network.get_input_embeddings()(tokens).detach().float()

    def _even(self, states: Tensor) -> Tensor:
        return self._scale * rms_norm(states.float(), states.shape[-1:])

    def runner(self, dtype: torch.dtype | None = None) -> Runner:
        """What computes o of rows; gradients reach the layer's weights of now, and the rows.

        Of rows [B, n, E] of :meth:`first_rows` or :meth:`next_rows`, their positions [B, n], which
        of the cached keys and of these rows behind them each row attends to, [B, n, k], and a cache
        of :func:`last_layer_cache`, to which the keys and values of these rows are added. A layer
        of Llama's form computes in ``dtype``, by default the backbone's, as all others do.
        """
        network = self.language_model.network
        dtype = dtype if dtype and self._is_llama else network.dtype
        weights = {n: self.layer[_key(n)].to(dtype) for n in self.names}
        return (llama_runner if self._is_llama else network_runner)(network, weights)

    def head(self, dtype: torch.dtype | None = None) -> Callable[[Tensor], Tensor]:
        """:meth:`logits`, computed in ``dtype``."""
        if dtype is None:
            return self.logits
        output: Any = self.language_model.network.get_output_embeddings()
        size, bias = self.config.vocab_size, output.bias
        weight = (output.weight[:size] * self.gain).to(dtype)
        bias = None if bias is None else bias[:size].to(dtype)
        return lambda outputs: linear(outputs.to(dtype), weight, bias).float()

    def logits(self, outputs: Float[Tensor, "*n d"]) -> Float[Tensor, "*n v"]:
        """The backbone's output layer over V tokens behind the rows, float32."""
        return self.language_model.logits(outputs.float() * self.gain).float()

    @contextmanager
    def watch(self) -> Iterator[list[Tensor]]:
        """Within the context, the states behind the backbone's middle layer, call by call."""
        seen = list[Tensor]()

        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            seen.append(output[0] if isinstance(output, tuple) else output)

        handle = self._middle[0].register_forward_hook(keep)
        try:
            yield seen
        finally:
            handle.remove()

    def forward(
        self, input_ids: Int[Tensor, "b l"], attention_mask: Tensor | None = None, **options: Any
    ) -> CausalLMOutput:
        """Logits [B, K, V] behind whole prefixes, each step behind the most probable draft.

        Args:
            input_ids: The prefixes, of at least two tokens.
            attention_mask: As tokenizers give it; all of it must be 1.
            **options: Of Hugging Face's callers; what would be ignored is refused.

        Raises:
            UsageError: For padding or labels.
        """
        self._refuse_unread(attention_mask, options)
        (states, cache), length = self.read(input_ids[:, :-1]), input_ids.shape[1] - 1
        rows, logits = self.first_rows(input_ids[:, -1:], states[:, -1:]), list[Tensor]()
        run = self.runner()
        for step in range(self.settings.backbone.num_proposed):
            width = length + step + 1
            seen = torch.ones(len(rows), 1, width, dtype=torch.bool, device=rows.device)
            positions = torch.full((len(rows), 1), length + step, device=rows.device)
            output = run(rows, positions, seen, cache)
            logits.append(self.logits(output))
            rows = self.next_rows(logits[-1].argmax(dim=-1), output)
        return CausalLMOutput(logits=torch.cat(logits, dim=1))

    @torch.no_grad()
    def _require_trees(self, backbone: FrozenBackbone) -> None:
        """Refuse a network that cannot read two continuations of a row side by side.

        Exactness rests on it: tokens read as a tree must say what they say in rows of their own.
        """
        network, size = backbone.network, backbone.vocab_size
        row = torch.arange(6, device=network.device) % size
        other = (row[4:] + 3) % size
        got = "a forward pass that fails"
        try:
            wanted = [
                backbone.hidden(torch.cat((row[:4], end))[None])[0, 4:] for end in (row[4:], other)
            ]
            cache = DynamicCache()
            network.base_model(input_ids=row[None, :4], past_key_values=cache, use_cache=True)
            behind = torch.eye(4, dtype=torch.bool, device=network.device)
            behind[1, 0] = behind[3, 2] = True
            seen = torch.cat((behind.new_ones(4, 4), behind), dim=-1)[None]
            positions = torch.tensor([[4, 5, 4, 5]], device=network.device)
            own, again = last_layer_cache(cache), last_layer_cache(cache)
            found = network.base_model(
                input_ids=torch.cat((row[4:], other))[None],
                position_ids=positions,
                attention_mask=attention_mask(network, seen),
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state[0]
            share = _share(found, torch.cat(wanted))
            most = TREE_TOLERANCES[self.settings.backbone.dtype]
            got = f"states of a tree that differ from its rows' by {share:.2g} of their spread"
            weights = dict(_layers(backbone)[-1].named_parameters())
            step = self._embed(other[None]), positions[:, :2], seen[:, :2, :6]
            theirs = network_runner(network, weights)(*step, own)
            with suppress(AttributeError, KeyError):  # then it has other parts than Llama's
                ours = llama_runner(network, weights)(*step, again)
                self._is_llama = _share(ours, theirs) <= most
            if share <= most:
                return
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
            got = f"{type(error).__name__}: {first_line(error)}"
        what, where = "no drafter can stand on this backbone", f"backbone, {backbone.files.name}"
        expected = "a transformer with a key/value cache that takes a four-dimensional mask"
        raise UsageError(what, where=where, got=got, expected=expected)


def network_runner(network: Any, weights: Mapping[str, Tensor]) -> Runner:
    """By the network's own code, with these weights for its last layer and no other layers."""
    base, where = network.base_model, _place(network)
    own = {f"{where}.0.{name}": weight for name, weight in weights.items()}
    parent, _, name = where.rpartition(".")
    holder = base.get_submodule(parent)

    def run(rows: Tensor, positions: Tensor, seen: Tensor, cache: DynamicCache) -> Tensor:
        call = {"inputs_embeds": rows.to(network.dtype), "position_ids": positions}
        call |= {"attention_mask": attention_mask(network, seen)}
        call |= {"past_key_values": cache, "use_cache": True}
        whole = getattr(holder, name)
        setattr(holder, name, whole[-1:])
        try:
            return functional_call(base, own, (), call, tie_weights=False).last_hidden_state
        finally:
            setattr(holder, name, whole)

    return run


def llama_runner(network: Any, weights: Mapping[str, Tensor]) -> Runner:
    """The same for a layer of Llama's form: of a small step most time is the network's own code.

    Raises:
        KeyError, AttributeError: If it has other parts.
    """
    base = network.base_model
    before, between = (weights[f"{n}_layernorm.weight"] for n in ("input", "post_attention"))
    final, epsilon = base.norm.weight.to(before.dtype), base.norm.variance_epsilon
    rates = base.rotary_emb.inv_freq.repeat(2)

    def joined(*names: str) -> tuple[Tensor, Tensor | None]:
        weight = torch.cat([weights[f"{name}.weight"] for name in names])
        biases = [weights[f"{name}.bias"] for name in names if f"{name}.bias" in weights]
        return weight, torch.cat(biases) if biases else None

    entry, out = joined(*(f"self_attn.{n}_proj" for n in "qkv")), joined("self_attn.o_proj")
    gates, down = joined("mlp.gate_proj", "mlp.up_proj"), joined("mlp.down_proj")

    def run(rows: Tensor, positions: Tensor, seen: Tensor, cache: DynamicCache) -> Tensor:
        known: Any = cache.layers[-1]
        rows, width = rows.to(final.dtype), rows.shape[-1:]
        count, size = known.keys.shape[1], known.keys.shape[-1]
        mixed = linear(rms_norm(rows, width, before, epsilon), *entry)
        mixed = mixed.unflatten(-1, (-1, size)).transpose(1, 2)
        angles = positions[:, None, :, None] * rates
        turned, values = mixed[:, :-count], mixed[:, -count:]
        first, second = turned.chunk(2, dim=-1)
        turned = turned * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()
        turned, values = turned.to(known.keys.dtype), values.to(known.keys.dtype)
        keys, values = known.update(turned[:, -count:], values)
        queries = turned[:, :-count]
        grouped = queries.shape[1] != count
        mixed = scaled_dot_product_attention(
            queries, keys, values, seen[:, None], enable_gqa=grouped
        )
        rows = rows + linear(mixed.transpose(1, 2).flatten(2).to(final.dtype), *out)
        gate, up = linear(rms_norm(rows, width, between, epsilon), *gates).chunk(2, dim=-1)
        return rms_norm(rows + linear(silu(gate) * up, *down), width, final, epsilon)

    return run


def _share(found: Tensor, wanted: Tensor) -> float:
    """Root mean square of a difference, as a share of the spread."""
    return float((found - wanted).float().square().mean().sqrt() / wanted.float().std())


def attention_mask(network: Any, seen: Bool[Tensor, "b q k"]) -> Tensor:
    """Who attends to whom, as the network's attention kernel wants it: [B, 1, q, k]."""
    if network.config._attn_implementation == "sdpa":
        return seen[:, None]
    lowest = torch.finfo(network.dtype).min
    return torch.where(seen, 0.0, lowest).to(network.dtype)[:, None]  # added to the scores


def last_layer_cache(cache: DynamicCache) -> DynamicCache:
    """The last layer's keys and values, for a drafter's layer; ``cache`` stays as it is."""
    known: Any = cache.layers[-1]
    layer, alone = DynamicLayer(), DynamicCache()
    layer.lazy_initialization(known.keys, known.values)
    layer.keys, layer.values = known.keys, known.values
    alone.layers[:] = [layer] * len(cache.layers)  # the layer looks under its own number
    return alone


def _at(states: Float[Tensor, "b l d"], columns: Int[Tensor, "b n"]) -> Float[Tensor, "b n d"]:
    return states.gather(1, columns[..., None].expand(-1, -1, states.shape[-1]))


def _key(name: str) -> str:
    return name.replace(".", "/")  # a dot would be a submodule's


def _layers(backbone: FrozenBackbone) -> nn.ModuleList:
    return backbone.network.base_model.get_submodule(_place(backbone.network))


def _place(network: Any) -> str:
    """Name of the list of layers within the base model.

    Raises:
        UsageError: Where there is none, or several.
    """
    lists = layer_lists(network)
    names = {id(module): name for name, module in network.base_model.named_modules()}
    if len(lists) != 1:
        got, what = f"{len(lists)} lists of layers", "no drafter can stand on this backbone"
        raise UsageError(what, where=type(network).__name__, got=got, expected="one")
    return names[id(getattr(*lists[0]))]
