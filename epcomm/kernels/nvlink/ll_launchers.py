"""The launchers of low latency over NVLink, for buffers that import this module once.

An import in every call takes 1 us, and plans read the buffers on machines without Triton.
"""

from epcomm.kernels.nvlink.ll_combine_recv import receive_combine
from epcomm.kernels.nvlink.ll_combine_send import begin_again, send_combine
from epcomm.kernels.nvlink.ll_dispatch_recv import receive_dispatch, release_buffer
from epcomm.kernels.nvlink.ll_dispatch_send import send_dispatch

__all__ = [
    "begin_again",
    "receive_combine",
    "receive_dispatch",
    "release_buffer",
    "send_combine",
    "send_dispatch",
]
