"""Stage 2: token rows -> teacher -> codec -> shards of the store.

In come rows (of the corpus, or written by the teacher) and a store open for writing; out go whole
shards, each claimed, scored, encoded and written by one of any number of processes, which compute
alike (:mod:`pipeline.extract.manifest`) and resume where the ledger ends.
"""
