"""Stage 1: documents -> rows of token ids, as a Parquet data set with a fingerprint.

In come a corpus and the teacher's tokenizer, out comes the folder ``tokens/``: parts of rows, the
tokenizer's files and a record of what was tokenized, how, and what was dropped. An interrupted run
goes on where it was; rows of another corpus, setting or tokenizer are refused by name.
"""
