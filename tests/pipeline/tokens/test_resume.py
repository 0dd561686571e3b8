"""Stage 1 that is interrupted, killed or asked for by many; and what is on disk before its name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pipeline.corpus.config import CorpusConfig, corpus_config
from pipeline.maze import MazeLayout, MazeTeacherConfig, maze_tokenizer, train_maze_teacher
from pipeline.tokens import build
from pipeline.tokens.build import prepare_tokens
from pipeline.tokens.dataset import TokenDataset
from pipeline.tokens.tokenizer import load_tokenizer
from shards.errors import UsageError
from tests.pipeline.conftest import Prepare
from tests.pipeline.extract_cases import contents


def test_processes_that_ask_at_the_same_time_share_one_run(
    tmp_path: Path, prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is per open file, so threads stand for processes here."""
    publish, built = build.publish_folder, []

    def counted(*arguments: Any) -> None:
        built.append(1)
        publish(*arguments)

    monkeypatch.setattr(build, "publish_folder", counted)
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(prepare, tmp_path) for _ in range(3)]
        assert len({one.result().fingerprint for one in asked}) == 1
    assert len(built) == 1


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("packing", ["concat", "wrap", "pad"])
@pytest.mark.parametrize("num_batches", [1, 4, 9, 12])
def test_an_interrupted_stage_goes_on_to_the_same_bytes(
    tmp_path: Path,
    prepare: Prepare,
    monkeypatch: pytest.MonkeyPatch,
    packing: str,
    num_batches: int,
) -> None:
    whole = prepare(tmp_path / "whole", packing=packing)
    encoded, read = build.encoded, list[int]()

    def count(*arguments: Any) -> Iterator[Any]:
        for number, found in enumerate(encoded(*arguments)):
            if len(read) == num_batches:
                raise KeyboardInterrupt
            read.append(number)
            yield found

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(build, "encoded", count)
        prepare(tmp_path / "run", packing=packing)
    assert not (tmp_path / "run/tokens").exists()
    with pytest.raises(UsageError, match="no finished token data set"):
        TokenDataset.open(tmp_path / "run/tokens")
    if num_batches > 2:
        with pytest.raises(UsageError, match=r"row_length.*remove .*tokens\.partial"):
            prepare(tmp_path / "run", packing=packing, row_length=8)
        with pytest.raises(UsageError, match="another number of rows"):
            prepare(tmp_path / "run", {"train": 5}, packing=packing)
    if num_batches == 4:  # another version's journal, or none: the stage begins anew
        (tmp_path / "run/.tokens.partial/journal.json").write_text('{"span": 0, "identity": {}}')
    resumed = prepare(tmp_path / "run", packing=packing)
    assert contents(resumed.path) == contents(whole.path)


KILLED = """
import os, signal, sys
from pathlib import Path
from pipeline.corpus.config import corpus_config
from pipeline.tokens import build, dataset, tokenizer
dataset.PART_TOKENS, dataset.ROW_GROUP_TOKENS, tokenizer.BATCH_DOCUMENTS = 800, 160, 40
write = build.write_json_atomic
def write_and_die(path, journal):
    write(path, journal)
    if len(journal["splits"]["train"]["parts"]) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
build.write_json_atomic = write_and_die
settings = {"document_separator": "line", "row_length": 16, "validation_documents": 50}
config = corpus_config(sys.argv[1], settings)
build.prepare_tokens(config, tokenizer.load_tokenizer(sys.argv[2]), Path(sys.argv[3]))
"""


@pytest.mark.usefixtures("small_parts")
def test_a_killed_process_loses_no_finished_part(
    tmp_path: Path, sentence_corpus: CorpusConfig, bpe_tokenizer: Any
) -> None:
    bpe_tokenizer.save_pretrained(tmp_path / "tokenizer")
    source = sentence_corpus.source
    command = [sys.executable, "-c", KILLED, source, str(tmp_path / "tokenizer"), str(tmp_path)]
    assert subprocess.run(command, capture_output=True).returncode == -signal.SIGKILL
    parts = sorted((tmp_path / ".tokens.partial/train").glob("part-*.parquet"))
    written = {path.name: path.stat().st_mtime_ns for path in parts}
    assert len(written) == 3 and not (tmp_path / "tokens").exists()
    (tmp_path / ".tokens.partial" / f".journal.json.{'0' * 32}.tmp").write_text("killed while")
    saved = load_tokenizer(tmp_path / "tokenizer")
    resumed = prepare_tokens(sentence_corpus, saved, tmp_path)
    kept = {name: (resumed.path / "train" / name).stat().st_mtime_ns for name in written}
    assert kept == written
    whole = prepare_tokens(sentence_corpus, saved, tmp_path / "whole")
    assert contents(resumed.path) == contents(whole.path)


def test_what_has_its_name_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal that names a part must never outlive it in a power cut; nor folders their files."""
    synced, fsync, replace = set[int](), os.fsync, os.replace

    def noted(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def checked(old: Path, new: Path) -> None:
        assert os.stat(old).st_ino in synced, f"{new} is named before its content is on disk"
        replace(old, new)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "replace", checked)
    (tmp_path / "a.txt").write_text("right down right\n" * 20)
    config = corpus_config(f"{tmp_path}/a.txt", {"row_length": 4, "document_separator": "line"})
    rows = prepare_tokens(config, maze_tokenizer(), tmp_path / "run").path
    teacher = MazeTeacherConfig(num_layers=1, num_heads=2, hidden_size=8, num_steps=2)
    maze = MazeLayout("hand", ("ST", ".."), max_moves=3)
    train_maze_teacher(maze, tmp_path / "run/teacher", teacher)
    for folder in (rows, tmp_path / "run/teacher"):
        paths = [folder.parent, folder, *folder.rglob("*")]
        assert [str(path) for path in paths if path.stat().st_ino not in synced] == []
