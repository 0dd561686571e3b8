"""The built-in corpus: all ways through a small grid, and a teacher trained on them on the spot.

In comes a layout (a name or a file), out come the enumerated paths, documents drawn from them, a
tokenizer, and an ordinary causal language model of transformers that has learnt their distribution.
"""
