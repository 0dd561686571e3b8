"""The maze: its scores by hand and by simulation, and the page of samples that settle."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import maze_task
from benchmarks.dense_noise import DenseNoise
from evaluation import passes
from evaluation.maze import Maze, maze_success, moves_of_words, teacher_decode
from evaluation.score import wilson_interval
from evaluation.text.reading import JudgeModel
from shards.errors import GdistillError, UsageError
from tests.commands import call
from tests.evaluation.kit import Told
from tests.trainer.sampling_cases import save, tiny_student
from trainer.loading import generate, make_sampler
from trainer.sampling.noise import sampling_noise
from trainer.students.folder import open_model

WORDS = ("<bos>", "<eos>", "up", "down", "left", "right")
ROUND, OTHER = ("up", "right", "right", "down"), ("up", "right", "down", "right")
MAZE = Maze(("...", "S#T"), (1, 0), (1, 2), (ROUND,), 4)
TWO_WAYS = Maze(("...", "S.T"), (1, 0), (1, 2), (ROUND, OTHER), 4)
TEACHER = {ROUND: 0.75, OTHER: 0.25}


def test_moves_of_words() -> None:
    for row, moves in (
        ("<bos> up right <eos> <eos>", ("up", "right")),
        ("up right", ("up", "right")),
        ("<bos> <eos>", ()),
        ("<bos> up <eos> right", None),
        ("<bos> up <bos> <eos>", None),
    ):
        assert moves_of_words(row.split()) == moves, row
    for tokens, verdict in (([0, 2, 5, 5, 3, 1], "reaches T"), ([0, 2, 1], "does not reach T")):
        assert passes.read_moves(MAZE, WORDS, torch.tensor(tokens), []).verdict == verdict


def test_a_maze_that_does_not_fit_itself_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "maze.json"
    file.write_text(json.dumps(asdict(MAZE)))
    assert Maze.read(file) == MAZE
    for change, said in (
        ({"rows": ["...", "S#"]}, "unequal length"),
        ({"rows": []}, "unequal length"),
        ({"target": [1, 7]}, "target off the map"),
        ({"target": [2, 0]}, "target off the map"),
        ({"start": [1, -1]}, "start off the map"),
        ({"paths": []}, "not made of up, down"),
        ({"paths": [["north"]]}, "not made of up, down"),
        ({"start": [1]}, r"cannot read the maze.*maze\.json"),
        ({"max_moves": None}, r"cannot read the maze.*maze\.json"),
    ):
        file.write_text(json.dumps(asdict(MAZE) | change))
        with pytest.raises(GdistillError, match=said):
            Maze.read(file)
    file.write_text(json.dumps({"rows": ["."]}))
    with pytest.raises(GdistillError, match=r"no 'start' in it"):
        Maze.read(file)
    with pytest.raises(UsageError, match="No such file"):
        Maze.read(tmp_path / "none.json")


def test_details_of_success_by_hand() -> None:
    """4 of 8 valid: three of one path, one of the other; the rest is mass off the paths."""
    samples = [ROUND] * 3 + [OTHER] + [None, ("up",), ("left",), None]
    details = maze_success(TWO_WAYS, samples, TEACHER, "teacher").details
    assert details["num_success"] == 4 and details["num_distinct_paths"] == 2
    assert details["most_common_path_share"] == 3 / 8
    variation = 0.5 * (abs(3 / 8 - 0.75) + abs(1 / 8 - 0.25) + 4 / 8)
    assert details["total_variation_to_teacher"] == pytest.approx(variation)
    always = maze_success(TWO_WAYS, [ROUND] * 100, {ROUND: 0.5, OTHER: 0.5}, "teacher")
    assert always.value == 1.0 and always.details["num_distinct_paths"] == 1
    assert always.details["total_variation_to_teacher"] == pytest.approx(0.5)
    assert maze_success(TWO_WAYS, [None], TEACHER, "teacher").details["most_common_path_share"] == 0
    assert always.interval is not None and always.interval[0] < 1.0 <= always.interval[1]


# What the benchmark of the maze compares with: the optimum, and the teacher's own decode.


def test_optimum_by_enumeration() -> None:
    """Every way to divide four tokens over three steps, each row of the language by itself."""
    language = np.array([[0, 1, 2, 0], [0, 2, 1, 1], [1, 1, 1, 0], [2, 1, 2, 2], [2, 0, 1, 2]])
    weights, chances = np.array([0.1, 0.2, 0.3, 0.25, 0.15]), maze_task.step_probabilities(3)
    expected = np.zeros(5)
    for steps in map(np.array, itertools.product(range(3), repeat=4)):
        for number, row in enumerate(language):
            chance, fits = chances[steps].prod(), np.ones(5, dtype=bool)
            for step in sorted(set(steps)):
                shares, open_places = weights * fits / weights[fits].sum(), steps == step
                agree = language == row
                chance *= (shares @ agree)[open_places].prod()
                fits &= agree[:, open_places].all(axis=1)
            expected[number] += chance
    total, each = maze_task.optimal_success(language, weights, 3)
    assert each == pytest.approx(expected) and total == pytest.approx(expected.sum())
    ids = {"<eos>": 1, "up": 2, "left": 4}
    assert maze_task.rows_of_paths([("up", "left")], 4, ids).tolist() == [[2, 4, 1, 1]]
    factorised = np.array([[a, b] for a in range(2) for b in range(3)])
    assert maze_task.optimal_success(factorised, np.full(6, 1 / 6), 1)[0] == pytest.approx(1.0)


def test_a_cell_pools_samples_not_runs() -> None:
    """2 of 2 and 1 of 8 samples: 3 of 10, not the mean of 1.0 and 0.125."""
    runs = ([ROUND, OTHER], [ROUND] + [None] * 7)
    scores = [maze_success(TWO_WAYS, run, TEACHER, "teacher") for run in runs]
    agreements = [
        maze_task.teacher_agreement([[0, 1], [0, 1]], torch.tensor([[0, 1], [0, 2]])),
        maze_task.teacher_agreement([[0, 2]] * 8, torch.tensor([[0, 2]] * 6 + [[0, 1]] * 2)),
    ]
    with pytest.raises(GdistillError, match="one teacher row per sample"):
        maze_task.teacher_agreement([[0, 1]], torch.tensor([[0, 1], [0, 2]]))
    cell = maze_task.pool(scores, agreements)
    assert cell["success"] == pytest.approx(0.3) and cell["num_samples"] == 10
    assert cell["interval_95"] == pytest.approx(wilson_interval(3, 10))
    assert cell["success_by_run"] == [1.0, 0.125]
    assert cell["num_distinct_paths"] == 1  # the least that any run shows
    assert cell["num_paths_in_language"] == 2
    assert cell["equal_to_teacher_decode"] == pytest.approx(0.7)
    assert cell["equal_interval_95"] == pytest.approx(wilson_interval(7, 10))
    first, second = 0.5 * (0.25 + 0.25), 0.5 * (abs(1 / 8 - 0.75) + 0.25 + 7 / 8)
    assert cell["total_variation_to_teacher"] == pytest.approx((first + second) / 2)


def bigram(*shares: list[float]) -> Any:
    """A teacher whose next token depends on the last one alone, by the row of a table."""
    logits = torch.tensor(shares).log()
    return lambda input_ids, **_: SimpleNamespace(logits=logits[input_ids], past_key_values=None)


def test_the_teacher_decodes_by_the_first_arrival() -> None:
    """argmax(log p - log t) is the token whose t / p is smallest: by hand from [0] and [1].

    Row 0: from token 0, t / p = 1/.1, 1.5/.6, 1/.3 -> token 1; from 1: 3/.5, 1/.25, 2/.25 -> 1.
    Row 1: from token 1, t / p = 1/.5, 2/.25, 9/.25 -> token 0; from 0: 2/.1, 9/.6, 1/.3 -> 2.
    """
    three, ones = bigram([0.1, 0.6, 0.3], [0.5, 0.25, 0.25], [0.2, 0.2, 0.6]), [1.0, 1.0, 1.0]
    rows = [ones, [1.0, 1.5, 1.0], [3.0, 1.0, 2.0], ones, [1.0, 2.0, 9.0], [2.0, 9.0, 1.0]]
    found = teacher_decode(three, torch.tensor([0, 1]), DenseNoise(torch.tensor(rows)), 3)
    assert found.tolist() == [[0, 1, 1], [1, 0, 2]]
    # A row's probability is the product behind its first token.
    shares = maze_task.row_probabilities(three, torch.tensor([[0, 1, 0], [2, 2, 2]]))
    assert shares == pytest.approx([0.6 * 0.5, 0.6 * 0.6])


# The page of settling samples: what it tells is what the sampler did.


@pytest.mark.parametrize("kind", ["none", "gumbel"])
@pytest.mark.parametrize("sampler", ["ancestral", "confidence", "first_hitting"])
def test_a_settled_row_is_the_sample_of_that_seed_and_index(kind: str, sampler: str) -> None:
    student = tiny_student("mdlm", kind)
    settings = {} if sampler == "first_hitting" else {"nfe": 3}
    rows = generate(student, num_samples=4, seed=7, sampler=sampler, **settings)
    for index, row in enumerate(rows):
        tokens, made_in = passes.settle(student, make_sampler(sampler, **settings), index, 7)
        assert torch.equal(tokens, row)
        assert made_in[0] == 0 and min(made_in[1:]) == 1  # position 0 is given
        assert set(made_in) == set(range(max(made_in) + 1))  # no pass reveals nothing
        assert max(made_in) <= 3 or sampler == "first_hitting"
        if sampler == "first_hitting":  # one token a pass
            assert sorted(made_in) == list(range(len(row)))
    assert not student.backbone.vocab_embed._forward_pre_hooks, "the student is left as it was"
    with pytest.raises(UsageError, match="whole rows"):
        passes.settle(tiny_student("ar", "none"), make_sampler("sequential"), 0, 0)


def data_of(page: str) -> dict[str, Any]:
    assert not re.search(r"(src|href)\s*=|url\(|https?://(?!www\.w3\.org/2000/svg)", page), "it loads nothing"
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    return json.loads(found)


def test_pieces_join_to_the_text_and_wait_for_whole_characters(tmp_path: Path) -> None:
    """On the page too, whose script ends at no text."""

    text = "aé</script>DATA"
    letters = SimpleNamespace(decode=lambda tokens: bytes(tokens).decode(errors="replace"))
    settled = passes.read_text(letters, torch.tensor(list(text.encode())), [])
    assert "".join(settled.pieces) == text and len(settled.pieces) == len(text.encode())
    assert settled.pieces[:3] == ("a", "", "é")
    columns = [passes.Column("x", "noise", {"1": [settled]})]
    data = data_of(passes.write_page(tmp_path / "p.html", columns, title="<b>", about="x").read_text())
    assert (data["title"], data["about"], data["maze"]) == ("<b>", "x", None)
    assert "".join(data["columns"][0]["samples"]["1"][0]["pieces"]) == text


def test_the_command_makes_the_page_of_students_and_their_teacher(
    tmp_path: Path, judge_folder: Path, judge: JudgeModel, told: Told
) -> None:
    students = [f"{kind}={save(tmp_path / kind, conditioning=kind)}" for kind in ("none", "gumbel")]
    (tmp_path / "maze.json").write_text(json.dumps(asdict(MAZE)))
    page = tmp_path / "new" / "page.html"
    words = ["passes", *students, "--teacher", judge_folder, "--num", 2, "--out", page]
    words += ["--seed", 5, "--sampler", "confidence", "--set", "confidence=probability"]
    assert call("gdistill-eval", *words, "--maze", tmp_path / "maze.json", "--nfe", "1,3") == 0
    data = data_of(page.read_text())
    assert data["budgets"] == [1, 3] and data["num_samples"] == 2
    assert data["maze"] == {"rows": ["...", "S#T"], "start": [1, 0], "target": [1, 2]}
    assert [column["role"] for column in data["columns"]] == ["plain", "noise", "teacher"]
    assert max(data["columns"][1]["samples"]["3"][0]["passes"]) == 3
    model = open_model(tmp_path / "gumbel")
    sampler = make_sampler("confidence", nfe=3, decision="argmax", tau=1.0, confidence="probability")
    for index, shown in enumerate(data["columns"][1]["samples"]["3"]):
        tokens, _ = passes.settle(model.student, sampler, index, 5)
        assert shown["pieces"] == model.tokenizer.convert_ids_to_tokens(tokens.tolist())
    length = model.student.config.row_length
    noise = sampling_noise(5, torch.arange(2), length, judge.model.config.vocab_size)
    rows = teacher_decode(judge.model, torch.zeros(2, dtype=torch.int64), noise, length)
    assert data["columns"][2]["samples"]["own"][0]["passes"] == [*range(length)]
    written = [shown["pieces"] for shown in data["columns"][2]["samples"]["own"]]
    assert written == [model.tokenizer.convert_ids_to_tokens(row.tolist()) for row in rows]
    assert call("gdistill-eval", *words, "--nfe", "few") == 2
    assert "bad NFE [--nfe]; got few" in told()
    file = tmp_path / "none" / "tokenizer.json"
    file.write_text(file.read_text().replace("<bos>", "<x>"))
    assert call("gdistill-eval", *words, "--maze", tmp_path / "maze.json") == 2 and "write no moves" in told()
    for file in (tmp_path / "none").glob("tokenizer*"):
        file.unlink()
    assert call("gdistill-eval", *words) == 2 and "no tokenizer beside it [none=" in told()
