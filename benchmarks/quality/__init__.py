"""The quality bench: recipes of one store side by side, at equal shape, steps and tokens.

``python -m benchmarks.quality benchmarks/quality/maze.toml`` extracts, trains, samples and scores
what the TOML file lists, resumes where it was stopped, and writes a table, a figure and all
numbers into benchmarks/results.
"""
