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
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import default_collate

from shards.codec.protocol import make_codec
from shards.errors import UsageError
from shards.noise.embedding import Noise, Weighting
from shards.noise.philox import PositionKeys
from shards.settings import derive_seed
from shards.store.store import ShardStore
from trainer.distillation import NOISE_KEY
from trainer.objective.batch import Places, StoredRowNoise

TAU = 0.85
"""Of ``trainer.sampling``, which needs a later transformers than dllm has."""


class NoiseInput(nn.Module):
    """W [V, D], and the noise that is shown now.

    Args:
        about: V and the codec of the store, which may cut noise off.
        table: The model's input embedding.
        mask_id: The token whose embedding the noise is added to.
    """

    def __init__(self, about: dict[str, Any], table: nn.Embedding, mask_id: int) -> None:
        super().__init__()
        width, device = table.embedding_dim, table.weight.device
        self.weight = nn.Parameter(torch.zeros(about["vocab_size"], width, device=device))
        self.codec = make_codec(about["codec"]["name"], **about["codec"]["parameters"])
        self.mask_id = mask_id
        self._shown: tuple[Callable[[Places], Noise], float] | None = None

    @contextmanager
    def showing(self, noise: Callable[[Places], Noise], tau: float = 1.0) -> Iterator[None]:
        """Calls of the model read this noise: of (row, position in the row), tau times."""
        self._shown = noise, tau
        try:
            yield
        finally:
            self._shown = None

    def before_forward(self, model: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """A forward pre-hook of the model: embeddings in place of ids."""
        if self._shown is None:
            remedy = "train by NoiseMixin and sample by NoiseSamplerMixin"
            raise UsageError("the model reads noise, and is shown none", remedy=remedy)
        ids, options = args[0] if args else options.pop("input_ids"), dict(options)
        (noise, tau), places = self._shown, Places.of(ids == self.mask_id)
        # dllm names positions where a block stands behind a cache, or beside its clean text.
        positions = options.get("position_ids", torch.arange(ids.shape[1], device=ids.device))
        named = Places(places.rows, places.read(positions.expand_as(ids)))
        values = noise(named).softmax_embed(self.weight, Weighting(tau))
        table = model.get_input_embeddings()(ids)
        values = table.index_put(places.index, values.to(table.dtype), accumulate=True)
        return (None, *args[1:]) if args else (), {**options, "inputs_embeds": values}


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
        expected = f"an id below {table.num_embeddings}, as the model has embeddings"
        remedy = "tokenizer.add_special_tokens and model.resize_token_embeddings"
        raise UsageError("no mask token", got=mask_id, expected=expected, remedy=remedy)
    if store is not None:
        manifest = ShardStore.find(store).manifest
        model.config.gdistill = {"vocab_size": manifest.vocab_size, "codec": manifest.codec}
    elif not hasattr(model.config, "gdistill"):
        remedy = "name the store"
        raise UsageError("the model has no noise yet", where=model.name_or_path, remedy=remedy)
    model.gdistill = NoiseInput(model.config.gdistill, table, mask_id)
    missing, files = {"gdistill.weight"}, Path(model.name_or_path).glob("*.safetensors")
    for file in files if store is None else ():
        found = model.load_state_dict(load_file(file), strict=False)  # what transformers left out is W
        missing.intersection_update(found.missing_keys)
    if store is None and missing:
        remedy = "give from_pretrained the folder itself"
        raise UsageError("no W lies there", where=model.name_or_path, remedy=remedy)
    model.register_forward_pre_hook(model.gdistill.before_forward, with_kwargs=True)
    return model.gdistill


class NoiseMixin:
    """Put before ``MDLMTrainer`` or ``BD3LMTrainer``: the model sees the store's noise.

    Rows are those of :func:`trainer.distillation.store_rows`. Noise is a function of (the rows'
    seed, epoch, row, position) alone; masks and times are dllm's.

    Args:
        store: Path or URL of the store.
        model: See :func:`read_noise`, which is called where nobody did.
        args, more: As the trainer has them.

    Raises:
        UsageError: If the trainer's states predict the next token, or as :func:`read_noise` does.
    """

    def __init__(self, *, store: str | Path, model: Any, args: Any, **more: Any) -> None:
        if getattr(args, "right_shift_logits", False):
            raise UsageError("noise is for states of their own token", where="right_shift_logits")
        if not hasattr(model, "gdistill"):
            has_learnt = hasattr(model.config, "gdistill")  # it was saved with a W, and goes on from that
            read_noise(model, more["processing_class"], None if has_learnt else store)
        args.remove_unused_columns = False  # no model has a column for the noise
        super().__init__(**{"model": model, "args": args, "data_collator": default_collate, **more})
        self.codec, self.noise_input = (opened := ShardStore.find(store)).codec, model.gdistill
        self.resources = {n: opened.resources[n].to(args.device) for n in self.codec.resource_names}

    def compute_loss(self: Any, model: Any, inputs: dict[str, Any], *args: Any, **options: Any):
        """dllm's loss of a batch, the noise of its rows shown."""
        arrays = dict(inputs.pop("teacher"))
        seeds, rows = arrays.pop(NOISE_KEY).unbind(1)
        own = inputs["input_ids"], arrays.pop("token_log_probs"), rows, int(seeds[0]), 0
        noise = StoredRowNoise(self.codec, arrays, *own, self.resources)
        with self.noise_input.showing(noise.at):
            return super().compute_loss(model, inputs, *args, **options)  # type: ignore


class NoiseSamplerMixin:
    """Put before ``MDLMSampler`` or ``BD3LMSampler``: samples follow from their noise.

    Noise is a function of (seed, index of the sample, position) alone.
    """

    def sample(self: Any, inputs: Any, *args: Any, seed: int = 0, tau: float = TAU, **options: Any):
        """dllm's ``sample`` with prior noise, ``tau`` times."""
        own, stream = self.model.gdistill, derive_seed(seed, "sampling noise")

        def noise(places: Places) -> Noise:
            rows = places.rows % len(inputs)  # guidance runs every sample twice
            return own.codec.prior(PositionKeys(stream, rows, places.positions), len(own.weight))

        with own.showing(noise, tau):
            return super().sample(inputs, *args, **options)  # type: ignore
