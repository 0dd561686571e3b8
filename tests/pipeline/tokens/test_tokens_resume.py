from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from pipeline.corpus.config import CorpusConfig
from pipeline.tokens import build as stage1
from pipeline.tokens import dataset as token_writer
from pipeline.tokens import tokenizer as tokenization
from pipeline.tokens.build import prepare_tokens
from pipeline.tokens.dataset import TokenDataset
from shards.errors import UsageError


def content(folder: Path) -> dict[str, str]:
    """Hash of every file below a folder, by relative name."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_processes_that_ask_at_the_same_time_share_one_run(
    tmp_path: Path,
    sentence_corpus: CorpusConfig,
    bpe_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The lock is per open file, so threads stand for processes here."""
    build, built = stage1._build, []

    def counted(*arguments: object) -> TokenDataset:
        built.append(1)
        return build(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(stage1, "_build", counted)
    with ThreadPoolExecutor(3) as pool:
        asked = [
            pool.submit(prepare_tokens, sentence_corpus, bpe_tokenizer, tmp_path) for _ in range(3)
        ]
        assert len({one.result().fingerprint for one in asked}) == 1
    assert len(built) == 1


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("packing", ["concat", "wrap", "pad"])
@pytest.mark.parametrize("num_batches", [1, 4, 9, 12])
def test_an_interrupted_stage_goes_on_to_the_same_bytes(
    tmp_path: Path,
    sentence_corpus: CorpusConfig,
    bpe_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    packing: str,
    num_batches: int,
) -> None:
    corpus = CorpusConfig(**{**vars(sentence_corpus), "packing": packing})
    whole = prepare_tokens(corpus, bpe_tokenizer, tmp_path / "whole")
    encoded = stage1.encoded
    read: list[int] = []

    def count(*arguments: object) -> Iterator[object]:
        for number, (batch, ids) in enumerate(encoded(*arguments)):  # type: ignore[arg-type]
            if len(read) == num_batches:
                raise KeyboardInterrupt
            read.append(number)
            yield batch, ids

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(stage1, "encoded", count)
        prepare_tokens(corpus, bpe_tokenizer, tmp_path / "run")
    assert not (tmp_path / "run/tokens").exists()
    with pytest.raises(UsageError, match="no finished token data set"):
        TokenDataset.open(tmp_path / "run/tokens")
    resumed = prepare_tokens(corpus, bpe_tokenizer, tmp_path / "run")
    assert content(resumed.path) == content(whole.path)


KILLED = """
import os, signal, sys
from pathlib import Path
from pipeline.tokens import build as stage1
from pipeline.tokens import tokenizer as tokenization
from pipeline.tokens import dataset as token_writer
from pipeline.corpus.config import CorpusConfig
token_writer.PART_TOKENS, tokenization.BATCH_DOCUMENTS = 800, 40
save = stage1._save
def save_and_die(*arguments):
    save(*arguments)
    if len(arguments[2].parts["train"]) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
stage1._save = save_and_die
config = CorpusConfig(
    "text:" + sys.argv[1], document_separator="line", row_length=16, validation_documents=50
)
stage1.prepare_tokens(config, sys.argv[2], Path(sys.argv[3]))
"""


def test_a_killed_process_loses_no_finished_part(
    tmp_path: Path,
    sentence_corpus: CorpusConfig,
    bpe_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_writer, "PART_TOKENS", 800)
    monkeypatch.setattr(tokenization, "BATCH_DOCUMENTS", 40)
    bpe_tokenizer.save_pretrained(tmp_path / "tokenizer")
    source = sentence_corpus.source.removeprefix("text:")
    command = [sys.executable, "-c", KILLED, source, str(tmp_path / "tokenizer"), str(tmp_path)]
    assert subprocess.run(command, capture_output=True).returncode == -9
    parts = sorted((tmp_path / ".tokens.partial/train").glob("part-*.parquet"))
    written = {path.name: path.stat().st_mtime_ns for path in parts}
    assert len(written) == 3 and not (tmp_path / "tokens").exists()
    (tmp_path / ".tokens.partial" / f".journal.json.{'0' * 32}.tmp").write_text("killed while")
    resumed = prepare_tokens(sentence_corpus, tmp_path / "tokenizer", tmp_path)
    kept = {name: (resumed.path / "train" / name).stat().st_mtime_ns for name in written}
    assert kept == written
    whole = prepare_tokens(sentence_corpus, tmp_path / "tokenizer", tmp_path / "whole")
    assert content(resumed.path) == content(whole.path)


@pytest.mark.usefixtures("small_parts")
def test_an_interrupted_stage_of_other_settings_is_refused(
    tmp_path: Path,
    sentence_corpus: CorpusConfig,
    bpe_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(stage1, "_finish", fail)
        prepare_tokens(sentence_corpus, bpe_tokenizer, tmp_path / "run")
    changed = CorpusConfig(**{**vars(sentence_corpus), "row_length": 8})
    with pytest.raises(UsageError, match=r"row_length.*remove .*tokens\.partial"):
        prepare_tokens(changed, bpe_tokenizer, tmp_path / "run")
