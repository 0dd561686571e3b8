"""``gdistill-shards``: look at stores, check them, and make new ones from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from shards.atomic import require_writable, write_bytes_atomic
from shards.codec.registry import make_codec
from shards.console import command_app, progress_bar, run_command
from shards.errors import IntegrityError, UsageError
from shards.settings import parse_override
from shards.store.location import open_location
from shards.store.store import ShardStore
from shards.store.verification import forget as forget_shards
from shards.store.verification import verify
from shards.store.writer import ShardWriter
from shards.stream.order import shuffling_of
from shards.tools.description import Description

app = command_app(
    no_args_is_help=True,
    help="Look at stores of Gumbel posteriors, check them, make new ones from them.",
)
Store = Annotated[str, typer.Argument(help="A store: folder or URL.")]
Out = Annotated[str, typer.Option("--out", help="Where the new store goes: folder or URL.")]


SHOWN_BATCH = 512
"""Rows of the global batch that ``info`` tells of what shuffling costs for: the paper's."""


@app.command()
def info(
    store: Store, as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False
) -> None:
    """What a store is, from which teacher and corpus, how large and how complete."""
    opened = ShardStore.find(store, allow_incomplete=True)
    description, costs = Description.of(opened), {}
    for split in (split for split, rows in opened.manifest.splits.items() if rows):
        of = opened.split(split, [])
        costs[split] = shuffling_of(of.num_rows, of.rows_per_chunk, of.chunk_bytes, SHOWN_BATCH)
    if as_json:
        figures = {split: cost._asdict() for split, cost in costs.items()}
        typer.echo(json.dumps({**description.to_json(), "shuffling": figures}, indent=2))
        return
    typer.echo(description.to_text())
    if costs:
        most = max(costs.values())
        typer.echo(
            f"{'shuffling':<12} {most.window_bytes:,} bytes of decoded chunks and"
            f" {most.batch_bytes:,} a batch of {SHOWN_BATCH} rows in memory, over all ranks;"
            f" {100 * most.shared_rows:.0f}% of its rows are of a chunk already met in it"
        )


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
    out: Annotated[
        Path, typer.Option(help="What to write: a page, .html, and its picture, .png, beside it.")
    ] = Path("row.html"),
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
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Codec parameter, key=value.")
    ] = None,
) -> None:
    """Turn stored distributions into one frozen draw of them. Resumes when interrupted."""
    from shards.tools.rewriting import convert as run
    from shards.tools.rewriting import require_convertible

    source = ShardStore.find(store)
    parameters = {".".join(path): value for path, value in map(parse_override, overrides or [])}
    target = make_codec(codec, **parameters)
    require_convertible(source.codec, target)
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
    splits: Annotated[
        str | None, typer.Option(help="Splits to keep (all), with commas between.")
    ] = None,
) -> None:
    """Keep the first rows: a row's number names its noise, so rows keep their places."""
    from shards.tools.rewriting import check_subset
    from shards.tools.rewriting import subset as run

    source = ShardStore.find(store)
    available, names = (
        source.manifest.splits,
        (splits or ",".join(source.manifest.splits)).split(","),
    )
    for name in names:
        if name not in available:
            expected = ", ".join(available)
            raise UsageError("no such split", where="--splits", got=name, expected=expected)
    kept = {name: available[name] for name in available if name in names}
    wanted = {"train": (rows, "--rows"), "validation": (validation_rows, "--validation-rows")}
    for name, (num_rows, option) in wanted.items():
        if num_rows is not None and name not in kept:
            what, expected = "rows of a split that is not kept", ", ".join(kept)
            raise UsageError(what, where=option, got=name, expected=expected)
        if num_rows is not None:
            kept[name] = num_rows
    kept = {name: num_rows for name, num_rows in kept.items() if num_rows}
    if not kept:
        raise UsageError("there would be no rows left", where="subset")
    check_subset(source, kept)
    _require_other(source, out)
    with progress_bar("subset", sum(kept.values()) * source.manifest.row_length) as bar:
        writer = run(source, out, kept, bar)
    _finish(writer, out)


@app.command()
def merge(
    stores: Annotated[list[str], typer.Argument(help="Stores of one extraction.")], out: Out
) -> None:
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


def _num_tokens(store: ShardStore) -> int:
    return sum(store.manifest.splits.values()) * store.manifest.row_length


def _require_other(source: ShardStore, out: str) -> None:
    if source.location.url == open_location(out).url:
        raise UsageError("a store cannot be its own source", where="--out", got=out)


def _finish(writer: ShardWriter, out: str) -> None:
    if not writer.is_complete():
        what, remedy = "shards are held by another process", "run the same again when it ends"
        raise IntegrityError(what, where=out, remedy=remedy)
    typer.echo(Description.of(ShardStore.open(out)).to_text())


def main() -> None:
    """Entry point."""
    run_command(app)


if __name__ == "__main__":
    main()
