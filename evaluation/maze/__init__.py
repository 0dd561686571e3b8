"""DOOR: evaluation.maze."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from evaluation.maze.success import Maze, maze_success, moves_of_words

__getattr__, __dir__ = open_door(__name__, __file__)
