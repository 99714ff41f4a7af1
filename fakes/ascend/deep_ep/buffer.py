"""Imitate Buffer, the calls of the deep_ep of Ascend, with its signatures."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from fakes.ascend.deep_ep import low_latency, normal
from fakes.ascend.deep_ep.config import (
    Config,
    FuseMode,
    LowLatencyStrategy,
    NormalStrategy,
    strategies,
)
from fakes.ascend.deep_ep.event import EventOverlap, no_hook
from fakes.ascend.deep_ep.fused import fused_moe
from fakes.ascend.deep_ep.fused_call import FusedCall
from fakes.ascend.deep_ep.quant_mode import INT8, checked, low_latency_mode
from fakes.ascend.limits import current_machine, require, require_modelled
from fakes.ascend.undefined import undefined

__all__ = ["Buffer", "Config", "EventOverlap", "FuseMode", "LowLatencyStrategy", "NormalStrategy"]

XTensors = Tensor | tuple[Tensor, Tensor]
DispatchResult = tuple[
    XTensors, Tensor | None, Tensor | None, list[int], tuple[Tensor, ...], EventOverlap
]

_ONE_HOST = "the ranks of the stand-in are on one host: internode operators are not reachable"


class Buffer:
    """Normal, low-latency and fused calls over the ranks of a gloo process group.

    Sizes of memory are ignored, because the memory is the HCCL window, whose size is set in the
    environment. Events, hooks, streams, zero_copy and out are accepted and ignored: all work is
    done when a call returns. All calls except static methods and get_dispatch_layout() are
    collective, and raise on all ranks or none.
    """

    num_sms: int = 20

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 12,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        normal_strategy: str | NormalStrategy = NormalStrategy.DEFAULT,
        low_latency_strategy: str | LowLatencyStrategy = LowLatencyStrategy.DEFAULT,
    ) -> None:
        del num_qps_per_rank, allow_nvlink_for_low_latency_mode, allow_mnnvl
        # A chip is chosen before there is a buffer.
        current_machine()
        self.rank = group.rank()
        self.group_size = group.size()
        self.group = group
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        chosen = strategies(normal_strategy, low_latency_strategy)
        self.normal_strategy, self.low_latency_strategy = chosen
        # State that get_dispatch_layout() sets for the next dispatch(), as on the real buffer.
        self._layout: normal.Layout | None = None
        dist.barrier(group=group)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Return a Config, which is ignored wherever it is passed."""
        return Config(num_ranks)

    get_combine_config = get_dispatch_config

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Set the number for all buffers of the process; it is not read."""
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """Return an event that does nothing."""
        return EventOverlap()

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Return an arbitrary number, because the memory is the HCCL window."""
        return 0

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """Tokens per rank, None, tokens per expert, is_token_in_rank, all int32; and an event.

        The next dispatch() uses state that this call sets on the buffer, so it precedes each
        dispatch.
        """
        layout = normal.layout_of(self.group, topk_idx, num_experts, self.normal_strategy)
        self._layout = layout
        return layout.per_rank, None, layout.per_expert, layout.is_in_rank, EventOverlap()

    def get_notify_send_data(self) -> Tensor:
        """Return an internal value of the operators, which is not set here."""
        return undefined([1], torch.int32)

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Do nothing."""

    def dispatch(
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
        quant_mode: str | None = None,
    ) -> DispatchResult:
        """Send rows to their experts: one row for each (token, expert), ready for the GEMM.

        Returns:
            Rows by (local expert, source, token), with scales [N] as a pair in INT8; ids and
            weights that are not written; rows per local expert, not aligned, as sums with
            MOE_EXPERT_TOKEN_NUMS_TYPE=0; handle; event. There is at least one row, even if none was
            received.
        """
        name = normal.DISPATCH
        if handle is not None:
            raise NotImplementedError(f"{name}: a cached handle is not supported")
        require_modelled(name, isinstance(x, Tensor), "x with scales")
        require_modelled(name, num_worst_tokens == 0, f"num_worst_tokens={num_worst_tokens}")
        assert isinstance(x, Tensor), "refused above"
        mode = normal.quant_mode_of(quant_mode, self.normal_strategy)
        layout, self._layout = self._layout, None
        require(name, layout is not None, "get_dispatch_layout() comes before each dispatch")
        assert layout is not None, "refused above"
        has_one_expert = layout.num_experts == self.group_size
        if self.normal_strategy is NormalStrategy.ALLTOALL and mode == INT8 and has_one_expert:
            # The real package fails in this way: with one local expert it does not sort, and sets
            # no scales.
            raise UnboundLocalError("dynamic_scale_after_routing")
        assert topk_idx is not None
        assert topk_weights is not None
        sent = normal.Sent(x=x, ids=topk_idx, weights=topk_weights, mode=mode)
        given = (num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert)
        arrived = normal.dispatch(self.group, sent, layout, given)
        recv_x = arrived.x if arrived.scales is None else (arrived.x, arrived.scales)
        results = recv_x, arrived.ids, arrived.weights, arrived.counts, arrived.handle
        return *results, EventOverlap()

    def notify_verify(
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
    ) -> tuple[Tensor, ...]:
        """Fail: only the tests of the real package call this, and the imitation lacks it."""
        raise NotImplementedError("deep_ep.Buffer.notify_verify is not modelled")

    def combine(
        self,
        x: Tensor,
        handle: tuple[Tensor, ...],
        topk_weights: Tensor | None = None,
        bias: XTensors | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        combine_send_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Return the sum of rows times the weights of the dispatch; topk_weights is not read."""
        require_modelled(normal.COMBINE, bias is None, "bias")
        return normal.combine(self.group, x, handle), None, EventOverlap()

    def internode_dispatch(
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
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> DispatchResult:
        """Fail: the imitation has only one host."""
        raise RuntimeError(f"internode_dispatch: {_ONE_HOST}")

    def internode_combine(
        self,
        x: Tensor,
        handle: tuple[Tensor, ...] | list[Tensor],
        topk_weights: Tensor | None = None,
        bias: XTensors | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Fail: the imitation has only one host."""
        raise RuntimeError(f"internode_combine: {_ONE_HOST}")

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        use_mxfp4: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        topk_weights: Tensor | None = None,
        quant_mode: str | None = None,
    ) -> tuple[XTensors, Tensor, low_latency.Handle, EventOverlap, Callable[[], None]]:
        """Send rows to their experts; INT8 with use_fp8, which is the default.

        Returns:
            Rows [A, H], packed by (local expert, source, token), with scales [A] as a pair in INT8;
            rows per local expert, int64, as sums with MOE_EXPERT_TOKEN_NUMS_TYPE=0; handle; event;
            hook. Both do nothing.
        """
        name = low_latency.DISPATCH
        require(name, self.low_latency_mode, "the buffer has low_latency_mode")
        has_stats = cumulative_local_expert_recv_stats is not None
        require_modelled(name, not has_stats, "cumulative_local_expert_recv_stats")
        flags = {"use_fp8": use_fp8, "use_ue8m0": use_ue8m0, "use_mxfp4": use_mxfp4}
        mode = checked(name, low_latency_mode(quant_mode, **flags))
        is_pair = mode == INT8
        if self.low_latency_strategy is LowLatencyStrategy.OPS:
            require(name, topk_weights is not None, "the ops strategy needs topk_weights")
            # The package reads only the flag, regardless of the rows.
            is_pair = use_fp8
        sizes = low_latency.Sizes(
            max_tokens=num_max_dispatch_tokens_per_rank, num_experts=num_experts, mode=mode
        )
        arrived = low_latency.dispatch(self.group, x, topk_idx, sizes)
        recv_x = (arrived.x, arrived.scales) if is_pair else arrived.x
        return recv_x, arrived.count, arrived.handle, EventOverlap(), no_hook

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: low_latency.Handle,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
    ) -> tuple[Tensor, EventOverlap, Callable[[], None]]:
        """Return the sum of rows [A, H] times topk_weights in new memory; `out` is not written."""
        require(low_latency.COMBINE, self.low_latency_mode, "the buffer has low_latency_mode")
        combined = low_latency.combine(self.group, x, topk_idx, topk_weights, handle)
        return combined, EventOverlap(), no_hook

    def begin_profile(
        self,
        num_profile_skip_launches: int,
        num_profile_active_launches: int,
        profile_trace_dir: str | None = "",
    ) -> None:
        """Return nothing, because there is no profile of a CPU."""

    def end_profile(self) -> None:
        """Do nothing."""

    def fused_deep_moe(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        gmm1_permuted_weight: Tensor,
        gmm1_permuted_weight_scale: Tensor,
        gmm2_weight: Tensor,
        gmm2_weight_scale: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        quant_mode: int = 1,
        fuse_mode: FuseMode = FuseMode.FUSED_DEEP_MOE,
        profile_enable: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Dispatch, W8A8 experts and combine on A3; the arguments depend on fuse_mode.

        Args:
            x: [T, H], bfloat16, T >= 1: a rank without tokens passes a dummy one.
            topk_idx: [T, K], int64, the ids of a row all different, no -1.
            topk_weights: [T, K], float32.
            gmm1_permuted_weight: int8 [L, H, 2I]. Mode 1: NZ, 64 columns of gate and 64 of up in
                turn. Mode 2: ND or NZ, gate first.
            gmm1_permuted_weight_scale: mode 1: float32 [L, 2I], in the same order; mode 2: int64
                [L * 2I], the bits of float32.
            gmm2_weight: int8. Mode 1: [L, H, I], NZ; mode 2: [L, I, H], ND or NZ.
            gmm2_weight_scale: mode 1: float32 [L, H]; mode 2: int64 [L * H].
            num_max_dispatch_tokens_per_rank: mode 1: T at most, the same on all ranks; mode 2:
                max_output_size, the rows that this rank may receive. The device silently drops
                further rows; the imitation raises on all ranks.
            quant_mode: 0 or 1, of no effect.
            profile_enable: ignored.

        Returns:
            y [T, H], bfloat16, already summed over the ranks; rows received, int32: mode 1
            [L * W], by (local expert, source); mode 2 [L].
        """
        call = FusedCall(
            x=x,
            ids=topk_idx,
            weights=topk_weights,
            w13=gmm1_permuted_weight,
            s13=gmm1_permuted_weight_scale,
            w2=gmm2_weight,
            s2=gmm2_weight_scale,
            limit=num_max_dispatch_tokens_per_rank,
            num_experts=num_experts,
            num_ranks=self.group_size,
        )
        return fused_moe(self.group, call, fuse_mode, quant_mode)
