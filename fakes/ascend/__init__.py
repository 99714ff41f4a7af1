"""Imitate the Ascend operators that epcomm calls, in plain torch behind the vendor's schemas.

`register()` (registry.py) defines torch.ops.npu.* and implements it for CPU tensors; `soc("A3")`
(limits.py) says which chip a call runs on, and so what it refuses. The arithmetic is that of the
operators' documentation; none of it was compared with a chip. Memory that an operator leaves
unwritten comes back as NaN or nonsense (undefined.py).
"""
