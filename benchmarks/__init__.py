"""The benchmarks behind the tables of the README."""
