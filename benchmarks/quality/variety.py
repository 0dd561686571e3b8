"""What the entropy within a sample does not show: samples that are alike, tokens out of measure.

    gdistill-sample MODEL --num 64 .. --out samples/NAME
    python -m benchmarks.quality.variety --store out/quality/stories/store samples/*

A line per folder: distinct n-grams over all n-grams of all samples, and the divergence of the
samples' token frequencies from those of the store's validation rows. The last line is that of as
many validation rows. The first token, which every sample is given, does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.quality.stories import validation_rows
from evaluation.samples.samples import find_sample_files, read_samples
from evaluation.text.diversity import distinct_ngram_share
from shards.console import run_command
from shards.errors import UsageError
from shards.store.store import ShardStore

ORDERS = (2, 4, 8)
Sequences = Sequence[Sequence[int]]


def frequency_divergence_nats(samples: Sequences, corpus: Sequences, vocab_size: int) -> float:
    """KL(samples' token frequencies || corpus's), nats; the latter with half a token more of each.

    Above 0 for samples of the corpus too, the more the fewer they are: read it beside theirs.
    """
    ours, theirs = (
        np.bincount(np.concatenate([np.asarray(row) for row in rows]), minlength=vocab_size)
        for rows in (samples, corpus)
    )
    p, q = ours / ours.sum(), (theirs + 0.5) / (theirs + 0.5).sum()
    present = p > 0
    return float((p[present] * np.log(p[present] / q[present])).sum())


def line_of(name: str, samples: Sequences, corpus: Sequences, vocab_size: int) -> str:
    """A row of the table."""
    cells = [f"{distinct_ngram_share(samples, order):.2f}" for order in ORDERS]
    cells.append(f"{frequency_divergence_nats(samples, corpus, vocab_size):.3f}")
    return "| " + " | ".join((name, str(len(samples)), *cells)) + " |"


def variety(
    folders: Annotated[list[Path], typer.Argument(help="Folders of gdistill-sample.")],
    store: Annotated[Path, typer.Option(help="The store that the students were trained on.")],
) -> None:
    """Count and print."""
    rows = validation_rows(store)[:, 1:].tolist()
    vocab_size = ShardStore.open(store).manifest.vocab_size
    head = ["samples", "number", *(f"distinct {order}-grams" for order in ORDERS), "KL, nats"]
    typer.echo("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|")
    most = 0
    for file in (file for folder in folders for file in find_sample_files(folder)):
        tokens = [sample[1:] for sample in read_samples(file).tokens]
        if not all(tokens) or max(map(max, tokens)) >= vocab_size:
            expected = f"two tokens or more of its vocabulary of {vocab_size} in each"
            raise UsageError("not samples of this store's students", where=file, expected=expected)
        typer.echo(line_of(str(file), tokens, rows, vocab_size))
        most = max(most, len(tokens))
    typer.echo(line_of("validation rows", rows[:most], rows, vocab_size))


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(variety)
    run_command(app)
