"""Students and shared noise in vLLM: exact speculative decoding at any temperature.

``plugin`` makes the engine draw from one keyed stream of noise and keep drafts that equal its own
draw; ``drafters`` puts a student behind it; ``asgi`` gives requests without a seed one and says it;
``export`` writes what the engine loads by itself.
"""
