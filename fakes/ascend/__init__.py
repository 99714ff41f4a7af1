"""Imitate the Ascend operators that epcomm calls, in plain torch behind the vendor's schemas.

`register()` (registry.py) defines torch.ops.npu.* and implements it for CPU tensors; `soc("A3")`
(limits.py) selects the chip of a call, and thereby its limits. The arithmetic is that of the
operators' documentation; none of it was compared with a chip. Memory that an operator leaves
unwritten is NaN, or arbitrary integers (undefined.py).
"""
