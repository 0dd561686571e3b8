"""The page: tables, figures and samples in one file that loads nothing from outside."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from evaluation.report.table import Table, markdown_text
from shards.base import UsageError, write_bytes_atomic, write_json_atomic

STYLE = """
:root{color-scheme:light dark;--text:#222;--quiet:#555;--faint:#777;--line:#ddd;--ours:#eef5fb;
--page:#fff;--accent:#0b5cad;--hot:214,39,40}
@media(prefers-color-scheme:dark){:root{--text:#e3e3e3;--quiet:#aaa;--faint:#999;--line:#3a3a3a;
--ours:#16283a;--page:#161616;--accent:#7db7f0;--hot:255,93,85}img.figure{background:#fff}}
*{box-sizing:border-box}
body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;
color:var(--text);background:var(--page)}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}a{color:var(--accent)}
div.wide{overflow-x:auto;max-width:100%}
table{border-collapse:collapse;margin:1rem 0;font-variant-numeric:tabular-nums}
td,th{padding:.3rem .7rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
td:first-child,th:first-child{text-align:left}
tr.ours td{background:var(--ours)}tr.paper td{color:var(--faint)}
img{max-width:100%;height:auto}p.note{color:var(--quiet);max-width:48rem}
p.caution{border-left:3px solid rgb(var(--hot));padding-left:.7rem;max-width:48rem}
@media(max-width:40rem){body{margin:1rem auto;font-size:14px}td,th{padding:.25rem .4rem}}
"""


def own_folder(directory: Path, name: str) -> Path:
    """A folder for more files inside ``directory``, which need not be there yet.

    Samples of somebody else may come with a link in its place: what is kept stays beside them.

    Raises:
        UsageError: For a link.
    """
    folder = directory / name
    if folder.is_symlink():
        raise UsageError(
            "a link where a folder of the results belongs",
            where=folder,
            got=folder.readlink(),
            remedy="remove it, or give another --out",
        )
    return folder


def write_report(
    directory: Path,
    *,
    title: str,
    summary: str,
    tables: Iterable[Table],
    results: dict[str, Any],
    figures: Iterable[tuple[str, Path]] = (),
    cautions: Iterable[str] = (),
    sections: Iterable[str] = (),
) -> Path:
    """Write ``results.json``, ``tables.md`` and ``report.html`` into ``directory``.

    Args:
        directory: Where to write.
        title: Heading of the page.
        summary: One paragraph in front.
        tables: Shown in order.
        figures: (caption, PNG file), behind the first table; embedded: the page stands alone.
        results: Every number, JSON-ready.
        cautions: Shown in front of everything.
        sections: Further HTML, escaped already, behind all.
    """
    tables = list(tables)
    write_json_atomic(directory / "results.json", results)
    markdown = "\n\n".join(
        "\n\n".join([f"### {table.title}", table.to_markdown(), *map(markdown_text, table.notes)])
        for table in tables
    )
    write_bytes_atomic(directory / "tables.md", markdown.encode() + b"\n")
    images = "".join(
        f'<h2>{html.escape(caption)}</h2><img class="figure" alt="{html.escape(caption)}" '
        f'src="data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}">'
        for caption, file in figures
    )
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style>"
        f"<h1>{html.escape(title)}</h1><p>{html.escape(summary)}</p>"
        + "".join(f'<p class="caution">{html.escape(caution)}</p>' for caution in cautions)
        + "".join(table.to_html() for table in tables[:1])
        + images
        + "".join(table.to_html() for table in tables[1:])
        + "".join(sections)
    )
    write_bytes_atomic(directory / "report.html", page.encode(errors="backslashreplace"))
    return directory / "report.html"
