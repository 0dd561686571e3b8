"""``gdistill-shards``: look at stores, check them, and make new ones from them."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from shards.atomic import require_writable, write_bytes_atomic
from shards.codec.registry import make_codec
from shards.console import command_app, progress_bar, run_command
from shards.errors import IntegrityError, UsageError, visible
from shards.settings import parse_override
from shards.store.location import open_location
from shards.store.manifest import LEDGER, ShardRange
from shards.store.store import Description, ShardStore
from shards.store.verification import forget as forget_shards
from shards.store.verification import verify
from shards.store.writer import ShardWriter
from shards.stream.stream import LaneOrder, Order, WholeOrder, lanes_for

app = command_app(
    no_args_is_help=True, help="Look at stores of Gumbel posteriors, check them, make new ones from them."
)
Store = Annotated[str, typer.Argument(help="A store: folder or URL.")]
Out = Annotated[str, typer.Option("--out", help="Where the new store goes: folder or URL.")]


SHOWN_BATCH = 512
"""Rows of the global batch that ``info`` tells of what shuffling costs for: the paper's."""
MOST_SHARDS_OF_RATE = 64


@app.command()
def info(store: Store, as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False) -> None:
    """What a store is, from which teacher and corpus, how large and how complete."""
    opened = ShardStore.find(store, allow_incomplete=True)
    description, costs = Description.of(opened), {}
    for split in (split for split, rows in opened.manifest.splits.items() if rows):
        of = opened.split(split, [])
        costs[split] = shuffling_of(of.num_rows, of.rows_per_chunk, of.chunk_bytes, SHOWN_BATCH)
    left = opened.unfinished()
    pace = pace_of(opened, left) if left else None
    if as_json:
        figures = {split: cost._asdict() for split, cost in costs.items()}
        told = {**description.to_json(), "pace": pace, "shuffling": figures}
        typer.echo(json.dumps(told, indent=2))
        return
    typer.echo(description_text(description, pace))
    if costs:
        most = max(costs.values())
        typer.echo(
            f"{'shuffling':<12} {most.window_bytes:,} bytes of decoded chunks and"
            f" {most.batch_bytes:,} a batch of {SHOWN_BATCH} rows in memory, over all ranks;"
            f" {100 * most.shared_rows:.0f}% of its rows are of a chunk already met in it"
        )


class Shuffling(NamedTuple):
    """What shuffling a split costs, over all ranks, and how well it mixes.

    Attributes:
        window_bytes: Decoded chunks in memory.
        batch_bytes: A global batch beside them; as many again for each that is read ahead.
        shared_rows: Share of a batch's rows that come from a chunk already met in it.
    """

    window_bytes: int
    batch_bytes: int
    shared_rows: float


def shuffling_of(num_rows: int, per_chunk: int, chunk_bytes: int, batch_size: int) -> Shuffling:
    """Cost and mixing, the latter of eight batches spread over epoch 0.

    Args:
        num_rows: Of the split.
        per_chunk: Rows of an inner chunk.
        chunk_bytes: Decoded bytes of one.
        batch_size: Rows of a global batch.
    """
    batch_size = min(batch_size, num_rows)
    num_chunks = -(-num_rows // per_chunk)
    lanes = lanes_for(num_chunks, chunk_bytes, batch_size)
    kind = LaneOrder if lanes else WholeOrder
    order: Order = kind(num_rows, per_chunk, 0, 0, *([lanes] if lanes else []))
    starts = np.linspace(0, num_rows - batch_size, 8).astype(np.int64)
    batches = (order.locate(start + np.arange(batch_size))[0] // per_chunk for start in starts)
    shared = float(np.mean([1 - len(np.unique(chunks)) / batch_size for chunks in batches]))
    row_bytes = chunk_bytes // per_chunk
    return Shuffling((lanes or num_chunks) * chunk_bytes, batch_size * row_bytes, shared)


def pace_of(store: ShardStore, left: Sequence[ShardRange]) -> dict[str, float | int | None]:
    """How fast a store that is not complete grows, by the times of its ledger's files.

    Returns:
        ``tokens_per_second`` of the newest shards, at most 64, until now: of all processes
        together, and falling while nobody works; None before the second shard. ``num_shards``:
        how many shards that is measured over, and ``seconds``: in what time. ``eta_seconds``: what
        the tokens left take at that rate. ``seconds_since_shard``: age of the last finished
        shard; None where no time is known. ``num_claimed``: unfinished shards that a process
        holds, or held when it was killed.
    """
    times = store.location.written_at(LEDGER)
    finished = set(store.manifest.all_shards()) - set(left)
    known = [shard for shard in finished if shard.record_file in times]
    ordered = sorted((times[shard.record_file], shard.num_rows) for shard in known)
    newest = ordered[-MOST_SHARDS_OF_RATE - 1 :]
    now, length, rate = time.time(), store.manifest.row_length, None
    seconds = now - newest[0][0] if newest else 0.0
    if len(newest) > 1 and seconds > 0:
        rate = sum(rows for _, rows in newest[1:]) * length / seconds
    claims = set(store.location.claims())
    return {
        "tokens_per_second": rate,
        "num_shards": max(0, len(newest) - 1),
        "seconds": seconds,
        "eta_seconds": sum(shard.num_rows for shard in left) * length / rate if rate else None,
        "seconds_since_shard": max(0.0, now - newest[-1][0]) if newest else None,
        "num_claimed": sum(shard.claim_name in claims for shard in left),
    }


def _pace_text(pace: Mapping[str, float | int | None]) -> str:
    def duration(name: str) -> str:
        return str(timedelta(seconds=round(pace[name] or 0)))

    parts = [f"{pace['num_claimed']} shards in work"]
    if pace["seconds_since_shard"] is not None:
        parts.append(f"last one finished {duration('seconds_since_shard')} ago")
    if pace["tokens_per_second"] and pace["eta_seconds"] is not None:
        over = f"{pace['num_shards']} shards in {duration('seconds')}"
        parts.append(f"{pace['tokens_per_second']:,.0f} tok/s ({over})")
        parts.append(f"{duration('eta_seconds')} left")
    return ", ".join(parts)


def description_text(found: Description, pace: Mapping[str, float | int | None] | None = None) -> str:
    """A store's figures in a few aligned lines."""
    manifest, per_token = found.store.manifest, found.bytes_per_token
    splits, corpus = manifest.splits, manifest.tokens.get("corpus")
    corpus = corpus.get("source", corpus) if isinstance(corpus, dict) else corpus
    fingerprint = str(manifest.tokens.get("fingerprint", "unknown"))[:12]
    parameters = ", ".join(
        f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in manifest.codec.get("parameters", {}).items()
    )
    done = f"{found.num_finished} of {found.num_shards} shards, {found.num_tokens:,} tokens"
    if pace:
        share = found.num_tokens / (sum(splits.values()) * manifest.row_length)
        done += f" ({100 * share:.1f}%)"
    rows = ", ".join(f"{name} {rows:,}" for name, rows in splits.items())
    lines = {
        "store": found.store.location.url,
        "identity": manifest.sha256[:16],
        "codec": f"{manifest.codec['name']} {parameters}",
        "noise": "a fresh draw at every visit" if found.store.codec.is_fresh else "one draw",
        "teacher": _named(manifest.teacher, "weights_sha256"),
        "tokenizer": f"{_named(manifest.tokenizer, 'sha256')}, V = {manifest.vocab_size:,}",
        "corpus": f"{corpus} (fingerprint {fingerprint})",
        "rows": f"{rows} of {manifest.row_length} tokens",
        "complete": done,
        **({} if pace is None else {"running": _pace_text(pace)}),
        "bytes": f"{found.num_bytes:,}",
    }
    if per_token:
        dense = found.fp16_vector_bytes_per_token
        ratio = f"{dense / per_token:,.1f} x this store"
        lines["bytes/token"] = f"{per_token:.1f}; fp16 vectors {dense:,}: {ratio}"
    if found.is_before_tails:
        lines["checks"] = "written before tails: each shard is hashed whole when first read"
    # Whoever made the store chose the words: none of them may end a line or steer a terminal.
    return "\n".join(f"{name:<12} {visible(text)}" for name, text in lines.items())


def _named(part: Any, hash_name: str) -> str:
    text = str(part.get("id", "unknown"))
    return f"{text} (sha256 {str(part[hash_name])[:12]})" if hash_name in part else text


@app.command(name="verify")
def verify_command(
    store: Store,
    forget: Annotated[
        bool,
        typer.Option(
            "--forget",
            help="Count bad shards as unfinished, so that the command that wrote the store writes"
            " them anew; until then the store is incomplete.",
        ),
    ] = False,
) -> None:
    """Hash every byte again; name every bad file and what to run. Exit code 1 if any is bad."""
    place = ShardStore.find(store, allow_incomplete=True)
    with progress_bar("verify", sum(place.location.sizes().values()), unit="B") as bar:
        problems = verify(place.location, bar.advance)
    for problem in problems:
        typer.echo(str(problem))
    for shard in forget_shards(place.location, problems) if forget else []:
        typer.echo(f"forgotten: {shard}")
    if problems:
        remedy = "each line above says what to do"
        if forget:
            remedy = "run the command that wrote the store again"
        got = f"{len(problems)} problems"
        raise IntegrityError("the store is not sound", where=store, got=got, remedy=remedy)
    typer.echo(f"sound: {Description.of(place).num_finished} shards, every hash as recorded")


@app.command()
def show(
    store: Store,
    row: Annotated[int, typer.Option(help="Row of the split, from 0.")] = 0,
    split: Annotated[str, typer.Option(help="Split.")] = "train",
    draw: Annotated[int, typer.Option(help="Which draw, for codecs that draw anew.")] = 0,
    out: Annotated[Path, typer.Option(help="What to write: a page, .html, and its picture, .png, beside it.")] = Path(
        "row.html"
    ),
) -> None:
    """One row made visible: each token's probability, its noise and rank, the alternatives."""
    from shards.tools.row_view import row_figure, row_page, view_row

    source = ShardStore.find(store, allow_incomplete=True)
    # A page and a picture of one stem, whichever of the two was named.
    stem = out.with_suffix("") if out.suffix in (".html", ".htm", ".png") else out
    if not stem.name or stem.with_name(f"{stem.name}.html").is_dir():
        raise UsageError("no file name", where="--out", got=out, expected="such as row.html")
    page, picture = stem.with_name(f"{stem.name}.html"), stem.with_name(f"{stem.name}.png")
    require_writable(page.parent)
    first, views = view_row(source, split, row, draw)
    title = f"{split} row {row} of {store}"
    figure = row_figure(views, title)
    write_bytes_atomic(picture, figure)
    write_bytes_atomic(page, row_page(first, views, title, figure).encode())
    typer.echo(f"wrote {page} and {picture}")


@app.command()
def convert(
    store: Store,
    out: Out,
    codec: Annotated[str, typer.Option(help="seeded, topk, quantized or full.")],
    overrides: Annotated[list[str] | None, typer.Option("--set", help="Codec parameter, key=value.")] = None,
) -> None:
    """Turn stored distributions into one frozen draw of them. Resumes when interrupted."""
    from shards.tools.rewriting import convert as run

    source = ShardStore.find(store)
    parameters = {".".join(path): value for path, value in map(parse_override, overrides or [])}
    target = make_codec(codec, **parameters)
    _require_other(source, out)
    with progress_bar("convert", _num_tokens(source)) as bar:
        writer = run(source, out, target, bar)
    _finish(writer, out)


@app.command()
def subset(
    store: Store,
    out: Out,
    rows: Annotated[int | None, typer.Option(help="First rows of train to keep (all).")] = None,
    validation_rows: Annotated[
        int | None, typer.Option(help="First rows of validation to keep (all); 0 drops it.")
    ] = None,
    splits: Annotated[str | None, typer.Option(help="Splits to keep (all), with commas between.")] = None,
) -> None:
    """Keep the first rows: a row's number names its noise, so rows keep their places."""
    from shards.tools.rewriting import subset as run

    source = ShardStore.find(store)
    kept = dict(source.manifest.splits)
    if splits is not None:
        for name in splits.split(","):
            if name not in kept:
                expected = ", ".join(kept)
                raise UsageError("no such split", where="--splits", got=name, expected=expected)
        kept = {name: num_rows for name, num_rows in kept.items() if name in splits.split(",")}
    wanted = {"train": (rows, "--rows"), "validation": (validation_rows, "--validation-rows")}
    for name, (num_rows, option) in wanted.items():
        if num_rows is not None:
            if name not in kept:
                what, expected = "rows of a split that is not kept", ", ".join(kept)
                raise UsageError(what, where=option, got=name, expected=expected)
            kept[name] = num_rows
    kept = {name: num_rows for name, num_rows in kept.items() if num_rows}
    if not kept:
        raise UsageError("there would be no rows left", where="subset")
    _require_other(source, out)
    with progress_bar("subset", sum(kept.values()) * source.manifest.row_length) as bar:
        writer = run(source, out, kept, bar)
    _finish(writer, out)


@app.command()
def merge(stores: Annotated[list[str], typer.Argument(help="Stores of one extraction.")], out: Out) -> None:
    """Gather the finished shards of several stores of one identity into one, byte for byte."""
    from shards.tools.rewriting import merge as run

    opened = [ShardStore.find(store, allow_incomplete=True) for store in stores]
    for source in opened:
        _require_other(source, out)
    with progress_bar("merge", _num_tokens(opened[0])) as bar:
        writer, missing = run(opened, out, bar)
    if missing:
        got = f"{len(missing)} shards in none of the stores, the first is {missing[0]}"
        remedy = "finish the extraction, or merge again with the store that has them"
        raise IntegrityError("the merged store is not complete", where=out, got=got, remedy=remedy)
    _finish(writer, out)


@app.command()
def push(
    store: Store,
    to: Annotated[str, typer.Argument(help="hf://datasets/OWNER/NAME")],
    license: Annotated[
        str | None, typer.Option(help="For the card, as the hub names licences: apache-2.0, ...")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="If the data set is made.")] = False,
) -> None:
    """Put a finished store on the hub with a card, in one commit; hf:// is read like a folder."""
    from shards.tools.hub import push as run

    typer.echo(run(ShardStore.find(store), to, license=license, private=private))


def _num_tokens(store: ShardStore) -> int:
    return sum(store.manifest.splits.values()) * store.manifest.row_length


def _require_other(source: ShardStore, out: str) -> None:
    if source.location.url == open_location(out).url:
        raise UsageError("a store cannot be its own source", where="--out", got=out)


def _finish(writer: ShardWriter, out: str) -> None:
    if not writer.is_complete():
        what, remedy = "shards are held by another process", "run the same again when it ends"
        raise IntegrityError(what, where=out, remedy=remedy)
    typer.echo(description_text(Description.of(ShardStore.open(out))))


def main() -> None:
    """Entry point."""
    run_command(app)


if __name__ == "__main__":
    main()
