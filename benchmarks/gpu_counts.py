"""What the GPU's hot paths launch and move, counted on a CPU: kernels and bytes, no times.

    python -m benchmarks.gpu_counts [--out benchmarks/results/gpu_counts.json]

Two columns: everything eager, and the noise kernel compiled. A compiled function counts as one
kernel that reads its arguments and writes its results. Matrix products and views are left out; a
gather moves what it picks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from benchmarks.synthetic import unigram
from shards.atomic import write_json_atomic
from shards.codec.seeded import ShiftedNoise
from shards.console import run_command
from shards.noise import embedding
from shards.noise import philox as keyed_exponentials
from shards.noise.embedding import Weighting
from shards.noise.kinds import Entries, HeadAndTail, KeyedPosterior, KeyedPrior, Noise
from shards.noise.philox import PositionKeys
from trainer.sampling.noise import TokenRule

VIEWS = {
    "view", "t", "transpose", "permute", "unsqueeze", "expand", "slice", "select", "split",
    "unbind", "detach", "_unsafe_view", "alias", "reshape", "unflatten", "squeeze",
    "split_with_sizes",
}  # fmt: skip
PRODUCTS = {"mm", "addmm", "addmm_", "bmm"}
PICKS = {"index", "gather", "index_put_", "_index_put_impl_", "scatter_", "scatter"}
VOCAB, WIDTH = 50257, 2
WAYS = ("eager", "noise kernel compiled")


class Counter(TorchDispatchMode):
    """Kernels, and bytes read and written."""

    def __init__(self) -> None:
        super().__init__()
        self.num_kernels, self.num_bytes = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        if name in VIEWS or name in PRODUCTS or "empty" in name:
            return result
        given = list(args[1:]) if name in PICKS else list(args)
        inputs = [*tree_leaves(given), *(v for k, v in kwargs.items() if k != "out")]
        results = [] if name.endswith("_") and name in PICKS else tree_leaves(result)
        self.add([*inputs, *results])
        return result

    def add(self, tensors: list[Any]) -> None:
        """One kernel over these tensors; what is expanded is read once."""
        self.num_kernels += 1
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                whole = tensor.numel() * tensor.element_size()
                self.num_bytes += min(whole, tensor.untyped_storage().nbytes())


def as_one_kernel(work: Callable[..., Any], **_: object) -> Callable[..., Any]:
    """In place of ``torch.compile``: computed as it stands, counted as one kernel."""

    def run(*arguments: Any) -> Any:
        counters = [m for m in _modes() if isinstance(m, Counter)]
        with _disable_current_modes():
            result = work(*arguments)
        for counter in counters:
            counter.add([*arguments, *tree_leaves(result)])
        return result

    return run


def _modes() -> list[Any]:
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return list(_get_current_dispatch_mode_stack())


@contextmanager
def way(name: str) -> Iterator[None]:
    """Run as ``name`` says, with a GPU's tiles and in its one block, whatever the device."""
    with (
        mock.patch.object(torch, "compile", as_one_kernel),
        mock.patch.object(keyed_exponentials, "_compiled", {}),
        mock.patch.object(keyed_exponentials, "BLOCK_ELEMENTS", 1 << 40),
        mock.patch.dict(embedding.TILES, cpu=embedding.TILES["cuda"]),
    ):
        keyed_exponentials.use_noise_kernel("eager" if name == "eager" else "compiled")
        yield


def noises(num_positions: int, vocab_size: int = VOCAB) -> dict[str, Noise]:
    """Noise as a student is shown it: to sample with, of the posterior, of a frozen draw."""
    generator = torch.Generator().manual_seed(0)
    keys = PositionKeys(5, torch.arange(num_positions), torch.arange(num_positions) % 7)
    many = 64
    ids = torch.rand(num_positions, vocab_size, generator=generator).topk(many).indices
    probs = torch.rand(num_positions, many, generator=generator).softmax(1) * 0.9
    head = Entries(ids, probs, torch.ones_like(ids, dtype=torch.bool))
    q = unigram(vocab_size).exp()
    scale = 0.1 / (1 - q[ids].sum(1))
    tokens = ids[:, 0].contiguous()
    own = probs[:, 0].log()
    moved = Entries(ids, 1 + probs, head.used)
    return {
        "prior": KeyedPrior(keys, vocab_size),
        "posterior": KeyedPosterior(keys, tokens, own, HeadAndTail(head, scale, q)),
        "seeded": ShiftedNoise(keys, tokens, own, moved, vocab_size),
    }


def conditioner(noise: Noise, dtype: torch.dtype, name: str, tau: float = 1.0) -> dict[str, float]:
    """Kernels a tile, and bytes a variate and pass, of one forward and one backward pass."""
    weight = torch.zeros(noise.vocab_size, WIDTH, requires_grad=True)
    with way(name), torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        walk = embedding.Walk(noise, Weighting())
        num_tiles = len(walk.vocabulary_tiles()) * len(walk.position_chunks())
        noise.softmax_embed(weight, Weighting(tau)).sum().backward()  # trials, tables, first tiles
        with Counter() as counter:
            noise.softmax_embed(weight, Weighting(tau)).sum().backward()
    variates = 2 * noise.num_positions * noise.vocab_size
    return {
        "kernels_per_tile_and_pass": counter.num_kernels / num_tiles / 2,
        "bytes_per_variate_and_pass": counter.num_bytes / variates,
    }


def draws(num_positions: int, nucleus_p: float, name: str) -> dict[str, float]:
    """Kernels a call, and bytes a token of the vocabulary, of categorical draws."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(num_positions, VOCAB + 1, generator=generator)
    keys = PositionKeys(5, torch.arange(num_positions), torch.arange(num_positions))
    rule = TokenRule(nucleus_p=nucleus_p)
    with way(name):
        rule.choose(logits, keys)
        with Counter() as counter:
            rule.choose(logits, keys)
    return {
        "kernels": counter.num_kernels,
        "bytes_per_position_and_token": counter.num_bytes / logits.numel(),
    }


def count_everything(num_positions: int = 256) -> dict[str, Any]:
    """Case -> way -> counts."""
    found: dict[str, Any] = {}
    for kind, noise in noises(num_positions).items():
        for dtype in (torch.bfloat16, torch.float32):
            label = f"conditioner, {kind}, {str(dtype).removeprefix('torch.')}"
            found[label] = {name: conditioner(noise, dtype, name) for name in WAYS}
    for nucleus_p in (1.0, 0.9):
        label = "categorical draws" + (f", nucleus {nucleus_p}" if nucleus_p < 1 else "")
        found[label] = {name: draws(num_positions // 4, nucleus_p, name) for name in WAYS}
    return found


def main(
    out: Annotated[Path, typer.Option(help="Where the JSON goes.")] = Path(
        "benchmarks/results/gpu_counts.json"
    ),
) -> None:
    """Count, print a line a case, write the JSON."""
    found = count_everything()
    for case, ways in found.items():
        for name, counts in ways.items():
            print(f"{case:<36}{name:<24}" + ", ".join(f"{k} {v:.1f}" for k, v in counts.items()))
    write_json_atomic(out, {"vocab_size": VOCAB, "torch": torch.__version__, "counts": found})


if __name__ == "__main__":
    run_command(lambda: typer.run(main))
