"""The map of where noise pays: which plain student is read against, and what is written."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.quality import gain_map, stories
from benchmarks.quality.ahead import Fills
from benchmarks.quality.gain_map import (
    Curves,
    Filled,
    best_gain,
    map_gains,
    named_runs,
    recorded_ratios,
    shape_of,
    table,
    together,
)
from shards.errors import UsageError
from tests.trainer.run_cases import tiny_run, write_store
from trainer.training.loop import train

ROWS, WIDTH = 400, 2


def fill(rate: float, slope: float, shift: float = 0.0, equal: float = 0.5) -> Fills:
    """Fills on the line NLL = slope H + shift; ``equal`` of them as the teacher's."""
    repeated = (torch.arange(ROWS) < rate * ROWS)[:, None].expand(-1, WIDTH)
    nll = torch.full((ROWS, WIDTH), slope * -math.log(rate) + shift)
    return Fills(nll, (torch.arange(ROWS) < equal * ROWS)[:, None].expand(-1, WIDTH), repeated)


def curves(slope: float, rates: tuple[float, ...] = (0.3, 0.5, 0.95)) -> Curves:
    return {p: fill(rate, slope) for p, rate in zip((1.0, 0.9, 0.5), rates, strict=True)}


def test_the_plain_student_to_beat_is_the_best_at_that_entropy() -> None:
    """Two that reach its entropy, and one that would be better and does not."""
    near, far = curves(3.0), curves(2.0)
    name, gain = best_gain({"near": near, "far": far}, {0.0: fill(0.7, 2.0, -0.5)}, 2)
    assert name == "far" and gain is not None
    assert gain.value == pytest.approx(-0.5, abs=0.02)
    unread = curves(0.1, (0.9, 0.92, 0.95))
    assert best_gain({"unread": unread, "far": far}, {0.0: fill(0.7, 2.0)}, 2)[0] == "far"
    assert best_gain({"unread": unread}, {0.0: fill(0.7, 2.0)}, 2) == (None, None)


def filled(curves: Curves, shape: str = "a", is_conditioned: bool = False) -> Filled:
    return Filled(shape, is_conditioned, curves)


def test_agreement_is_that_of_the_last_token_and_of_the_best_without_noise() -> None:
    noisy = fill(0.7, 2.0)
    equal = torch.stack((torch.ones(ROWS), torch.arange(ROWS) % 4 == 0), dim=1).bool()
    students = {
        "first": filled({1.0: fill(0.3, 2.0, equal=0.2)}),
        "second": filled({1.0: fill(0.3, 2.0, equal=0.3)}),
        "other shape": filled({1.0: fill(0.3, 2.0, equal=0.9)}, "b"),
        "noisy": filled({0.0: Fills(noisy.nll, equal, noisy.repeated)}, is_conditioned=True),
    }
    cells = map_gains(students)
    assert [(cell.num_ahead, cell.agreement) for cell in cells] == [(1, 1.0), (2, 0.25)]
    assert [cell.plain_agreement for cell in cells] == [pytest.approx(0.3)] * 2
    assert "entropy not reached without noise; 25 against 30" in table(cells)


def test_students_are_compared_within_a_shape_over_the_seeds_that_both_have() -> None:
    """The second seed of the plain student is worse by 1 nat: it counts where noise has two."""
    seeds = [curves(2.0), {p: fill(0.7, 2.0, 1.0) for p in (1.0, 0.9, 0.5)}]
    noisy = {0.0: fill(0.7, 2.0)}
    students = {
        "plain": filled(together(seeds)),
        "better, of another shape": filled(curves(0.1), "b"),
        "one seed": filled(noisy, is_conditioned=True),
        "two seeds": filled(together([noisy, noisy]), is_conditioned=True),
    }
    found = {cell.student: cell for cell in map_gains(students) if cell.num_ahead == 2}
    assert {cell.plain for cell in found.values()} == {"plain"}
    alone, both = (found[name].gain for name in ("one seed", "two seeds"))
    assert alone is not None and both is not None
    assert alone.value == pytest.approx(0.0, abs=0.02) and both.value < -0.3


def test_a_conditioned_student_without_its_like_is_refused() -> None:
    noisy = filled(together([{0.0: fill(0.7, 2.0)}] * 2), is_conditioned=True)
    for plain in (filled(curves(2.0), "b"), filled(curves(2.0))):
        with pytest.raises(UsageError, match="nothing to compare with"):
            map_gains({"plain": plain, "noisy": noisy})


def test_blocks_are_part_of_a_shape() -> None:
    class MDLM:
        config = SimpleNamespace(num_layers=4, hidden_size=64, tokens_per_block=8, row_length=8)

    assert shape_of(MDLM()) == "MDLM 4 x 64"
    MDLM.config.tokens_per_block = 2
    assert shape_of(MDLM()) == "MDLM 4 x 64, blocks of 2"


def samples(*points: tuple[float, float]) -> dict[str, object]:
    """Ways of sampling at (entropy, NLL in nats per token), four alike each."""
    return {
        "2": {
            f"way {number}": {
                "nll_sums": {"teacher": [9 * nll] * 4},
                "num_tokens": 9,
                "entropies": [entropy] * 4,
            }
            for number, (entropy, nll) in enumerate(points)
        }
    }


def write_results(file: Path, plain: dict[str, object], noisy: list[dict[str, object]]) -> Path:
    """Of a plain recipe, and of a conditioned one in its own order and in a further one."""
    recipes = [{"name": "plain"}, {"name": f"noisy {file.name}", "conditioning": "gumbel"}]
    own, further = noisy
    figures = {
        "plain": [{"samples": plain, "orders": {}}],
        f"noisy {file.name}": [{"samples": own, "orders": {"surest": further}}],
    }
    plan = {"task": "stories", "extract": [], "seeds": [1], "recipes": recipes}
    found = {"plan": plan, "reference": {"entropy_nats": 2.0}, "recipes": figures}
    file.write_text(json.dumps(found))
    return file


def test_a_recipe_counts_in_the_order_that_is_best_for_it(tmp_path: Path) -> None:
    """In one file the noise halves the perplexity in one order and keeps it in the other."""
    plain, better = samples((2.0, 3.0)), samples((2.0, 3.0 - math.log(2)))
    files = [
        write_results(tmp_path / "a", plain, [plain, better]),
        write_results(tmp_path / "b", plain, [plain, plain]),
    ]
    ratios = recorded_ratios(files)
    assert [(ratio.name, ratio.against) for ratio in ratios] == [
        ("noisy a; surest", "plain"),
        ("noisy b", "plain"),
    ]
    assert [ratio.value for ratio in ratios] == [pytest.approx(0.5), pytest.approx(1.0)]


def test_what_does_not_reach_the_entropy_is_compared_at_its_own(tmp_path: Path) -> None:
    """At 1.5 nats of entropy the plain curve has 2.5 nats a token, the noise 2.5 - log 4."""
    plain = samples((1.0, 2.0), (2.0, 3.0))
    noisy = samples((1.0, 2.0 - math.log(4)), (1.5, 2.5 - math.log(4)))
    (found,) = recorded_ratios([write_results(tmp_path / "a", plain, [noisy, noisy])])
    assert found.value == pytest.approx(0.25) and found.against == "plain; at entropy 1.50"


@pytest.mark.parametrize("words", [["a"], ["=x"], ["a="], ["a=x", "a=y"]])
def test_students_without_a_name_of_their_own_are_refused(words: list[str]) -> None:
    with pytest.raises(UsageError, match="name of its own"):
        named_runs(words)


def test_seeds_of_a_student_stand_with_commas_between() -> None:
    assert named_runs(["a=x,y"]) == {"a": [Path("x"), Path("y")]}


def test_the_map_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two trained students of a store: every distance that its rows have, agreement in [0, 1]."""
    monkeypatch.setattr(stories, "STARTS", (2, 3))
    for module in (stories, gain_map):
        monkeypatch.setattr(module, "DISTANCES", (1, 2, 4))
    store = write_store(tmp_path / "store")
    for conditioning in ("none", "gumbel"):
        config = tiny_run(model__conditioning=conditioning, training__num_steps=1)
        assert train(config, store, tmp_path / conditioning)
    config = LlamaConfig(
        vocab_size=12, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "teacher")
    runs = [f"plain={tmp_path / 'none'}", f"noisy={tmp_path / 'gumbel'}"]
    with pytest.raises(UsageError, match="plain and conditioned"):
        gain_map.gain_map(runs[:1], store, str(tmp_path / "teacher"), [], tmp_path / "out")
    gain_map.gain_map(runs, store, str(tmp_path / "teacher"), [], tmp_path / "out")
    cells = json.loads((tmp_path / "out/gain-map.json").read_text())["cells"]
    assert [(cell["student"], cell["num_ahead"]) for cell in cells] == [
        ("noisy", 1),
        ("noisy", 2),
        ("noisy", 4),
    ]
    assert all(0 <= cell["agreement"] <= 1 for cell in cells)
    assert "| noisy |" in (tmp_path / "out/gain-map.md").read_text()
    assert (tmp_path / "out/gain-map.png").stat().st_size > 10_000


def test_fills_of_a_model_are_kept_beside_it_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def found(*_: object) -> Curves:
        calls.append(1)
        return {p: fill(0.5, 2.0) for p in stories.NUCLEUS_PS}

    monkeypatch.setattr(gain_map, "fills_ahead", found)
    store = write_store(tmp_path / "store")
    assert train(tiny_run(training__num_steps=1), store, tmp_path / "run")
    rows, runs = torch.zeros(2, 8, dtype=torch.long), [tmp_path / "run"]
    first, second = (gain_map.fill(runs, None, rows) for _ in range(2))
    assert len(calls) == 1 and torch.equal(first.curves[0.0].nll, second.curves[0.0].nll)
    os.utime(tmp_path / "run/model/model.safetensors", (2e9, 2e9))
    gain_map.fill(runs, None, rows)
    assert len(calls) == 2
