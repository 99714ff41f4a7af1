"""Imitate the operators of torch_npu that epcomm calls, in plain torch."""
