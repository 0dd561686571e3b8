"""One kernel for the softmax weights of a tile: the eager path's numbers, or the eager path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import gpu_counts
from shards.noise import embedding, tile_weights
from shards.noise import philox as keyed_exponentials
from shards.noise.embedding import Weighting
from shards.noise.kinds import KeyedPosterior, Noise
from shards.noise.probabilities import DenseProbabilities
from shards.testing import DenseNoise

NUM, VOCAB, WIDTH = 37, 1301, 6
CPU = torch.device("cpu")
KINDS = ("prior", "posterior", "seeded", "dense posterior", "dense noise")


def noise_of(kind: str) -> Noise:
    made = gpu_counts.noises(NUM, VOCAB)
    if kind == "dense posterior":
        near = made["posterior"]
        assert isinstance(near, KeyedPosterior)
        log_probs = torch.randn(NUM, VOCAB, generator=torch.Generator().manual_seed(3))
        log_probs = log_probs.log_softmax(-1)
        own = log_probs.gather(1, near.tokens[:, None])[:, 0]
        return KeyedPosterior(near.keys, near.tokens, own, DenseProbabilities(log_probs))
    if kind == "dense noise":
        arrivals = made["prior"].tile(0, VOCAB).clone()
        arrivals[3, 7:900] = torch.inf
        arrivals[4, 5] = 2.0**-126
        return DenseNoise(arrivals)
    return made[kind]


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels in use on the CPU, several uneven tiles, nothing tried yet; compiled as told."""
    monkeypatch.setitem(embedding.TILES, "cpu", (16, 512))
    monkeypatch.setattr(tile_weights.KERNELS, "forms", {})
    monkeypatch.setattr(tile_weights, "FUSED_ON", ("cpu",))
    monkeypatch.setattr(keyed_exponentials, "_compiled", {"cpu": uncompiled_noise})
    yield


def uncompiled_noise(*words: Tensor) -> Tensor:
    return keyed_exponentials._by_lane(*words)


def as_it_stands(work: Callable[..., Any], **_: object) -> Callable[..., Any]:
    return work


def both(noise: Noise, weighting: Weighting, dtype: torch.dtype) -> dict[str, tuple[Tensor, ...]]:
    """Output and gradient of W, fused and eager; and of |W|, which bounds rounding."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(VOCAB, WIDTH, generator=generator)
    upstream = torch.randn(NUM, WIDTH, generator=generator)

    def run(weight: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
        leaf = weight.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            out = noise.softmax_embed(leaf, weighting)
        out.backward(upstream)
        assert leaf.grad is not None
        return out.detach(), leaf.grad

    fused = run(weight, upstream)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tile_weights, "FUSED_ON", ())
        eager, size = run(weight, upstream), run(weight.abs(), upstream.abs())
    return {"fused": fused, "eager": eager, "size": size}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tau", [1.0, 0.85, 1.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_prior", [False, True])
def test_numbers_are_those_of_the_eager_path(
    forms: None,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    tau: float,
    dtype: torch.dtype,
    has_prior: bool,
) -> None:
    """Weights within 16 units, sums of V within V more; one bfloat16 unit where they are cast."""
    monkeypatch.setattr(torch, "compile", as_it_stands)
    prior = torch.rand(VOCAB, generator=torch.Generator().manual_seed(9)) if has_prior else None
    found = both(noise_of(kind), Weighting(tau, prior=prior), dtype)
    assert tile_weights.conditioner_kernel("cpu") == "fused"
    bound = (2 * VOCAB + 64) * 2.0**-24 + (2.0**-6 if dtype == torch.bfloat16 else 0)
    for fused, eager, size in zip(*found.values(), strict=True):
        assert bool(((fused - eager).abs() <= bound * size).all())
        assert fused.isfinite().all()


def test_transforms_and_single_positions_stay_eager(
    forms: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", as_it_stands)
    weight = torch.randn(VOCAB, WIDTH)
    noise_of("prior").softmax_embed(weight, Weighting(transform="gaussian"))
    noise_of("prior").select(slice(0, 1)).softmax_embed(weight)
    assert not tile_weights.KERNELS.forms and tile_weights.conditioner_kernel("cpu") == "eager"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda w, s: (w * (1 + 2.0**-18), s), "units of the last place"),
        (lambda w, s: (w, s * 1.001), "its sums"),
        (lambda w, s: (w.roll(1, 0), s), "units of the last place"),
    ],
)
def test_wrong_numbers_are_not_used_and_said_once(
    forms: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fault: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    said: str,
) -> None:
    def compiled(work: Callable[..., Any], **_: object) -> Callable[..., Any]:
        return lambda *given: fault(*work(*given))

    monkeypatch.setattr(torch, "compile", compiled)
    weight, noise = torch.randn(VOCAB, WIDTH), noise_of("posterior")
    found = [noise.softmax_embed(weight, Weighting(tau)) for tau in (1.0, 1.0, 0.85)]
    text = " ".join(capsys.readouterr().err.split())
    assert text.count("conditioner: eager on cpu;") == 1 and said in text
    assert tile_weights.conditioner_kernel("cpu") == "eager"
    monkeypatch.setattr(tile_weights, "FUSED_ON", ())
    assert torch.equal(found[1], noise.softmax_embed(weight))


def test_no_compiler_is_no_obstacle(
    forms: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no Triton here")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: broken)
    assert noise_of("seeded").softmax_embed(torch.randn(VOCAB, WIDTH)).isfinite().all()
    assert "no Triton here" in " ".join(capsys.readouterr().err.split())


def test_cpus_and_eager_noise_keep_the_eager_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is reproduced bit for bit is not summed in another order."""
    assert tile_weights.FUSED_ON == ("cuda",)
    monkeypatch.setattr(tile_weights, "FUSED_ON", ("cpu",))
    monkeypatch.setattr(keyed_exponentials, "_compiled", {})
    assert tile_weights.fused_kernel(CPU, torch.float32, 1.0) is None


def test_the_compiler_makes_one_kernel_and_one_graph(
    compiled_noise: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over tiles of any shape, kinds of noise and gradient modes; its numbers are tried as well.

    Or its code is refused, as PyTorch 2.13's under AVX2 is: said once, and the numbers stay.
    """
    from torch._dynamo.utils import counters
    from torch._inductor import metrics

    monkeypatch.setitem(embedding.TILES, "cpu", (16, 512))
    monkeypatch.setattr(tile_weights.KERNELS, "forms", {})
    monkeypatch.setattr(tile_weights, "FUSED_ON", ("cpu",))
    before, kernels = counters["stats"]["unique_graphs"], metrics.generated_kernel_count
    is_refused = tile_weights.fused_kernel(CPU, torch.bfloat16, 1.0) is None
    assert not is_refused or torch.backends.cpu.get_cpu_capability() != "AVX512"
    assert metrics.generated_kernel_count - kernels == 1
    weight = torch.randn(VOCAB, WIDTH)
    for kind in ("prior", "posterior", "seeded", "dense posterior"):
        noise = noise_of(kind)
        for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with mode(), torch.autocast("cpu", torch.bfloat16):
                noise.softmax_embed(weight)
    assert counters["stats"]["unique_graphs"] - before == 1
    found = both(noise_of("posterior"), Weighting(), torch.float32)
    for fused, eager, size in zip(*found.values(), strict=True):
        bound = 0 if is_refused else (2 * VOCAB + 64) * 2.0**-24
        assert bool(((fused - eager).abs() <= bound * size).all())
    said = capsys.readouterr().err
    assert said.count("conditioner: eager on cpu;") == int(is_refused)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["prior", "posterior", "seeded"])
def test_few_bytes_and_kernels(kind: str, dtype: torch.dtype) -> None:
    """At most 15 bytes a variate and pass; fewer kernels, for all that small tiles cost besides."""
    noise = gpu_counts.noises(256, 4 * 2048 + 537)[kind]
    counts = gpu_counts.conditioner(noise, dtype, "as on a GPU")
    assert counts["bytes_per_variate_and_pass"] <= 15
    before = gpu_counts.conditioner(noise, dtype, "noise kernel compiled")
    assert counts["kernels_per_tile_and_pass"] < before["kernels_per_tile_and_pass"]
    assert before["bytes_per_variate_and_pass"] > 1.5 * counts["bytes_per_variate_and_pass"]


def test_tiles_are_sized_by_the_cache() -> None:
    """Positions x 2,048 ids x 4 bytes within three quarters of an H100's, A100's, B200's, T4's."""
    caches = {50 << 20: 4096, 40 << 20: 2048, 126 << 20: 8192, 4 << 20: 1024}
    for cache_bytes, positions in caches.items():
        assert embedding._positions_for(cache_bytes, 8192, 2048) == positions
    assert embedding.tile_shape(torch.device("cuda")) == (8192, 2048), "of a GPU that is not here"
    assert embedding.tile_shape(CPU) == embedding.TILES["cpu"]
