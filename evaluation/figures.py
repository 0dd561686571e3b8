"""One look for every figure: a palette that colour-blind people can read, and one way to a file.

The palette is Okabe and Ito's (https://jfly.uni-koeln.de/color/). Where a figure sets students with
noise beside students without it, the two roles have the same colours in every figure.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WITH_NOISE, WITHOUT_NOISE, TEACHER = "#0072B2", "#D55E00", "#4D4D4D"
"""Blue, vermilion, dark grey."""
PALETTE = (*(WITH_NOISE, WITHOUT_NOISE, "#009E73", "#CC79A7", "#E69F00", "#56B4E9"), *("#000000", "#8C6D31"))
"""Okabe and Ito's without their yellow, which is faint on white, and a brown: ``C0`` to ``C7``."""
LINE_STYLES, MARKERS = ("-", "--", "-.", ":"), "osD^vP*X"


def look(number: int) -> dict[str, Any]:
    """Colour, line and marker of the ``number``-th of many series; none of 32 look alike."""
    turn, place = divmod(number, len(PALETTE))
    style = LINE_STYLES[turn % len(LINE_STYLES)]
    marker = MARKERS[(place + turn) % len(MARKERS)]
    return {"color": PALETTE[place], "ls": style, "marker": marker}


@contextmanager
def figure_file(path: Path, num_rows: int = 1, num_columns: int = 1, **settings: Any) -> Iterator[tuple[Any, Any]]:
    """Axes to draw on; the figure is written when the block ends.

    >>> with figure_file(Path("speed.png"), size=(4, 3)) as (figure, panels):
    ...     _ = panels[0, 0].plot([1, 2], [3, 5])

    Args:
        path: Written whole; folders above it are made.
        num_rows: Rows of panels.
        num_columns: Columns of panels.
        **settings: ``size``, width and height in inches; else as ``Figure.subplots`` takes them.

    Yields:
        matplotlib's figure, and its axes as an array [num_rows, num_columns].
    """
    from cycler import cycler
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    style: Any = {
        "axes.prop_cycle": cycler(color=PALETTE),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
        "axes.labelsize": 9,
        "xtick.labelsize": 8,
        "ytick.labelsize": 8,
        "legend.fontsize": 8,
        "legend.frameon": False,
        "lines.linewidth": 1.2,
        "lines.markersize": 4,
    }
    with rc_context(style):
        size = settings.pop("size", (5.4 * num_columns, 4.2 * num_rows))
        figure = Figure(figsize=size, layout="constrained")
        yield figure, figure.subplots(num_rows, num_columns, squeeze=False, **settings)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
