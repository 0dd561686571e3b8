"""How far samples are from the text as a whole, at every setting of a sampler.

The entropy within a sample does not see samples that are all alike, and a sampler that keeps to
the likeliest tokens is paid for it in perplexity. The Fréchet distance between the states in which
a judge reads samples and text grows with both faults, poor text and little of it, so every student
is taken where its own is least, and compared there.
"""
