"""Causal language models that others trained: a teacher, a judge of samples, a verifier.

In comes a folder or a hub id; out comes a network in evaluation mode that is what it says: every
weight there, each position seeing earlier tokens only, context length and vocabulary told from any
configuration. What cannot be so is refused before it scores a token, and code that lies beside a
model runs only where the user asked for it.
"""
