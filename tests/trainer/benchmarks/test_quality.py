"""The quality bench: its plan, its fills of prefixes and its reading at equal entropy."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import benchmarks.quality.__main__ as bench
from benchmarks.quality import stories
from benchmarks.quality.ablation import draw_ablations, maze_bars, stories_bars
from benchmarks.quality.ahead import (
    Fills,
    Prefixes,
    continuation_nll,
    one_pass,
    teacher_continuations,
    truncated,
)
from benchmarks.quality.gain import gain_of_first, read_curve
from benchmarks.quality.maze import MazeBench
from benchmarks.quality.plan import Plan, Recipe, Run, StoreWords, read_plan, recall, remember
from evaluation.maze import Maze, MazeTask, teacher_decode
from shards.atomic import write_json_atomic
from shards.cli import app as shards_app
from shards.codec.registry import codec_parameters, make_codec
from shards.errors import UsageError
from shards.settings import to_mapping
from shards.store.store import ShardStore
from tests.trainer.run_cases import tiny_run, write_store
from trainer.cli import app as trainer_app
from trainer.sampling.noise import sampling_noise
from trainer.students.registry import BD3LM, MDLM, StudentSettings
from trainer.training.loop import train

VOCAB, LENGTH = 9, 12


def make_teacher(vocab_size: int = VOCAB) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.5,
        max_position_embeddings=LENGTH,
    )
    return LlamaForCausalLM(config).eval()


def make_student(kind: type[MDLM], **changes: Any) -> MDLM:
    settings = StudentSettings(
        hidden_size=16, num_layers=2, num_heads=2, condition_size=8, dropout=0.0, **changes
    )
    build: Any = kind.config_class.build  # type: ignore[attr-defined]
    torch.manual_seed(0)
    student = kind(build(settings, vocab_size=VOCAB, row_length=LENGTH)).eval()
    for parameter in student.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return student


def make_rows(count: int = 5) -> Any:
    return torch.randint(VOCAB, (count, LENGTH), generator=torch.Generator().manual_seed(1))


def test_teacher_continues_as_it_decodes_whole_rows() -> None:
    teacher, rows = make_teacher(), make_rows()
    noise = sampling_noise(3, torch.arange(5), LENGTH, VOCAB)
    whole = teacher_decode(teacher, rows[:, 0], noise, LENGTH)
    prefixes = Prefixes(whole, start=4, width=6)
    written = teacher_continuations(teacher, prefixes, prefixes.gumbels(3, VOCAB))
    assert torch.equal(written, whole[:, 4:10])
    nll = continuation_nll(teacher, prefixes, written)
    log_probs = teacher(input_ids=whole).logits.log_softmax(-1)[:, :-1]
    expected = -log_probs.gather(-1, whole[:, 1:, None])[..., 0][:, 3:9]
    assert torch.allclose(nll, expected, atol=1e-5)


@pytest.mark.parametrize(("kind", "changes"), [(MDLM, {}), (BD3LM, {"block_size": 4})])
def test_one_pass_sees_the_prefix_alone(kind: type[MDLM], changes: dict[str, Any]) -> None:
    student = make_student(kind, conditioning="gumbel", **changes)
    rows = make_rows()
    prefixes = Prefixes(rows, start=4, width=4)
    found = one_pass(student, prefixes, seed=5)
    assert found.shape == (5, 4, VOCAB)
    other = rows.clone()
    other[:, 4:] = (other[:, 4:] + 1) % VOCAB
    assert torch.equal(one_pass(student, Prefixes(other, 4, 4), seed=5), found)
    other[:, 3] = (other[:, 3] + 1) % VOCAB
    assert not torch.allclose(one_pass(student, Prefixes(other, 4, 4), seed=5), found)
    assert not torch.allclose(one_pass(student, prefixes, seed=6), found)


def test_truncation_by_hand() -> None:
    log_probs = torch.tensor([0.5, 0.3, 0.2]).log()
    assert truncated(log_probs, 0.0).isfinite().tolist() == [True, False, False]
    assert truncated(log_probs, 0.85).isfinite().tolist() == [True, True, False]
    assert truncated(log_probs, 1.0).isfinite().tolist()[:2] == [True, True]


def test_fills_by_hand() -> None:
    equal = torch.tensor([[True, True, False, True], [False, True, True, True]])
    fill = Fills(torch.tensor([[1.0, 3.0, 5.0, 7.0], [0.0] * 4]), equal, equal)
    assert fill.accepted().tolist() == [2, 0]
    assert fill.nll_of_first(2) == 1.0
    assert fill.entropy_of_first(1) == pytest.approx(math.log(2))
    assert fill.entropy_of_first(4) == pytest.approx(-math.log(6 / 8))


def test_a_curve_is_read_between_its_points_only() -> None:
    curve = [(2.0, 5.0), (0.0, 1.0), (1.0, 2.0)]
    assert read_curve(curve, 1.5) == 3.5
    assert read_curve(curve, 0.5) == 1.5
    assert math.isnan(read_curve(curve, 2.1))


def test_gain_at_equal_entropy() -> None:
    """Both on the line NLL = 2 H, the conditioned one 0.5 below it."""
    rows, width = 400, 4
    random = torch.Generator().manual_seed(0)

    def fill(rate: float, shift: float) -> Fills:
        repeated = torch.rand(rows, width, generator=random) < rate
        entropy = -math.log(float(repeated[:, :2].float().mean()))
        nll = torch.full((rows, width), 2 * entropy + shift)
        return Fills(nll, repeated, repeated)

    plain = {p: fill(rate, 0.0) for p, rate in ((1.0, 0.3), (0.9, 0.5), (0.5, 0.95))}
    gain = gain_of_first(plain, {0.0: fill(0.7, -0.5)}, 2)
    assert gain.value == pytest.approx(-0.5, abs=1e-5)
    assert gain.interval[0] < -0.5 < gain.interval[1]


def test_stories_are_measured_and_told(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two students of one step: fills, samples, matched perplexity and a line of the gain map."""
    monkeypatch.setattr(stories, "STARTS", (2, 3))
    monkeypatch.setattr(stories, "DISTANCES", (1, 2, 4))
    recipes = (Recipe("plain", nfe=(2,)), Recipe("noisy", conditioning="gumbel", nfe=(2,)))
    plan = Plan("stories", (), recipes, seeds=(1,), sample_seeds=(5,), num_samples=4)
    (tmp_path / "store").symlink_to(store)
    bench = stories.StoriesBench(plan, tmp_path, "", None)
    bench.__dict__["judges"] = {"teacher": make_teacher(vocab_size=12)}
    figures: dict[str, list[Any]] = {}
    for run in plan.runs:
        folder = tmp_path / run.folder
        config = tiny_run(model__conditioning=run.recipe.conditioning, training__num_steps=1)
        assert train(config, store, folder)
        figures[run.recipe.name] = [json.loads(json.dumps(bench.measure(run, folder)))]
    table = "\n".join(bench.summarise(figures))
    assert "| noisy over plain, seed 1 |" in table and "NFE 2" in table
    last = figures["noisy"][0]["validation"]
    assert f"| noisy | {last['nll_nats']:.3f} (given noise) |" in table
    results = {"plan": {**to_mapping(plan), "nfe": [2]}, "recipes": figures}
    results["reference"] = {"entropy_nats": 99.0}
    bars = stories_bars(results)
    assert [bar.name for bar in bars] == ["plain", "noisy"]
    assert all(bar.note.startswith("(at entropy") for bar in bars)
    results["reference"] = bench.reference()
    assert 0 < results["reference"]["entropy_nats"] < math.log(12)
    assert all(
        low <= bar.value <= high for bar in stories_bars(results) for low, high in [bar.interval]
    )
    ways = figures["noisy"][0]["samples"]["2"]
    assert ways.keys() == {*stories.WAYS, "argmax"}
    assert len(ways["argmax"]["entropies"]) == len(ways["argmax"]["nll_sums"]["teacher"]) == 4


def test_the_last_validation_counts(tmp_path: Path) -> None:
    lines = [{"kind": "validation", "nll_nats": 3.0}, {"kind": "validation", "nll_nats": 2.0}]
    text = "\n".join(map(json.dumps, [*lines, {"kind": "train", "loss": 1.0}]))
    (tmp_path / "metrics.jsonl").write_text(text)
    assert stories.last_validation(tmp_path) == lines[1]


def test_finished_work_is_kept_with_what_it_was_made_from(tmp_path: Path) -> None:
    file = tmp_path / "done.json"
    assert recall(file, ["a"]) is None
    remember(file, ("a", 1), 5)
    assert recall(file, ("a", 1)) == 5
    assert recall(file, ("a", 2)) is None
    assert isinstance(Run(Recipe("Vocabulary attention, 1/t"), 2).folder, str)
    assert Run(Recipe("Vocabulary attention, 1/t"), 2).folder == "vocabulary-attention-1-t-seed2"


GRID = (
    Recipe("plain", group="reference"),
    Recipe("noisy", conditioning="gumbel", group="reference"),
    Recipe("left to right", student="ar", sampler="sequential", nfe=(), group="reference"),
    Recipe("cut", conditioning="gumbel", store="cut", group="codec"),
    Recipe("cool", student_of="noisy", sampling={"tau": 0.5}, group="tau"),
    Recipe(
        "checked", student_of="noisy", sampler="apd", verifier="left to right", nfe=(), group="APD"
    ),
)
PLAN = Plan(
    "maze",
    (),
    GRID,
    seeds=(1,),
    sample_seeds=(5,),
    num_samples=8,
    nfe=(1,),
    stores=(StoreWords("cut", convert=("--codec", "topk", "--set", "num_entries=2")),),
)
WORDS = ("<bos>", "<eos>", "up", "down", "left", "right")


def maze_task() -> MazeTask:
    """A row of three cells, and a teacher of random weights."""
    path = ("right", "right")
    maze = Maze(("S.T",), (0, 0), (0, 2), (path,), 10)
    return MazeTask(maze, WORDS, LENGTH, make_teacher(len(WORDS)), {path: 1.0}, {1: 0.5})


def run_here(command: tuple[str, ...]) -> None:
    """A command of the project in this process."""
    apps = {"gdistill-shards": shards_app, "gdistill-train": trainer_app}
    apps[command[0]](list(command[1:]), standalone_mode=False)


def train_here(jobs: list[Any]) -> None:
    tiny = ("training.num_steps=2", "training.global_batch_size=8", "training.device=cpu")
    small = ("model.hidden_size=16", "model.num_layers=1", "model.num_heads=2")
    for job in jobs:
        run_here((*job.command, *(word for text in (*tiny, *small) for word in ("--set", text))))


def test_a_grid_is_trained_judged_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted after three figures, the same command measures only what is missing."""
    store = write_store(tmp_path / "store", num_entries=6, vocab_size=6, row_length=LENGTH)
    monkeypatch.setattr(bench, "run_visibly", lambda name, command: run_here(command))
    monkeypatch.setattr(bench, "run_under_a_bar", lambda name, jobs, *_, **__: train_here(jobs))
    monkeypatch.setattr(bench, "extracted", lambda home, words: store)
    stores = bench.make_stores(PLAN, tmp_path, [])
    assert ShardStore.open(stores["cut"]).codec.name == "topk"
    bench.train(PLAN, PLAN.runs, stores, tmp_path, 1)
    assert not (tmp_path / "cool-seed1").exists()
    judge = MazeBench(PLAN, tmp_path)
    judge.__dict__["task"] = maze_task()
    measured: list[str] = []

    class Watched:
        limit = 3

        def measure(self, run: Run, folder: Path) -> Any:
            if len(measured) == self.limit:
                raise KeyboardInterrupt
            measured.append(run.recipe.name)
            return judge.measure(run, folder)

    watched: Any = Watched()
    with pytest.raises(KeyboardInterrupt):
        bench.measure(PLAN, stores, tmp_path, watched)
    watched.limit = 99
    figures = bench.measure(PLAN, stores, tmp_path, watched)
    assert sorted(measured) == sorted(recipe.name for recipe in GRID)
    assert figures["left to right"][0]["own"]["nfe_mean"] == LENGTH - 1
    assert 1 <= figures["checked"][0]["own"]["nfe_mean"] <= LENGTH - 1
    assert figures["cool"][0]["1"]["nfe_mean"] == 1 and "by_margin" not in figures["cool"][0]
    table = judge.summarise(figures)
    assert "| *codec* |" in "\n".join(table) and len({line.count("|") for line in table}) == 1
    results = {"plan": to_mapping(PLAN), "recipes": figures, "reference": judge.reference()}
    results = json.loads(json.dumps(results, sort_keys=True))
    bars = maze_bars(results)
    assert [bar.name for bar in bars] == [recipe.name for recipe in GRID], "as in the plan"
    assert [bar.name for bar in bars if "NFE" in bar.note] == ["left to right", "checked"]
    cell = results["recipes"]["cool"][0]["1"]
    for count, said in ((8, ""), (7, "(7 of 10 paths)")):
        cell.update(num_distinct_paths=count, num_paths_in_language=10)
        assert next(bar.note for bar in maze_bars(results) if bar.name == "cool") == said
    write_json_atomic(tmp_path / "quality-ablation-maze.json", results)
    alone = draw_ablations(tmp_path).stat().st_size
    sweep = {"nll_sums": {"teacher": [2.0, 3.0]}, "num_tokens": 2, "entropies": [0.5, 0.7]}
    points = {"nucleus 1": sweep, "nucleus 0.6": {**sweep, "entropies": [0.2, 0.3]}}
    story = {
        "plan": {"nfe": [1, 2], "recipes": [{"name": "a", "group": "reference"}]},
        "recipes": {
            "a": [{"samples": {"1": {"nucleus 1": {**sweep, "num_tokens": 1}}, "2": points}}]
        },
        "reference": {"entropy_nats": 0.4},
    }
    write_json_atomic(tmp_path / "quality-ablation-stories.json", story)
    assert stories_bars(story)[0].value == pytest.approx(math.exp(1.25))
    assert draw_ablations(tmp_path).stat().st_size > alone > 10_000


def test_students_are_sampled_as_the_recipe_says() -> None:
    judge = MazeBench(PLAN, Path("home"))
    noisy, plain = (make_student(MDLM, conditioning=kind) for kind in ("gumbel", "none"))
    cool: Any = judge._sampler(Run(GRID[4], 1), noisy, 2)
    assert (cool.nfe, cool.tau, cool.decision) == (2, 0.5, "argmax")
    drawn: Any = judge._sampler(Run(GRID[0], 1), plain, 2)
    assert drawn.decision == "categorical"
    assert Run(GRID[5], 1).folder_of("left to right") == "left-to-right-seed1"


def test_noise_is_cut_as_the_students_store_cuts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = MazeBench(PLAN, Path("home"))
    judge.__dict__["task"] = maze_task()
    codec = make_codec("topk", num_entries=2)
    config = MDLM.config_class.build(
        StudentSettings(hidden_size=16, num_layers=1, num_heads=2, conditioning="gumbel"),
        vocab_size=len(WORDS),
        row_length=LENGTH,
        bos_token_id=0,
    )
    config.codec = {"name": "topk", "parameters": codec_parameters(codec)}
    student = MDLM(config).eval()
    seen: list[Any] = []
    embed = student.embed_noise
    monkeypatch.setattr(student, "embed_noise", lambda n, tau: seen.append(n) or embed(n, tau))
    judge._draw(student, judge._sampler(Run(GRID[1], 1), student, 1), 5)
    arrivals = seen[0].tile(0, len(WORDS))
    assert bool(((~arrivals.isinf()).sum(1) == 2).all())


def test_names_of_a_grid() -> None:
    with pytest.raises(UsageError, match=r"no such recipe.*b"):
        Plan("maze", (), (Recipe("a", student_of="b"),))
    with pytest.raises(UsageError, match=r"no such store.*s"):
        Plan("maze", (), (Recipe("a", store="s"),))
    with pytest.raises(UsageError, match="own samplers"):
        Plan("stories", (), (Recipe("a", sampler="apd"),))
    with pytest.raises(UsageError, match="extracted or converted"):
        StoreWords("both", ("a",), ("b",))
    file = Path(__file__).parents[3] / "benchmarks" / "quality" / "ablation-maze.toml"
    names = [recipe.name for recipe in read_plan(file, [], only="tau 0.85 in sampling").recipes]
    assert names == ["MDLM + Gumbel", "tau 0.85 in sampling"]
    by_group = read_plan(file, [], only="codec").recipes
    assert {recipe.group for recipe in by_group} == {"codec"} and len(by_group) == 3
    with pytest.raises(UsageError, match=r"--only.*codecs.*'codec'"):
        read_plan(file, [], only="codecs")


def test_the_figure_wants_results(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="make ablate"):
        draw_ablations(tmp_path)
