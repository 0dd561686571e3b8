"""The drafter: a small language model that proposes a frozen one's next tokens.

Its layers begin as copies of the backbone's first and last; embedding and output layer are the
backbone's and stay as they are::

    h = layers(e(x_1) .. e(x_t)),   q = softmax(head(g h_t))      g begins at one

It learns q = p, the backbone's own distribution, at every position of the rows, and drafts as a
language model does, token by token, with keys and values of its own. Drafters that read the
backbone's states, or propose several tokens at once, kept fewer tokens at equal training compute
(benchmarks/results/drafting.md).

It reads no noise. The sampler looks at the noise to choose which drafts the backbone shall read
(:mod:`trainer.sampling.own_backbone`): that is worth more than a drafter that knows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutput

from shards.errors import UsageError, first_line
from shards.store.manifest import Manifest
from trainer.objective.batch import Batch
from trainer.students.backbone import BackboneStudent, FrozenBackbone
from trainer.students.base import LossOutput, StudentConfig
from trainer.students.configuration import StudentSettings
from trainer.students.decoder import layer_lists
from trainer.students.fused_head import CHUNK_ROWS

Runner = Callable[[Tensor, Tensor, Tensor, DynamicCache], Tensor]
KL_WEIGHT = 0.5
"""Of KL(p || q) beside total variation: the first has gradients where q misses p altogether, the
second is what verification loses."""
LAST_READERS = {"linear_layers": "2090fb1", "layer": "ccf86f2"}
"""What the config of a form that is no more holds, and the commit that reads it."""
TREE_TOLERANCES = {"float32": 1e-4, "bfloat16": 0.05}
"""How far tokens read as a tree may lie from the same rows, as a share of the states' spread."""


class DrafterConfig(StudentConfig):
    """Config of :class:`Drafter`."""

    model_type = "gdistill-drafter"

    def __post_init__(self, **kwargs: Any) -> None:
        for name in LAST_READERS.keys() & (self.frozen or {}).keys():
            what = "a drafter of a form that is no more"
            remedy = f"commit {LAST_READERS[name]} of gdistill reads it; or train a drafter anew"
            raise UsageError(what, where=f"config.json: frozen.{name}", remedy=remedy)
        super().__post_init__(**kwargs)


class Drafter(BackboneStudent):
    """Two layers beside a frozen language model; it drafts K = ``num_proposed`` tokens ahead."""

    config_class = DrafterConfig
    default_sampler = "drafter"
    takes_noise = False  # its sampler does
    reads = tuple(f"backbone.{name}" for name in ("location", "dtype", "num_proposed"))

    @classmethod
    def describe(cls, backbone: FrozenBackbone) -> dict[str, Any]:
        """See :class:`BackboneStudent`."""
        shapes = [
            {name: list(weight.shape) for name, weight in layer.named_parameters()}
            for layer in _chosen(backbone.network)
        ]
        return {**backbone.record, "layers": shapes}

    @classmethod
    def make(cls, settings: StudentSettings, manifest: Manifest) -> Drafter:
        """See :class:`BackboneStudent`; the layers are copies."""
        student = super().make(settings, manifest)
        assert isinstance(student, Drafter)
        chosen = _chosen(student.language_model.network)
        with torch.no_grad():
            for own, layer in zip(student.layers, chosen, strict=True):
                for name, weight in layer.named_parameters():
                    own.get_parameter(_key(name)).copy_(weight)
        return student

    def _build(self, config: StudentConfig) -> None:
        frozen = config.frozen or {}
        self.names = [sorted(shapes) for shapes in frozen["layers"]]
        self.layers = nn.ModuleList(
            nn.ParameterDict({_key(n): nn.Parameter(torch.zeros(shape)) for n, shape in own.items()})
            for own in frozen["layers"]
        )
        self.gain = nn.Parameter(torch.ones(frozen["hidden_size"]))

    def attach(self, backbone: FrozenBackbone) -> None:
        """See :class:`BackboneStudent`.

        Raises:
            UsageError: Also for a backbone that reads no trees, or whose layers do not run by
                themselves.
        """
        super().attach(backbone)
        self._is_llama = False
        self._require_trees(backbone)

    def loss(self, batch: Batch, *, time_bounds: tuple[float, float] | None = None) -> LossOutput:
        """0.5 KL(p || q) + TV(p, q), the mean over all positions.

        p is the backbone's distribution, computed here: the store gives rows alone, and which of
        their tokens count. ``token_nlls`` holds KL(p || q) of the distribution that a token was
        drawn from, nats.

        Args:
            batch: Rows.
            time_bounds: Without meaning here.
        """
        tokens, places = batch.tokens, batch.tokens[:, 1:]
        per_token = torch.zeros(tokens.shape, device=tokens.device)
        if not len(tokens):  # a process's share of a last batch; transformers take no such rows
            nothing = sum((weight.sum() * 0.0 for weight in self.parameters()), per_token.sum())
            return LossOutput(nothing, per_token, 0, 0, 1)
        known = self.language_model.hidden(tokens)[:, :-1].flatten(0, 1)
        kl, lost = self._divergences(self.read(tokens[:, :-1]).flatten(0, 1), known)
        count = places.numel()
        if batch.counted is not None:
            learnt = batch.counted[:, 1:].flatten()
            kl, lost, count = kl * learnt, lost * learnt, int(learnt.sum())
        per_token[:, 1:] = kl.detach().float().view_as(places)
        return LossOutput((KL_WEIGHT * kl + lost).mean(), per_token, count, count, 1)

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

    def read(self, tokens: Int[Tensor, "b l"]) -> Float[Tensor, "b l d"]:
        """Behind every token of whole rows, what the output layer sees (but for the gain)."""
        num_rows, length = tokens.shape
        positions = torch.arange(length, device=tokens.device).expand(num_rows, -1)
        seen = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        seen = seen.expand(num_rows, -1, -1)
        return self.runner()(self.embed(tokens), positions, seen, DynamicCache())

    def embed(self, tokens: Int[Tensor, "*n"]) -> Float[Tensor, "*n e"]:
        """The backbone's token embeddings."""
        return self.language_model.network.get_input_embeddings()(tokens).detach().float()

    def runner(self) -> Runner:
        """What computes the layers; gradients reach their weights of now, and the rows.

        Of embeddings [B, n, E], their positions [B, n], which of the cached keys and of these rows
        behind them each row attends to, [B, n, k], and a cache of as many layers, to which the keys
        and values of these rows are added. It computes in the backbone's precision.
        """
        network = self.language_model.network
        weights = [
            {name: own.get_parameter(_key(name)).to(network.dtype) for name in names}
            for own, names in zip(self.layers, self.names, strict=True)
        ]
        return (llama_runner if self._is_llama else network_runner)(network, weights)

    def logits(self, outputs: Float[Tensor, "*n d"]) -> Float[Tensor, "*n v"]:
        """The backbone's output layer over V tokens behind the rows, float32."""
        return self.language_model.logits(outputs.float() * self.gain).float()

    def forward(
        self, input_ids: Int[Tensor, "b l"], attention_mask: Tensor | None = None, **options: Any
    ) -> CausalLMOutput:
        """Logits [B, L, V]; those at position i are about token i + 1.

        Args:
            input_ids: The rows.
            attention_mask: As tokenizers give it; all of it must be 1.
            **options: Of Hugging Face's callers; what would be ignored is refused.

        Raises:
            UsageError: For padding or labels.
        """
        self._refuse_unread(attention_mask, options)
        return CausalLMOutput(logits=self.logits(self.read(input_ids)))

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
            wanted = [backbone.hidden(torch.cat((row[:4], end))[None])[0, 4:] for end in (row[4:], other)]
            cache = DynamicCache()
            network.base_model(input_ids=row[None, :4], past_key_values=cache, use_cache=True)
            behind = torch.eye(4, dtype=torch.bool, device=network.device)
            behind[1, 0] = behind[3, 2] = True
            seen = torch.cat((behind.new_ones(4, 4), behind), dim=-1)[None]
            tree, positions = torch.cat((row[4:], other))[None], torch.tensor([[4, 5, 4, 5]])
            positions = positions.to(network.device)
            found = network.base_model(
                input_ids=tree,
                position_ids=positions,
                attention_mask=attention_mask(network, seen),
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state[0]
            share = _share(found, torch.cat(wanted))
            most = TREE_TOLERANCES[self.settings.backbone.dtype]
            got = f"states of a tree that differ from its rows' by {share:.2g} of their spread"
            weights = [dict(layer.named_parameters()) for layer in _chosen(backbone.network)]
            parts = (row[None, :4], positions[:, :1] - 4 + torch.arange(4, device=network.device))
            start = (self.embed(parts[0]), parts[1], behind.new_ones(1, 4, 4).tril())
            theirs, ours = DynamicCache(), DynamicCache()
            step, run = (self.embed(tree), positions, seen), network_runner(network, weights)
            said = run(*start, theirs), run(*step, theirs)
            with suppress(AttributeError, KeyError):  # then it has other parts than Llama's
                run = llama_runner(network, weights)
                shares = [_share(run(*each, ours), other) for each, other in zip((start, step), said, strict=True)]
                self._is_llama = max(shares) <= most
            if share <= most:
                return
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
            got = f"{type(error).__name__}: {first_line(error)}"
        what, where = "no drafter can stand on this backbone", f"backbone, {backbone.files.name}"
        expected = "a transformer with a key/value cache that takes a four-dimensional mask"
        raise UsageError(what, where=where, got=got, expected=expected)


def network_runner(network: Any, weights: Sequence[Mapping[str, Tensor]]) -> Runner:
    """By the network's own code, with these weights for its layers and no other layers."""
    base, where = network.base_model, _place(network)
    own = {f"{where}.{i}.{n}": w for i, part in enumerate(weights) for n, w in part.items()}
    parent, _, name = where.rpartition(".")
    holder = base.get_submodule(parent)
    layers = nn.ModuleList(map(_of_its_own, _chosen(network), range(len(weights))))

    def run(rows: Tensor, positions: Tensor, seen: Tensor, cache: DynamicCache) -> Tensor:
        call = {"inputs_embeds": rows.to(network.dtype), "position_ids": positions}
        call |= {"attention_mask": attention_mask(network, seen)}
        call |= {"past_key_values": cache, "use_cache": True}
        whole = getattr(holder, name)
        setattr(holder, name, layers)
        try:
            return functional_call(base, own, (), call, tie_weights=False).last_hidden_state
        finally:
            setattr(holder, name, whole)

    return run


def _of_its_own(layer: nn.Module, number: int) -> nn.Module:
    """The layer under another number, by which it finds its keys; its weights are shared."""
    copied = deepcopy(layer, {id(weight): weight for weight in layer.parameters()})
    for module in list[Any](copied.modules()):
        if hasattr(module, "layer_idx"):
            module.layer_idx = number
    return copied


def llama_runner(network: Any, weights: Sequence[Mapping[str, Tensor]]) -> Runner:
    """The same for layers of Llama's form: of a small step most time is the network's own code.

    Raises:
        KeyError, AttributeError: If they have other parts.
    """
    base = network.base_model
    final = base.norm.weight.to(weights[0]["input_layernorm.weight"].dtype)
    epsilon, rates = base.norm.variance_epsilon, base.rotary_emb.inv_freq.repeat(2)

    def joined(own: Mapping[str, Tensor], *names: str) -> tuple[Tensor, Tensor | None]:
        # Column by column: products with the few rows of a step are the faster for it on a CPU.
        weight = torch.cat([own[f"{name}.weight"].t() for name in names], dim=1).t()
        biases = [own[f"{name}.bias"] for name in names if f"{name}.bias" in own]
        return weight, torch.cat(biases) if biases else None

    layers = [
        (
            own["input_layernorm.weight"],
            joined(own, *(f"self_attn.{n}_proj" for n in "qkv")),
            joined(own, "self_attn.o_proj"),
            own["post_attention_layernorm.weight"],
            joined(own, "mlp.gate_proj", "mlp.up_proj"),
            joined(own, "mlp.down_proj"),
        )
        for own in weights
    ]
    sizes = base.config.hidden_size // base.config.num_attention_heads
    size = getattr(base.config, "head_dim", None) or sizes
    count = base.config.num_key_value_heads

    def run(rows: Tensor, positions: Tensor, seen: Tensor, cache: DynamicCache) -> Tensor:
        rows, width = rows.to(final.dtype), rows.shape[-1:]
        angles = positions[:, None, :, None] * rates
        cos, sin = angles.cos(), angles.sin()
        for number, (before, entry, out, between, gates, down) in enumerate(layers):
            mixed = linear(rms_norm(rows, width, before, epsilon), *entry)
            mixed = mixed.unflatten(-1, (-1, size)).transpose(1, 2)
            turned, values = mixed[:, :-count], mixed[:, -count:]
            first, second = turned.chunk(2, dim=-1)
            turned = (turned * cos + torch.cat((-second, first), dim=-1) * sin).to(values.dtype)
            keys, values = cache.update(turned[:, -count:], values, number)
            queries = turned[:, :-count]
            grouped = queries.shape[1] != count
            mixed = scaled_dot_product_attention(queries, keys, values, seen[:, None], enable_gqa=grouped)
            rows = rows + linear(mixed.transpose(1, 2).flatten(2), *out)
            gate, up = linear(rms_norm(rows, width, between, epsilon), *gates).chunk(2, dim=-1)
            rows = rows + linear(silu(gate) * up, *down)
        return rms_norm(rows, width, final, epsilon)

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


def _key(name: str) -> str:
    return name.replace(".", "/")  # a dot would be a submodule's


def _chosen(network: Any) -> list[nn.Module]:
    """The layers that a drafter's begin as: the first and the last, or the only one."""
    layers = network.base_model.get_submodule(_place(network))
    return [layers[0], layers[-1]] if len(layers) > 1 else [layers[0]]


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
