"""The demo's picture, table and sentence say what the samples are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread

from benchmarks.maze_task import MazeTask, pool
from evaluation.maze import Maze
from evaluation.report import aligned
from runs import demo

WAY = ("up", "right", "right", "down")
WORDS = ("<bos>", "<eos>", "up", "down", "left", "right")
MAZE = Maze(("...", "S#T"), (1, 0), (1, 2), (WAY,), 4)


@pytest.mark.parametrize(
    ("words", "num_steps", "fault"),
    [
        ((*WAY, "<eos>"), 4, None),
        (("right", "right", "<eos>", "<eos>", "<eos>"), 1, 0),  # the wall
        (("left", "up", "up", "up", "up"), 1, 0),  # off the map
        (("up", "down", "up", "up", "up"), 2, 1),  # a cell that was visited
        (("up", "<eos>", "<eos>", "<eos>", "<eos>"), 1, 1),  # an end that is not the target
        ((*WAY[:3], "<eos>", "down"), 3, 3),
        (("up", "right", "right", "left", "left"), 4, 3),
    ],
)
def test_a_way_is_drawn_up_to_its_first_fault(words: tuple[str, ...], num_steps: int, fault: int | None) -> None:
    steps, found = demo.walked(MAZE, words)
    assert (len(steps), found) == (num_steps, fault)
    ends = words.index("<eos>") if "<eos>" in words else len(words)
    is_path = MAZE.is_success(words[:ends]) and set(words[ends:]) <= {"<eos>"}
    assert (found is None) == is_path


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """1 of 4 samples without noise arrives, 3 with it, at every NFE."""
    monkeypatch.setattr(demo, "NUM_SAMPLES", 4)
    good, bad = [0, *(WORDS.index(move) for move in WAY), 1], [0, 2, 2, 5, 5, 1]
    task = MazeTask(MAZE, WORDS, 6, None, {WAY: 1.0}, {nfe: nfe / 10 for nfe in demo.NFE})
    task.decodes[demo.SAMPLE_SEED, 4] = torch.tensor([good] + [bad] * 3)
    cells, samples = {}, {}
    for name, num_good in (("without noise", 1), ("with noise", 3)):
        rows = [good] * num_good + [bad] * (4 - num_good)
        for nfe in demo.NFE:
            success, agreement = task.score(torch.tensor(rows), demo.SAMPLE_SEED)
            cells[name, nfe], samples[name, nfe] = pool([success], [agreement]), rows
    return {"task": task, "cells": cells, "rows": samples}


def test_the_table_and_the_sentence_say_the_figures(found: dict[str, Any]) -> None:
    table = demo.table(found)
    assert table.rows == (
        ("without noise", *["25.0"] * len(demo.NFE), "1 of 1"),
        ("with noise", *["75.0"] * len(demo.NFE), "1 of 1"),
    )
    assert max(map(len, aligned([table.header, *table.rows]))) <= 80
    assert re.findall(r"[\d.]+\d", table.notes[0]) == ["10.0", "20.0", "40.0", "80.0"]
    said = demo.sentence(found)
    # 3 of 4 with their interval, 1 of 4; two of the four with noise are the teacher's rows.
    assert re.findall(r"\d+", said) == ["75", "30", "95", "25", "50"]
    assert max(map(len, said.splitlines())) <= 100


def test_the_picture_shows_the_first_broken_sample(tmp_path: Path, found: dict[str, Any]) -> None:
    assert demo.shown_sample(found) == 1
    demo.draw_picture(found, tmp_path / "demo.png")
    picture = imread(tmp_path / "demo.png")[..., :3]
    for colour in ((0xD5, 0x5E, 0x00), (0x00, 0x72, 0xB2)):  # each role in the palette's colour
        near = (abs(picture * 255 - torch.tensor(colour).numpy()) < 2).all(-1)
        assert near.sum() > 500
