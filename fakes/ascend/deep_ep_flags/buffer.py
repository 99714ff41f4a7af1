"""Imitate Buffer with its newer signatures: each call becomes one of the older Buffer."""

from collections.abc import Callable
from enum import IntEnum
from typing import cast

import torch
from torch import Tensor

from epcomm.config import environment
from fakes.ascend.deep_ep import buffer as older
from fakes.ascend.deep_ep import low_latency
from fakes.ascend.deep_ep.buffer import (
    Config,
    DispatchResult,
    EventOverlap,
    LowLatencyStrategy,
    NormalStrategy,
    XTensors,
)
from fakes.ascend.deep_ep.fused import OPERATORS, fused_moe
from fakes.ascend.deep_ep.fused_call import FusedCall
from fakes.ascend.deep_ep.quant_mode import BF16, INT8
from fakes.ascend.deep_ep_flags.mega_moe import MEGA_MOE
from fakes.ascend.limits import Soc, current_machine, require, require_modelled

__all__ = ["Buffer", "Config", "EventOverlap", "FuseMode", "LowLatencyStrategy", "NormalStrategy"]

Tensors = Tensor | list[Tensor]
_FUSED = "fused_deep_moe"


class FuseMode(IntEnum):
    """The operator that fused_deep_moe() calls."""

    FUSED_DEEP_MOE = 1
    DISPATCH_FFN_COMBINE = 2
    MEGA_MOE = 3


_OPERATORS = {**OPERATORS, FuseMode.MEGA_MOE: MEGA_MOE}


class Buffer(older.Buffer):
    """The calls that changed."""

    FuseMode = FuseMode

    def dispatch(  # type: ignore[override]
        self,
        x: XTensors,
        handle: tuple[Tensor, ...] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = False,
        use_mxfp4: bool = False,
        use_mxfp8: bool = False,
    ) -> DispatchResult:
        """Send rows to their experts; without a flag the environment may quantise."""
        # The other arguments have no effect.
        return super().dispatch(
            x,
            handle,
            num_tokens_per_rank,
            is_token_in_rank=is_token_in_rank,
            num_tokens_per_expert=num_tokens_per_expert,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            num_worst_tokens=num_worst_tokens,
            quant_mode=_mode_of(use_fp8, use_mxfp4, use_mxfp8),
        )

    def low_latency_dispatch(  # type: ignore[override]
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        topk_weights: Tensor | None = None,
        use_mxfp4: bool = False,
        use_mxfp8: bool = False,
    ) -> tuple[XTensors, Tensor, low_latency.Handle, EventOverlap, Callable[[], None]]:
        """Send rows to their experts; without a flag the environment may quantise."""
        return super().low_latency_dispatch(
            x,
            topk_idx,
            num_max_dispatch_tokens_per_rank,
            num_experts,
            cumulative_local_expert_recv_stats,
            use_fp8=use_fp8,
            topk_weights=topk_weights,
            quant_mode=_mode_of(use_fp8, use_mxfp4, use_mxfp8 or (use_fp8 and use_ue8m0)),
        )

    def fused_deep_moe(  # type: ignore[override]
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        gmm1_permuted_weight: Tensors,
        gmm1_permuted_weight_scale: Tensors | None,
        gmm2_weight: Tensors,
        gmm2_weight_scale: Tensors | None,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        quant_mode: int = 1,
        fuse_mode: FuseMode = FuseMode.FUSED_DEEP_MOE,
        activation: str | None = "swiglu",
        beta: float | None = 4.0,
        linear_beta: float | None = 25.0,
        profile_enable: bool = False,
        *,
        l1_bias: Tensors | None = None,
        l2_bias: Tensors | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Dispatch, W8A8 experts with swiglu and combine; see the older Buffer.

        In mode 3 weights and scales are lists with a tensor for each local expert.
        """
        require_modelled(_FUSED, activation == "swiglu", f"activation={activation!r}")
        require_modelled(_FUSED, l1_bias is None and l2_bias is None, "l1_bias and l2_bias")
        is_listed = fuse_mode == FuseMode.MEGA_MOE
        given = (gmm1_permuted_weight, gmm1_permuted_weight_scale, gmm2_weight, gmm2_weight_scale)
        fits = all(isinstance(each, list if is_listed else Tensor) for each in given)
        form = "lists of tensors of experts" if is_listed else "tensors"
        require(_FUSED, fits, f"weights and scales are {form} with fuse_mode {fuse_mode}")
        w13, s13, w2, s2 = (
            torch.stack(each) if isinstance(each, list) else cast(Tensor, each) for each in given
        )
        call = FusedCall(
            x=x,
            ids=topk_idx,
            weights=topk_weights,
            w13=w13,
            s13=s13,
            w2=w2,
            s2=s2,
            limit=num_max_dispatch_tokens_per_rank,
            num_experts=num_experts,
            num_ranks=self.group_size,
        )
        return fused_moe(self.group, call, fuse_mode, quant_mode, _OPERATORS)


def _mode_of(use_fp8: bool, use_mxfp4: bool, use_mxfp8: bool) -> str:
    """Return the mode of the flags on this chip, or that of the environment.

    Raises:
        NotImplementedError: MX rows on a chip without them.
    """
    if use_mxfp4 or use_mxfp8:
        if current_machine().soc is not Soc.A5:
            raise NotImplementedError("use_mxfp4 and use_mxfp8 exist only on A5")
        return "mx_fp4_e2m1" if use_mxfp4 else "mx_fp8_e4m3"
    if use_fp8:
        return "pertoken_fp8_e4m3" if current_machine().soc is Soc.A5 else INT8
    return INT8 if environment().get("DEEP_NORMAL_MODE_USE_INT8_QUANT") == "1" else BF16
