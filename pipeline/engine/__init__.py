"""Teachers that run elsewhere: an inference engine's log-probabilities become posterior stores.

Comes in: files of scored rows (Parquet, JSONL), or the address of an OpenAI-compatible server.
Goes out: checked rows, and the arrays that the ``posterior`` codec keeps of them.
An engine never gives the whole distribution; what it leaves out is the codec's tail.
"""
