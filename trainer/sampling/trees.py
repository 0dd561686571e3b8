"""Trees of drafts: one pass of a language model reads several continuations of a row side by side."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import nlargest
from operator import itemgetter

import torch
from jaxtyping import Float, Int
from torch import Tensor

from trainer.sampling.verifier import CausalReader
from trainer.students.drafter import attention_mask


class Tree:
    """Drafts of a row, each behind the token that it follows; number 0 is the row's last known token.

    The search for drafts is a matter of a few numbers a row: lists, of which a tensor would cost more.

    Attributes:
        tokens: By number.
        lines: By number, the numbers from 0 to it, itself included.
        scores: By number, the log-probability that the row goes on along its line.
        numbers: Of a parent's number and a token, the number of that token behind it.
        tips: Numbers that the search goes on from.
    """

    def __init__(self, last: int) -> None:
        self.tokens, self.lines, self.scores, self.tips = [last], [[0]], [0.0], [0]
        self.numbers: dict[tuple[int, int], int] = {}

    def add(self, token: int, parent: int, score: float = 0.0) -> None:
        """Another draft, behind its parent."""
        number = self.numbers[parent, token] = len(self.tokens)
        self.lines.append([*self.lines[parent], number])
        self.tokens.append(token)
        self.scores.append(score)

    @property
    def depth(self) -> int:
        """Drafts on the longest line."""
        return max(map(len, self.lines)) - 1

    def grow(self, scores: list[list[float]], tokens: list[list[int]], width: int) -> None:
        """Add the ``width`` most probable of the tokens that may follow the tips; they are the new tips.

        Args:
            scores: For each tip, log-probabilities of tokens behind it.
            tokens: The tokens.
        """
        found: list[tuple[float, int, int]] = []
        for tip, log_probs, ids in zip(self.tips, scores, tokens, strict=False):  # others may have more tips
            found += [(self.scores[tip] + more, tip, token) for more, token in zip(log_probs, ids, strict=True)]
        count = len(self.tokens)
        for score, parent, token in nlargest(width, found, key=itemgetter(0)):
            self.add(token, parent, score)
        self.tips = list(range(count, len(self.tokens)))

    def stop(self, size: int, floor: float) -> None:
        """Leave the tips behind which nothing can be among the ``size`` best drafts above ``floor``."""
        if len(self.scores) > size:
            floor = max(floor, nlargest(size, self.scores[1:])[-1])
        self.tips = [tip for tip in self.tips if self.scores[tip] > floor]

    def cut(self, size: int, floor: float) -> Tree:
        """The tree of the ``size`` most probable drafts, of those above a log-probability."""
        # A parent is at least as probable as its children and stands before them.
        best = sorted(range(1, len(self.tokens)), key=self.scores.__getitem__, reverse=True)[:size]
        tree, number = Tree(self.tokens[0]), {0: 0}
        for old in sorted(old for old in best if self.scores[old] > floor):
            number[old] = len(tree.tokens)
            tree.add(self.tokens[old], number[self.lines[old][-2]], self.scores[old])
        return tree


class TreeReader(CausalReader):
    """Next-token logits of B growing rows, and hidden states of trees of drafts behind them.

    Attributes:
        num_read: Tokens of a tree of which nobody has said yet what is kept.
        positions: [B, n] of the tokens of the trees that were read last.
    """

    num_read = 0

    @torch.no_grad()
    def read_trees(self, trees: list[Tree], first: Int[Tensor, "b"]) -> Float[Tensor, "b n d"]:
        """Hidden states behind the tokens of each row's tree, by number; smaller trees are filled up.

        Args:
            trees: Number 0 of each is the row's last known token.
            first: [B] the position behind it.
        """
        self.num_passes += 1
        self.num_read = size = max(len(tree.tokens) for tree in trees)
        tokens, depths, behind = [], [], []
        for tree in trees:
            missing = size - len(tree.tokens)
            tokens.append(tree.tokens + [0] * missing)
            depths.append([len(line) - 1 for line in tree.lines] + [0] * missing)
            behind.append(flags(tree.lines, size) + [[True] * size] * missing)
        seen = torch.tensor(behind, device=first.device)
        seen = torch.cat((self.known()[:, None].expand(-1, size, -1), seen), dim=-1)
        self.positions = torch.tensor(depths, device=first.device) + (first[:, None] - 1)
        return self.model.base_model(
            input_ids=torch.tensor(tokens, device=first.device),
            position_ids=self.positions,
            attention_mask=attention_mask(self.model, seen),
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state

    def follow(self, paths: list[list[int]]) -> None:
        """Of the trees that were read last, keep the numbers of a path each."""
        lengths = self.lengths.tolist()
        width, most = max(lengths), max(old + len(path) for old, path in zip(lengths, paths, strict=True))
        source = []
        for old, path in zip(lengths, paths, strict=True):
            kept = [*range(width - old, width), *(width + number for number in path)]
            source.append([-1] * (most - len(kept)) + kept)
        self._take(torch.tensor(source, device=self.lengths.device), width + self.num_read)
        self.lengths = self.lengths + torch.tensor([*map(len, paths)], device=self.lengths.device)
        self.num_read = 0


def flags(lines: Iterable[Iterable[int]], size: int) -> list[list[bool]]:
    """Which of ``size`` numbers are on each line."""
    rows = []
    for line in lines:
        rows.append([False] * size)
        for number in line:
            rows[-1][number] = True
    return rows
