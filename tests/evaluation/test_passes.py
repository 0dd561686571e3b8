"""The page of settling samples: what it tells is what the sampler did."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from evaluation.maze import Maze
from evaluation.passes import (
    Column,
    Settled,
    column_of,
    pieces_of_text,
    reader_of_maze,
    settle,
    write_page,
)
from shards.errors import UsageError
from tests.commands import call
from tests.trainer.sample_cli_cases import save
from trainer.loading import generate, make_sampler
from trainer.students.configuration import StudentSettings
from trainer.students.registry import AR, MDLM, Student

WORDS = ("<bos>", "<eos>", "up", "down", "left", "right")
MAZE = Maze(("...", "S#T"), (1, 0), (1, 2), (("up", "right", "right", "down"),), 4)


def make_student(kind: type[Student] = MDLM, **changes: Any) -> Student:
    """A small student with random weights, so that its rows differ."""
    torch.manual_seed(0)
    settings = StudentSettings(hidden_size=16, num_layers=1, num_heads=2, **changes)
    config = kind.config_class.build(settings, vocab_size=8, row_length=6, bos_token_id=0)
    student = kind(config).eval()
    for parameter in student.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return student


@pytest.mark.parametrize("kind", ["none", "gumbel"])
@pytest.mark.parametrize("sampler", ["ancestral", "confidence", "first_hitting"])
def test_a_settled_row_is_the_sample_of_that_seed_and_index(kind: str, sampler: str) -> None:
    student = make_student(conditioning=kind)
    settings = {} if sampler == "first_hitting" else {"nfe": 3}
    rows = generate(student, num_samples=4, seed=7, sampler=sampler, **settings)
    for index, row in enumerate(rows):
        tokens, passes = settle(student, make_sampler(sampler, **settings), index, 7)
        assert torch.equal(tokens, row)
        assert passes[0] == 0 and min(passes[1:]) == 1  # position 0 is given
        assert set(passes) == set(range(max(passes) + 1))  # no pass reveals nothing
        assert max(passes) <= 3 or sampler == "first_hitting"
        if sampler == "first_hitting":  # one token a pass
            assert sorted(passes) == list(range(len(row)))


def test_only_students_of_whole_rows_settle() -> None:
    with pytest.raises(UsageError, match="whole rows"):
        settle(make_student(AR), make_sampler("sequential"), 0, 0)


def test_pieces_join_to_the_text_and_wait_for_whole_characters() -> None:
    class Bytes:
        def decode(self, tokens: list[int]) -> str:
            return bytes(tokens).decode(errors="replace")

    text = "aé</script>"
    pieces = pieces_of_text(Bytes(), list(text.encode()))
    assert "".join(pieces) == text and len(pieces) == len(text.encode())
    assert pieces[:3] == ("a", "", "é")


def data_of(page: str) -> dict:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    return json.loads(found)


def test_the_page_holds_every_budget_and_noise_and_loads_nothing(tmp_path: Path) -> None:
    student = make_student(conditioning="gumbel")
    read = reader_of_maze(MAZE, [*WORDS, *(f"w{n}" for n in range(student.config.vocab_size))])
    samplers = {str(nfe): make_sampler("ancestral", nfe=nfe) for nfe in (1, 4)}
    column = column_of("noisy", student, samplers, 3, 5, read)
    own = Settled(("<bos>", *MAZE.paths[0], "</script>"), (0, 1, 2, 3, 4, 5), "reaches T")
    teacher = Column("teacher", "teacher", {"own": [own] * 3})
    path = write_page(tmp_path / "p.html", [column, teacher], title="<b>", about="x", maze=MAZE)
    page = path.read_text()
    assert not re.search(r"(src|href)\s*=|url\(|https?://(?!www\.w3\.org/2000/svg)", page)
    data = data_of(page)
    assert data["title"] == "<b>" and data["budgets"] == [1, 4] and data["num_samples"] == 3
    assert data["maze"]["rows"] == ["...", "S#T"]
    noisy, shown = data["columns"]
    assert noisy["role"] == "noise" and [len(rows) for rows in noisy["samples"].values()] == [3, 3]
    assert max(noisy["samples"]["1"][0]["passes"]) == 1
    assert shown["samples"]["own"][0]["pieces"][-1] == "</script>"


def test_a_row_of_a_maze_says_whether_it_arrives() -> None:
    read = reader_of_maze(MAZE, WORDS)
    good = torch.tensor([0, 2, 5, 5, 3, 1])
    assert read(good, [0, 1, 1, 1, 1, 1]).verdict == "reaches T"
    assert read(good.flip(0), [0, 1, 1, 1, 1, 1]).verdict == "does not reach T"


def test_the_command_makes_the_page_of_students_and_their_teacher(
    tmp_path: Path, judge_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    students = [f"{kind}={save(tmp_path / kind, conditioning=kind)}" for kind in ("none", "gumbel")]
    (tmp_path / "maze.json").write_text(json.dumps(asdict(MAZE)))
    page = tmp_path / "new" / "page.html"
    words = ["passes", *students, "--teacher", judge_folder, "--num", 2, "--out", page]
    assert call("gdistill-eval", *words, "--maze", tmp_path / "maze.json", "--nfe", "1,3") == 0
    data = data_of(page.read_text())
    assert data["budgets"] == [1, 3] and data["num_samples"] == 2
    assert [column["role"] for column in data["columns"]] == ["plain", "noise", "teacher"]
    assert max(data["columns"][1]["samples"]["3"][0]["passes"]) == 3
    assert call("gdistill-eval", *words, "--nfe", "few") == 2
    assert "bad NFE [--nfe]; got few" in capsys.readouterr().err
