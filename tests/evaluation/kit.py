"""The command called in this process, the files that it reads and writes, and rows of a chain."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from typer.testing import CliRunner

from evaluation.cli import app
from evaluation.text.reading import JudgeModel
from pipeline.tokens.dataset import FIELDS, FORMAT_VERSION, PartWriter

Told = Callable[[], str]
"""What a command has said on the standard error since the last call."""


def evaluate(*words: object) -> str:
    """What ``gdistill-eval`` says; what it raises is raised."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    if done.exception:
        raise done.exception
    return done.output


def one_line(error: str, case: str = "") -> str:
    """A refusal as a person sees it."""
    assert error.startswith("error: ") and error.count("\n") == 1, (case, error[:500])
    assert len(error) < 1500 and error[:-1].isprintable(), case
    return error


def write_lines(file: Path, *records: object) -> Path:
    """A JSON object a line, or a text as it stands."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = (record if isinstance(record, str) else json.dumps(record) for record in records)
    file.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return file


def results(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "results.json").read_text())


def scores_by_name(part: dict[str, Any]) -> dict[str, Any]:
    return {score["name"]: score for score in part["scores"]}


class Page(HTMLParser):
    """A page as a browser sees it: rows of its tables, and every tag with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.in_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.in_cell = True

    def handle_endtag(self, tag: str) -> None:
        self.in_cell = False

    def handle_data(self, data: str) -> None:
        if self.in_cell:
            self.rows[-1][-1] += data


def nll_nats(judge: JudgeModel, ids: Tensor) -> Tensor:
    """Of every token of one pass but the first."""
    log_probs = judge.model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
    return -log_probs.gather(-1, ids[1:, None])[:, 0]


def markov_text(num: int, length: int, seed: int, vocab_size: int = 40) -> np.ndarray:
    """Rows of one chain in which each token has four likely successors."""
    chain = np.random.default_rng(0).dirichlet(np.full(vocab_size, 0.1), size=vocab_size)
    generator = np.random.default_rng(seed)
    rows = generator.integers(vocab_size, size=(num, length))
    for place in range(1, length):
        shares = chain[rows[:, place - 1]].cumsum(1)
        rows[:, place] = (shares < generator.random((num, 1))).sum(1).clip(0, vocab_size - 1)
    return rows


def write_tokens(home: Path, splits: dict[str, np.ndarray], **facts: Any) -> Path:
    """A run's folder with the ``tokens`` of stage 1."""
    record: dict[str, Any] = {**dict.fromkeys(FIELDS), "fingerprint": "f", "corpus": {}, **facts}
    record |= {"format_version": FORMAT_VERSION, "splits": {}}
    for split, rows in splits.items():
        record["row_length"] = rows.shape[1]
        writer = PartWriter(home / "tokens" / split, rows.shape[1])
        writer.write(rows.astype(np.int32))
        record["splits"][split] = {"parts": [asdict(part) for part in (writer.close(),) if part]}
    (home / "tokens" / "tokens.json").write_text(json.dumps(record))
    return home
