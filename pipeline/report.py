"""What every run shares, wherever its teacher is: a folder to write to, and its figures."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path

from pipeline.settings import ExtractRequest
from pipeline.summary import corpus_lines, store_figures, store_lines
from pipeline.tokens import TokenDataset
from shards.base import GdistillError, write_json_atomic
from shards.storage import file_claim
from shards.store import ShardStore, ShardWriter


def write_config(path: Path, request: ExtractRequest) -> None:
    """The resolved request beside its outputs; a file that says the same is left alone."""
    values = request.to_mapping()
    with contextlib.suppress(OSError, ValueError):
        if json.loads(path.read_text(encoding="utf-8")) == values:
            return
    write_json_atomic(path, values)


def report(
    request: ExtractRequest,
    dataset: TokenDataset,
    writer: ShardWriter,
    num_tokens: int,
    seconds: float,
) -> list[str]:
    """The store in numbers.

    Args:
        num_tokens: Those that this process extracted.
        seconds: The time that took it.

    Raises:
        GdistillError: If files of finished shards went missing meanwhile.
    """
    if not writer.is_complete():
        raise GdistillError(
            "finished shards went missing while the run was on",
            where=request.store,
            remedy="run the same command again",
        )
    figures = store_figures(ShardStore.open(request.store))
    if num_tokens:
        write_summary(request.out, figures, num_tokens, seconds)
    done = f"{num_tokens / seconds:,.0f} tokens/s" if num_tokens else "nothing was left to do"
    return [
        "corpus",
        *corpus_lines(dataset),
        f"store {request.store}",
        *store_lines(figures),
        f"  seconds        {seconds:.1f} ({done})",
    ]


def write_summary(
    out: Path, figures: Mapping[str, int | float], num_tokens: int, seconds: float
) -> None:
    """Keep the figures beside the store.

    All workers end at once; one that finds another at it leaves it to that one.
    """
    record = {
        **figures,
        "seconds": seconds,
        "num_tokens_of_this_process": num_tokens,
        "tokens_per_second": num_tokens / seconds,
    }
    with file_claim(out / ".summary.lock", wait=False) as mine:
        if mine:
            write_json_atomic(out / "summary.json", record)
