"""Where documents come from: one file per kind of source, one protocol for all."""
