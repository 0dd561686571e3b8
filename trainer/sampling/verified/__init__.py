"""Samplers that go from left to right as far as a second model, the verifier, agrees.

In come a student, which drafts many tokens in one pass, and a causal language model of the same
tokenizer, which reads the draft in one pass (``verifier``). ``adaptive`` (APD) mixes the two
models; ``coupled`` keeps exactly what the verifier would have drawn from the same noise. Out go
samples with the passes of both models and how much of each draft was kept.
"""
