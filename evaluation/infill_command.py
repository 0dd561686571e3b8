"""``gdistill-eval rows``: rows of real text with open positions, to be filled and scored."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from evaluation.samples import make_infill_rows, read_data_rows, write_infill_rows


def rows(
    data: Annotated[Path, typer.Argument(help="Store or tokens/ folder of gdistill-extract.")],
    out: Annotated[Path, typer.Option(help="File for gdistill-sample --infill.")] = Path(
        "infill.jsonl"
    ),
    num: Annotated[int, typer.Option(help="Rows.")] = 300,
    masked: Annotated[int, typer.Option(help="Positions masked in each, uniformly.")] = 32,
    split: Annotated[str, typer.Option(help="Split of the data.")] = "validation",
    seed: Annotated[int, typer.Option(help="Of the positions.")] = 0,
) -> None:
    """Write rows to fill: 300 of the validation split with 32 positions masked, as in the paper."""
    made = make_infill_rows(read_data_rows(data, split, num), num, masked, seed)
    write_infill_rows(made, out)
    typer.echo(f"wrote {len(made)} rows to {out}; fill them with gdistill-sample --infill {out}")
