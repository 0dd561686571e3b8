"""Corpus -> tokens -> teacher -> shards.

Stage 1 makes token rows of any text, stage 2 asks the teacher once about every token and stores
what students learn from. ``gdistill-extract`` runs both; each resumes.
"""

import os

# Before torch is imported. Threads that spin at a barrier take the core from the thread that
# encodes: with another process on the machine, a small teacher's forward pass took 15 times longer.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# As many threads as asked for, whatever the machine: bits of a matrix product depend on them.
os.environ.setdefault("MKL_DYNAMIC", "FALSE")
