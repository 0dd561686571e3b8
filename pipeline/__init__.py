"""Corpus -> tokens -> teacher -> shards."""

import os

# Before torch is imported. Threads that spin at a barrier take the core from the thread that
# encodes: with another process on the machine, a small teacher's forward pass took 15 times longer.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
