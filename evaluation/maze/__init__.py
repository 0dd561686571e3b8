"""The paper's maze: paths that can be checked, enumerated and compared with an exact optimum.

In: ``maze.json`` of a corpus and sampled moves. Out: success, coverage and distance to the true
distribution of paths as scores. ``walk`` runs everything from the corpus to the page with the
project's own commands (``python -m evaluation.maze.walk``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shards.base.door import open_door

if TYPE_CHECKING:
    from evaluation.maze.jobs import Job, run_jobs, run_visibly
    from evaluation.maze.results import load_task, natural_rule, pool, score_samples, teacher_rows
    from evaluation.maze.success import Maze, maze_success, moves_of_words
    from evaluation.maze.walk import TrainingProgress

__getattr__, __dir__ = open_door(__name__, __file__)
