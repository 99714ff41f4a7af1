"""The launchers of the kernels of normal mode, imported once a buffer and not in every call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class NormalKernels:
    """The launchers that a buffer calls; plans read this folder on machines without Triton."""

    can_dispatch_cpp: Callable[..., bool]
    prepare_cpp: Callable[..., None]
    dispatch_rows: Callable[..., None]
    push_rows: Callable[..., None]
    index_rows: Callable[..., None]
    collect_rows: Callable[..., None]
    combine_rows: Callable[..., None]

    @classmethod
    def load(cls) -> NormalKernels:
        """Import the launchers. Local."""
        from epcomm.kernels.nvlink.dispatch_cuda import launch
        from epcomm.kernels.nvlink.normal_combine import combine_rows
        from epcomm.kernels.nvlink.normal_dispatch_copy_out import collect_rows
        from epcomm.kernels.nvlink.normal_dispatch_recv import index_rows
        from epcomm.kernels.nvlink.normal_dispatch_send import push_rows

        return cls(
            can_dispatch_cpp=launch.can_serve,
            prepare_cpp=launch.prepare,
            dispatch_rows=launch.dispatch_rows,
            push_rows=push_rows,
            index_rows=index_rows,
            collect_rows=collect_rows,
            combine_rows=combine_rows,
        )
