"""dllm's own trainers and samplers (github.com/ZHZisZZ/dllm), with the noise of a store.

class Noisy(NoiseMixin, dllm.core.trainers.MDLMTrainer): ...  # or BD3LMTrainer
class NoisySampler(NoiseSamplerMixin, dllm.core.samplers.MDLMSampler): ...  # or BD3LMSampler

dllm asks a model for logits of ``input_ids``; a hook on the model turns these into embeddings and
adds softmax(tau xi) W wherever they are masked. W is zero at first, so dllm's model is the start.
Nothing of dllm is imported here or altered. docs/dllm.md is the recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.utils.data import default_collate

from shards.codec.registry import make_codec
from shards.errors import UsageError
from shards.noise.embedding import Weighting
from shards.noise.kinds import Noise
from shards.noise.philox import PositionKeys
from shards.provenance import derive_seed
from shards.store.store import ShardStore
from trainer.distillation import NOISE_KEY
from trainer.objective.batch import Places, StoredRowNoise

DEFAULT_TAU = 0.85
"""Of ``trainer.sampling``, which needs a later transformers than dllm has."""


class NoiseInput(nn.Module):
    """W, and the noise that is shown now.

    Args:
        vocab_size: V of the store.
        width: D of the model's input embedding.
        mask_id: The token whose embedding the noise is added to.
        codec: Name and parameters of the store's codec, which may cut noise off.
    """

    def __init__(self, vocab_size: int, width: int, mask_id: int, codec: dict[str, Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(vocab_size, width))
        self.mask_id, self.codec = mask_id, make_codec(codec["name"], **codec["parameters"])
        self._shown: tuple[Callable[[Places], Noise], float] | None = None

    @contextmanager
    def showing(self, noise: Callable[[Places], Noise], tau: float = 1.0) -> Iterator[None]:
        """Calls of the model read this noise: of (row, position in the row), tau times."""
        self._shown = noise, tau
        try:
            yield
        finally:
            self._shown = None

    def before_forward(
        self, model: Any, args: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A forward pre-hook of the model: embeddings in place of ids."""
        ids = args[0] if args else options["input_ids"]
        places = Places.of(ids == self.mask_id)
        if self._shown is None:
            raise UsageError(
                "the model reads noise, and is shown none",
                where=type(model).__name__,
                remedy="train by NoiseMixin and sample by NoiseSamplerMixin",
            )
        noise, tau = self._shown
        positions = options.get("position_ids")  # of a block, behind a cache of what stands before
        named = places if positions is None else Places(places.rows, places.read(positions))
        values = noise(named).softmax_embed(self.weight, Weighting(tau))
        embeddings = model.get_input_embeddings()(ids)
        values = values.to(embeddings.dtype)
        options["inputs_embeds"] = embeddings.index_put(places.index, values, accumulate=True)
        return (None, *args[1:]) if args else (), options | ({} if args else {"input_ids": None})


def read_noise(model: Any, tokenizer: Any, store: str | Path | None = None) -> NoiseInput:
    """Make a model read noise at masked positions; it then can do nothing without.

    Args:
        model: Any of dllm's whose states predict their own token, and that takes inputs_embeds.
        tokenizer: Its tokenizer, which has a mask token.
        store: For a W of zeros. None reads W back from the folder that the model is from.

    Raises:
        UsageError: If the tokenizer has no mask, the model no embedding of it, or the folder no W.
    """
    mask_id, table = tokenizer.mask_token_id, model.get_input_embeddings()
    if mask_id is None or mask_id >= table.num_embeddings:
        raise UsageError(
            "no mask token",
            got=mask_id,
            expected=f"an id below {table.num_embeddings}, as the model has embeddings",
            remedy="tokenizer.add_special_tokens and model.resize_token_embeddings",
        )
    if store is not None:
        manifest = ShardStore.find(store).manifest
        model.config.gdistill = {"vocab_size": manifest.vocab_size, "codec": manifest.codec}
    about = getattr(model.config, "gdistill", None)
    if about is None:
        remedy = "name the store"
        raise UsageError("the model has no noise yet", where=model.name_or_path, remedy=remedy)
    own = NoiseInput(about["vocab_size"], table.embedding_dim, mask_id, about["codec"])
    if store is None:
        for file in Path(model.name_or_path).glob("*.safetensors"):
            with safe_open(file, "pt") as weights:
                if "gdistill.weight" in weights.keys():  # noqa: SIM118, it is no dictionary
                    own.load_state_dict({"weight": weights.get_tensor("gdistill.weight")})
    model.gdistill = own.to(table.weight.device)
    model.register_forward_pre_hook(own.before_forward, with_kwargs=True)
    return own


class NoiseMixin:
    """Put before ``MDLMTrainer`` or ``BD3LMTrainer``: the model sees the store's noise.

    Any other trainer that gives a model ``input_ids`` with masks will do. Rows are those of :func:`trainer.distillation.store_rows`. Noise is a function of (the rows'
    seed, epoch, row, position) alone; masks and times are dllm's.

    Args:
        store: Path or URL of the store.
        model: See :func:`read_noise`, which is called where nobody did.
        args, processing_class, options: As the trainer has them.

    Raises:
        UsageError: If the trainer's states predict the next token, or as :func:`read_noise` does.
    """

    def __init__(
        self, *, store: str | Path, model: Any, args: Any, processing_class: Any, **options: Any
    ) -> None:
        if getattr(args, "right_shift_logits", False):
            raise UsageError(
                "not for states that predict the next token", where="right_shift_logits"
            )
        if not hasattr(model, "gdistill"):
            read_noise(model, processing_class, store)
        args.remove_unused_columns = False  # no model has a column for the noise
        self.store, self.noise_input = ShardStore.find(store), model.gdistill
        options = {"data_collator": default_collate, **options}
        super().__init__(model=model, args=args, processing_class=processing_class, **options)
        names, resources = self.store.codec.resource_names, self.store.resources
        self.resources = {name: resources[name].to(args.device) for name in names}

    def compute_loss(self: Any, model: Any, inputs: dict[str, Any], *args: Any, **options: Any):
        """dllm's loss of a batch, the noise of its rows shown."""
        arrays = dict(inputs["teacher"])
        seeds, rows = arrays.pop(NOISE_KEY).unbind(1)
        own = inputs["input_ids"], arrays.pop("token_log_probs"), rows, int(seeds[0]), 0
        noise = StoredRowNoise(self.store.codec, arrays, *own, self.resources)
        with self.noise_input.showing(noise.at):
            inputs = {name: value for name, value in inputs.items() if name != "teacher"}
            return super().compute_loss(model, inputs, *args, **options)  # type: ignore


class NoiseSamplerMixin:
    """Put before ``MDLMSampler`` or ``BD3LMSampler``: samples follow from their noise.

    ``sample`` and ``infill`` take two arguments more. Noise is a function of (seed, index of the
    sample, position) alone.
    """

    def sample(
        self: Any, inputs: Any, *args: Any, seed: int = 0, tau: float = DEFAULT_TAU, **options: Any
    ):
        """dllm's ``sample`` with prior noise, ``tau`` times."""
        with self._prior(len(inputs), seed, tau):
            return super().sample(inputs, *args, **options)  # type: ignore

    def infill(
        self: Any, inputs: Any, *args: Any, seed: int = 0, tau: float = DEFAULT_TAU, **options: Any
    ):
        """dllm's ``infill`` with prior noise, ``tau`` times."""
        with self._prior(len(inputs), seed, tau):
            return super().infill(inputs, *args, **options)  # type: ignore

    def _prior(self: Any, num_samples: int, seed: int, tau: float) -> Any:
        own, stream = self.model.gdistill, derive_seed(seed, "sampling noise")

        def noise(places: Places) -> Noise:
            rows = places.rows % num_samples  # guidance runs every sample twice
            keys = PositionKeys(stream, rows, places.positions)
            return own.codec.prior(keys, len(own.weight))

        return own.showing(noise, tau)
