"""The paper's maze: paths that can be checked, enumerated and compared with an exact optimum.

In: ``maze.json`` of a corpus and sampled moves. Out: success, coverage and distance to the true
distribution of paths as scores. ``walk`` runs everything from the corpus to the page with the
project's own commands (``python -m evaluation.maze.walk``).
"""
