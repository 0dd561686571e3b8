"""What a rename makes visible is on disk before: files, and the folders that name them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.corpus.config import CorpusConfig
from pipeline.maze import MazeLayout, maze_tokenizer
from pipeline.maze_teacher import MazeTeacherConfig, train_maze_teacher
from pipeline.tokens.build import prepare_tokens
from shards.atomic import publish_folder

SMALL = MazeTeacherConfig(num_layers=1, num_heads=2, hidden_size=8, num_steps=2)


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Inodes of what was brought to disk; a rename keeps them."""
    fsync, inodes = os.fsync, set()

    def noted(descriptor: int) -> None:
        inodes.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    return inodes


def not_synced(folder: Path, synced: set[int]) -> list[str]:
    paths = [folder.parent, folder, *folder.rglob("*")]
    return [str(path) for path in paths if path.stat().st_ino not in synced]


def test_token_rows_are_on_disk_with_their_tokenizer(tmp_path: Path, synced: set[int]) -> None:
    (tmp_path / "a.txt").write_text("right down right\n" * 20)
    config = CorpusConfig(f"text:{tmp_path}/a.txt", row_length=4, document_separator="line")
    dataset = prepare_tokens(config, maze_tokenizer(), tmp_path / "run")
    assert list(dataset.tokenizer_path.iterdir())
    assert not_synced(dataset.path, synced) == []


def test_the_maze_teacher_is_on_disk_with_its_weights(tmp_path: Path, synced: set[int]) -> None:
    out = tmp_path / "run" / "teacher"
    out.parent.mkdir()
    train_maze_teacher(MazeLayout("hand", ("ST", ".."), max_moves=3), out, SMALL)
    assert (out / "model.safetensors").is_file()
    assert not_synced(out, synced) == []


def test_the_name_comes_after_the_content(
    tmp_path: Path, synced: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    work, rename = tmp_path / "work", Path.rename
    (work / "deep").mkdir(parents=True)
    (work / "deep" / "file").write_text("content")

    def checked(self: Path, target: Path) -> Path:
        inodes = {path.stat().st_ino for path in (work, work / "deep", work / "deep" / "file")}
        assert inodes <= synced
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", checked)
    publish_folder(work, tmp_path / "final")
    assert (tmp_path / "final/deep/file").read_text() == "content" and not work.exists()
