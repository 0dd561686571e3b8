"""One stored row made visible: the teacher's view of each token, the noise that chose it."""

from __future__ import annotations

import base64
import io
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from jinja2 import Template

from shards.errors import UsageError, visible
from shards.language_model.loading import find_tokenizer
from shards.noise.gumbel import KeyedPosterior
from shards.store.store import ShardStore
from shards.tools.conversion import stored_noise

NUM_ALTERNATIVES = 4
POSITIONS_IN_FIGURE = 64


@dataclass(frozen=True)
class Alternative:
    """Another token that could have stood there; probability None where only a draw is stored."""

    text: str
    probability: float | None
    gumbel: float


@dataclass(frozen=True)
class TokenView:
    """One position of the row.

    Attributes:
        probability: The teacher's probability of the token.
        gumbel: xi of the token.
        gumbel_rank: How many vocabulary entries have at least this xi (1: the largest).
        alternatives: The most probable other tokens; those of largest xi where a draw is stored.
    """

    position: int
    text: str
    probability: float
    gumbel: float
    gumbel_rank: int
    alternatives: tuple[Alternative, ...]


def view_row(store: ShardStore, split: str, row: int, draw: int = 0) -> tuple[str, list[TokenView]]:
    """The row's first token and what is known of every other one.

    Args:
        draw: Which draw, where the codec draws anew at every visit.

    Raises:
        UsageError: If there is no such row.
    """
    reader = store.split(split)
    if not 0 <= row < reader.num_rows:
        expected = f"0 to {reader.num_rows - 1}"
        raise UsageError("no such row", where=f"split {split}", got=row, expected=expected)
    if draw < 0:
        raise UsageError("no such draw", where="--draw", got=draw, expected="0 or more")
    arrays = reader.read_rows(row, row + 1)
    noise = stored_noise(store, split, row, arrays, draw)
    words = words_of(store)
    gumbels = noise.gumbels()
    probabilities = None
    if isinstance(noise, KeyedPosterior):
        probabilities = noise.probabilities.tile(0, store.manifest.vocab_size)
    # The most probable by the teacher; by the noise where the distribution is not stored.
    order = gumbels if probabilities is None else probabilities
    best = order.topk(min(NUM_ALTERNATIVES + 1, order.shape[1])).indices.tolist()
    own_probabilities = torch.tensor(arrays["token_log_probs"][0, 1:]).exp().tolist()

    def alternative(index: int, token: int) -> Alternative:
        p = None if probabilities is None else float(probabilities[index, token])
        return Alternative(words(token), p, float(gumbels[index, token]))

    views = []
    for index, own in enumerate(arrays["tokens"][0, 1:].tolist()):
        if "counted" in arrays and not arrays["counted"][0, index + 1]:
            continue  # of a prompt: it has no noise
        others = [token for token in best[index] if token != own][:NUM_ALTERNATIVES]
        gumbel = gumbels[index, own]
        rank = int((gumbels[index] >= gumbel).sum())
        alternatives = tuple(alternative(index, token) for token in others)
        probability = own_probabilities[index]
        views.append(TokenView(index + 1, words(own), probability, float(gumbel), rank, alternatives))
    return words(int(arrays["tokens"][0, 0])), views


def words_of(store: ShardStore) -> Callable[[int], str]:
    """Token ids as text, by the tokenizer that the store carries; ``#ID`` without one."""
    with TemporaryDirectory() as folder:
        if not store.copy_files("tokenizer", Path(folder)):
            return lambda token: f"#{token}"
        tokenizer = find_tokenizer(folder, "store", where=f"{store.location.url}/tokenizer")

    def text(token: int) -> str:
        piece = tokenizer.convert_ids_to_tokens(token) or f"#{token}"
        text = tokenizer.convert_tokens_to_string([piece]).strip()
        return f"␣{text}" if piece[:1] in ("▁", "Ġ") else text or json.dumps(piece)[1:-1]

    return text


def row_figure(views: list[TokenView], title: str) -> bytes:
    """PNG: for each of the first positions p of the token, and its xi among the alternatives'."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = views[:POSITIONS_IN_FIGURE]
    figure = Figure(figsize=(max(6.0, 0.27 * len(shown) + 1.5), 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True)
    places = range(len(shown))
    top.bar(places, [view.probability for view in shown], color="#4c78a8")
    top.set(ylabel="teacher's probability", ylim=(0, 1))
    top.set_title(visible(title), parse_math=False)  # $ is a dollar, here and below
    for place, view in zip(places, shown, strict=True):
        others = [other.gumbel for other in view.alternatives]
        bottom.scatter([place] * len(others), others, s=9, color="#bbbbbb")
    bottom.scatter(places, [view.gumbel for view in shown], s=26, color="#e45756", zorder=3)
    bottom.set(ylabel="noise xi (grey: alternatives')")
    words = [visible(view.text) for view in shown]
    bottom.set_xticks(list(places), words, rotation=90, fontsize=8, parse_math=False)
    for axes in (top, bottom):
        axes.grid(axis="y", color="#eeeeee")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.01)
    buffer = io.BytesIO()
    with warnings.catch_warnings():  # a script that no font here has is drawn as boxes
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()


PAGE = Path(__file__).with_name("row.html")


def row_page(first: str, views: list[TokenView], title: str, figure: bytes) -> str:
    """A self-contained HTML page of the row."""
    template = Template(PAGE.read_text(encoding="utf-8"), autoescape=True)
    return template.render(first=first, views=views, title=title, picture=base64.b64encode(figure).decode())
