"""Stage 1: documents -> rows of token ids, as a Parquet data set with a fingerprint."""
