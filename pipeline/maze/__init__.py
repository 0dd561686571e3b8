"""The built-in corpus: all ways through a small grid, and a teacher trained on them on the spot.

In comes a layout (a name or a file), out come the enumerated paths, documents drawn from them, a
tokenizer, and an ordinary causal language model of transformers that has learnt their distribution.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from pipeline.maze.layout import (
        MOVES,
        NUM_TRAINING_DOCUMENTS,
        NUM_VALIDATION_DOCUMENTS,
        Maze,
        draw_documents,
        load_maze,
    )
    from pipeline.maze.teacher import MazeTeacherConfig, demo_teacher_config, train_maze_teacher

__getattr__, __dir__ = open_door(__name__, __file__)
