"""Which drafter saves the most passes of a target at temperature 1, and how much is the noise."""
