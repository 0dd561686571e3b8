"""Random bits by key: Philox and vLLM's stream against published numbers, and fast kernels."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from shards.errors import GdistillError, UsageError
from shards.noise import murmur3, philox
from shards.noise.gumbel import DenseProbabilities, KeyedPosterior, KeyedPrior
from shards.noise.philox import exponential_from_bits

# Random123, kat_vectors: counter, key, expected.
ZERO, ONES = "00000000 " * 3 + "00000000", "ffffffff " * 3 + "ffffffff"
PI = "243f6a88 85a308d3 13198a2e 03707344"
KNOWN = [
    (ZERO, "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (ONES, "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (PI, "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
VECTORS = json.loads(Path(__file__).with_name("murmur3_vectors.json").read_text())


def hexadecimal(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def words_of(counter: list[int], seed: int) -> list[int]:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    return [int(word) for word in philox.philox4x32((c0, c1, c2, c3), seed)]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter: str, key: str, expected: str) -> None:
    low, high = hexadecimal(key)
    assert words_of(hexadecimal(counter), low | high << 32) == hexadecimal(expected)


def keys(seed: int = 5, draw: int = 0) -> philox.PositionKeys:
    rows = torch.tensor([0, 1, 1, 7, (1 << 32) + 1, (1 << 44) - 1])
    return philox.PositionKeys(seed, rows, torch.tensor([1, 1, 2, 1023, 1, (1 << 20) - 1]), draw)


def test_keyed_bits_follow_the_documented_counter() -> None:
    row, position, vocab_id = (1 << 44) - 1, (1 << 20) - 1, 9
    counter = [vocab_id // 4, position | (row >> 32) << 20, row & 0xFFFFFFFF, 3]
    bits = philox.keyed_bits(keys(draw=3), 0, 10)
    assert int(bits[5, vocab_id]) == words_of(counter, 5)[vocab_id % 4]


def test_every_part_of_the_key_matters() -> None:
    whole = philox.keyed_bits(keys(), 0, 400)
    assert len(set(whole.flatten().tolist())) > 0.999 * whole.numel()
    for other in (keys(seed=6), keys(seed=5 + (1 << 40)), keys(draw=1)):
        assert not (philox.keyed_bits(other, 0, 400) == whole).any()
    assert torch.equal(philox.keyed_bits(keys(draw=-1).redrawn(1), 0, 400), whole)
    streams = torch.cat([philox.stream_bits(keys(), stream, 200) for stream in range(3)], dim=1)
    assert not np.isin(streams.numpy(), whole.numpy()).any()


def test_a_race_hears_tokens_of_small_probability() -> None:
    """float32 has no value within 6e-8 of 1, and log 0 is none."""
    uniform = philox.uniforms(make_keys(100), 0, 4000)
    assert uniform.dtype == torch.float64 and bool(((uniform > 0) & (uniform < 1)).all())
    probs = torch.tensor([[5e-9, 1.0]], dtype=torch.float64)
    assert philox.race(probs, torch.tensor([[1 - 1e-9, 0.5]], dtype=torch.float64)).tolist() == [0]


def make_keys(num: int, seed: int = 99, draw: int = 0) -> philox.PositionKeys:
    index = torch.arange(num)
    return philox.PositionKeys(seed, index // 16, index % 16 + 1, draw)


def assert_as_defined(keys: philox.PositionKeys, start: int, stop: int) -> None:
    expected = exponential_from_bits(philox.keyed_bits(keys, start, stop))
    assert torch.equal(philox.keyed_exponentials(keys, start, stop), expected)


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (3, 90), (5, 5), (50251, 50257)])
@pytest.mark.parametrize("num", [0, 1, 300])
def test_fast_exponentials_equal_the_plain_formula(num: int, start: int, stop: int) -> None:
    assert_as_defined(make_keys(num, seed=(1 << 63) - 5, draw=7), start, stop)


@pytest.mark.parametrize("elements", [1, 130, 1 << 20])
def test_blocks_of_rows_do_not_show(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    monkeypatch.setattr(philox, "BLOCK_ELEMENTS", elements)
    assert_as_defined(make_keys(50), 0, 200)


@pytest.fixture(scope="module")
def compiled_noise() -> Iterator[None]:
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("no C++ compiler")
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("the compiler of PyTorch writes no code for its plainest kernels")
    philox.use_noise_kernel("compiled")
    yield
    philox.use_noise_kernel("eager")


@pytest.mark.parametrize(("num", "start", "stop"), [(300, 3, 90), (2, 0, 50257), (64, 6, 2055)])
def test_the_compiled_kernel_gives_the_same_bits(compiled_noise: None, num: int, start: int, stop: int) -> None:
    assert philox.noise_kernel() == "compiled"
    assert_as_defined(make_keys(num, draw=3), start, stop)


@pytest.fixture
def compile_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., object]], None]:
    """Gives torch another compiler, in a process that has compiled nothing yet."""
    kernels: dict[str, Callable[..., Tensor]] = {}
    monkeypatch.setattr(philox, "compiled_kernels", kernels)
    return partial(monkeypatch.setattr, torch, "compile")


def test_kernels_are_chosen_by_name_and_a_failure_changes_nothing(compile_by: Callable) -> None:
    def broken(*arguments: object, **options: object) -> object:
        raise RuntimeError("no compiler")

    with pytest.raises(UsageError, match="noise kernel"):
        philox.use_noise_kernel("fast")
    compile_by(lambda *_, **options: broken)
    with pytest.raises(GdistillError, match="no compiler"):
        philox.use_noise_kernel("compiled")
    assert philox.noise_kernel() == "eager"


def test_auto_compiles_on_cuda_alone_and_tells_why_not(compile_by: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[torch.device] = []

    def fails(device: torch.device) -> None:
        calls.append(device)
        raise GdistillError("cannot compile the noise kernel", got="no Triton")

    monkeypatch.setattr(philox, "_compile", fails)
    assert philox.use_noise_kernel("auto", "cpu") == "" and not calls
    assert "no Triton" in philox.use_noise_kernel("auto", "cuda")
    assert calls == [torch.device("cuda")]
    assert philox.noise_kernel() == "eager"


def test_a_form_that_is_compiled_wrongly_gives_way_to_the_next(compile_by: Callable) -> None:
    """As PyTorch 2.13 does under AVX2: numbers of the first form are wrong, of the second right."""
    tried: list[str] = []

    def compiled(work: Callable[..., Tensor], **_: object) -> Callable[..., Tensor]:
        tried.append(work.__name__)
        wrong = work.__name__ == "_by_lane"
        return lambda *words: -work(*words) if wrong else work(*words)

    compile_by(compiled)
    philox.use_noise_kernel("compiled")
    assert_as_defined(make_keys(5, seed=1), 0, 40)
    assert tried == ["_by_lane", "_all_lanes"]


@pytest.mark.parametrize(("ulps", "most", "fits"), [(0, 0, True), (1, 0, False), (2, 2, True), (3, 2, False)])
def test_a_compiled_kernel_may_differ_as_far_as_its_device_allows(
    compile_by: Callable, monkeypatch: pytest.MonkeyPatch, ulps: int, most: int, fits: bool
) -> None:
    """Not at all on a CPU, whose results are reproduced bit for bit."""

    def compiled(work: Callable[..., Tensor], **_: object) -> Callable[..., Tensor]:
        def run(*words: Tensor) -> Tensor:
            found = work(*words)
            found.view(torch.int32)[3, 5, 1] += ulps
            return found

        return run

    assert philox.LARGEST_ULPS == {"cpu": 0, "cuda": 2}
    compile_by(compiled)
    monkeypatch.setitem(philox.LARGEST_ULPS, "cpu", most)
    obstacle = ""
    try:
        philox.use_noise_kernel("compiled", "cpu")
    except GdistillError as error:
        obstacle = str(error)
    assert philox.noise_kernel("cpu") == ("compiled" if fits else "eager")
    assert philox.noise_kernel("cuda") == "eager", "another device keeps its own kernel"
    assert fits or f"{ulps} units" in obstacle


def test_one_graph_serves_every_size_and_gradient_mode(compile_by: Callable) -> None:
    from torch._dynamo.utils import counters

    compile_by(partial(torch.compile, backend="eager"))
    before = counters["stats"]["unique_graphs"]
    philox.use_noise_kernel("compiled")
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        for num in (2, 40):
            with mode():
                found = philox.keyed_exponentials(make_keys(num), 5, 9000)
                expected = exponential_from_bits(philox.keyed_bits(make_keys(num), 5, 9000))
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert counters["stats"]["unique_graphs"] == before + 1


def at_vectors(draw: Callable[..., Tensor], *more: int) -> Tensor:
    """[9, 16] draws of the engine's stream at the vectors' seeds, positions and ids."""
    seeds, positions = torch.tensor(VECTORS["seeds"]), torch.tensor(VECTORS["positions"])
    return torch.cat([draw(seeds, positions, j, j + 1, *more) for j in VECTORS["token_ids"]], dim=1)


def numbers(name: str) -> Tensor:
    rows = [[float.fromhex(value) for value in row] for row in VECTORS[name]]
    return torch.tensor(rows, dtype=torch.float64)


def test_bits_uniforms_and_variates_are_the_engines_own() -> None:
    first = at_vectors(murmur3.engine_bits)
    second = at_vectors(murmur3.engine_bits, murmur3.SECOND_WORD)
    assert (first.long() & murmur3.MASK).tolist() == VECTORS["bits"]
    assert (second.long() & murmur3.MASK).tolist() == VECTORS["bits_of_second_word"]
    assert torch.equal(murmur3.uniforms(first).double(), numbers("uniforms32"))
    assert torch.equal(murmur3.uniforms64(first, second), numbers("uniforms64"))
    found = at_vectors(murmur3.engine_gumbels).double()  # to the rounding of a logarithm
    torch.testing.assert_close(found, numbers("gumbels32"), rtol=3e-7, atol=3e-7)


def test_the_largest_bits_leave_the_variates_finite() -> None:
    extreme = torch.tensor([0, -1], dtype=torch.int32)
    assert murmur3.uniforms(extreme).tolist() == [2.0**-33, 1.0]
    assert bool(((u := murmur3.uniforms64(extreme, extreme)) > 0).all()) and bool((u < 1).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_of_keys_is_what_the_engine_draws_the_token_with(dtype: torch.dtype) -> None:
    """Other draws, and the first arrivals, are of streams that no token's noise is of."""
    seeds, places = torch.tensor([5, 5, 8]), torch.tensor([1, 2, 1])
    keys = murmur3.EngineKeys(seeds, places, dtype=dtype)
    noise, drawn = KeyedPrior(keys, 60), murmur3.engine_gumbels(seeds, places - 1, 0, 60, dtype)
    torch.testing.assert_close(noise.gumbels(), drawn.float())
    assert torch.equal(noise.tile(17, 40), noise.tile(0, 60)[:, 17:40])
    assert torch.equal(noise.select(torch.tensor([2])).gumbels(), noise.gumbels()[2:])
    assert torch.equal(noise.redrawn(1).redrawn(1).gumbels(), noise.redrawn(2).gumbels())
    draws = [noise.redrawn(draw) for draw in range(3)]
    streams = [part for draw in draws for part in (draw.tile(0, 60), draw.keys.first_arrivals())]
    assert len(torch.cat([part.flatten() for part in streams]).unique()) == 3 * 3 * 61


def test_a_store_decoded_under_the_engines_noise_gives_back_its_tokens() -> None:
    torch.manual_seed(0)
    log_p = torch.randn(200, 30).log_softmax(dim=-1)
    tokens = torch.distributions.Categorical(logits=log_p).sample()
    keys = murmur3.EngineKeys(torch.arange(200), torch.arange(200) % 7 + 1)
    own = log_p.gather(1, tokens[:, None])[:, 0]
    gumbels = KeyedPosterior(keys, tokens, own, DenseProbabilities(log_p)).gumbels()
    assert torch.equal((log_p + gumbels).argmax(dim=-1), tokens)
    assert bool(gumbels.isfinite().all())
    assert stats.kstest(gumbels.double().flatten().numpy(), "gumbel_r").pvalue > 1e-3
