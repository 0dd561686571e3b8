"""``gdistill-shards``: look at stores, check them, and make new ones from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from shards.atomic import require_writable, write_bytes_atomic
from shards.codec.protocol import make_codec
from shards.console import command_app, progress_bar, run_command
from shards.errors import IntegrityError, UsageError, visible
from shards.settings import parse_override
from shards.store.location import open_location
from shards.store.store import ShardStore
from shards.store.verification import Description, verify
from shards.store.verification import forget as forget_shards

app = command_app(
    no_args_is_help=True, help="Look at stores of Gumbel posteriors, check them, make new ones from them."
)
Store = Annotated[str, typer.Argument(help="A store: folder or URL.")]


@app.command()
def info(store: Store, as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False) -> None:
    """What a store is, from which teacher and corpus, how large and how complete."""
    opened = ShardStore.find(store, allow_incomplete=True)
    description = Description.of(opened)
    typer.echo(json.dumps(description.to_json(), indent=2) if as_json else description_text(description))


def description_text(found: Description) -> str:
    """A store's figures in a few aligned lines."""
    manifest, per_token = found.store.manifest, found.bytes_per_token
    splits, corpus = manifest.splits, manifest.tokens.get("corpus")
    corpus = corpus.get("source", corpus) if isinstance(corpus, dict) else corpus
    fingerprint = str(manifest.tokens.get("fingerprint", "unknown"))[:12]
    parameters = ", ".join(f"{name}={value}" for name, value in manifest.codec["parameters"].items())
    done = f"{found.num_finished} of {found.num_shards} shards, {found.num_tokens:,} tokens"
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
        "bytes": f"{found.num_bytes:,}",
    }
    if per_token:
        dense = found.fp16_vector_bytes_per_token
        ratio = f"{dense / per_token:,.1f} x this store"
        lines["bytes/token"] = f"{per_token:.1f}; fp16 vectors {dense:,}: {ratio}"
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
        remedy = "run the command that wrote the store again" if forget else "each line above says what to do"
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
    out: Annotated[str, typer.Option("--out", help="Where the new store goes: folder or URL.")],
    codec: Annotated[str, typer.Option(help="seeded, topk, quantized or full.")],
    overrides: Annotated[list[str] | None, typer.Option("--set", help="Codec parameter, key=value.")] = None,
) -> None:
    """Turn stored distributions into one frozen draw of them. Resumes when interrupted."""
    from shards.tools.conversion import convert as run

    source = ShardStore.find(store)
    parameters = {".".join(path): value for path, value in map(parse_override, overrides or [])}
    target = make_codec(codec, **parameters)
    if f"{open_location(out).url}/".startswith(f"{source.location.url}/"):
        raise UsageError("a store cannot lie in its own source", where="--out", got=out)
    with progress_bar("convert", sum(source.manifest.splits.values()) * source.manifest.row_length) as bar:
        writer = run(source, out, target, bar)
    if not writer.is_complete():
        what, remedy = "shards are held by another process", "run the same again when it ends"
        raise IntegrityError(what, where=out, remedy=remedy)
    typer.echo(description_text(Description.of(ShardStore.open(out))))


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


def main() -> None:
    """Entry point."""
    run_command(app)


if __name__ == "__main__":
    main()
