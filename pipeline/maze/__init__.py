"""DOOR: pipeline.maze."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from pipeline.maze.layout import (
        NUM_TRAINING_DOCUMENTS,
        NUM_VALIDATION_DOCUMENTS,
        Maze,
        draw_documents,
        load_maze,
    )
    from pipeline.maze.teacher import MazeTeacherConfig, demo_teacher_config, train_maze_teacher

__getattr__, __dir__ = open_door(__name__, __file__)
