"""Codecs: what a store keeps of the teacher per token, and the noise that it becomes again.

full        xi, every entry, in half precision        one frozen draw       2 V bytes per token
quantized   xi, every entry, in 8 or 4 bits           one frozen draw       V or V / 2
topk        the k largest xi, the weight of the rest  one frozen draw       3 k; cut at sampling too
seeded      where xi differs from the generator's     one frozen draw       ~60 at eps = 0.01
posterior   the teacher's distribution, its head      fresh at every visit  ~110 (the default)
hidden      the teacher's last hidden state           fresh at every visit  its width

In come ``TeacherOutput`` records (or stored arrays), out go arrays [B, T, ...] (or ``Noise``). A
codec is one frozen dataclass, see protocol.py; others register by entry point, see registry.py.
"""
