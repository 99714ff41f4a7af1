"""Send all tokens to every rank, and sum the results by a reduce-scatter: torch's collectives.

Rows are numbered by expert, by source rank and token within it. Every entry of topk_ids is an
expert: -1 is not supported.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from epcomm.bench.contenders.base import INT_BYTES, Contender, Grouped
from epcomm.buffers.traffic import BufferTraffic
from epcomm.ops.slots import count_experts, index_slots, pack, reduce_rows, slots_by_row
from epcomm.quantization import arrange_scales, quantizer_for
from epcomm.records import Handle, RowsDispatchOutput
from epcomm.runners.base import ExpertRunner
from epcomm.testing.data import RankBatch
from epcomm.types import Layout, RowReading, WeightsAppliedBy, WireFormat, WireTensor
from epcomm.weights.unquantized import ExpertTensors

# torch 2.13 renamed these; 2.11 has only the old names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Router weights are float32.
_WEIGHT_BYTES = 4


class AllGather(Contender[RowsDispatchOutput]):
    """The contender that gathers all tokens on all ranks, and reduce-scatters their sums."""

    name = backend = "all_gather"

    def __init__(
        self,
        num_experts: int,
        runner: ExpertRunner | None = None,
        experts: ExpertTensors | None = None,
        num_slots: int | None = None,
    ) -> None:
        """Divide the experts of all ranks, num_experts, among them in order.

        runner, experts: of this rank, for rows that the runner reads; None: in their own dtype.
        num_slots: limit of the slots of a rank, so that the host reads nothing; None: exact.
        """
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._num_experts, self._num_slots = num_experts, num_slots
        self._reading: RowReading | None = None
        self._expert_alignment = 1 if runner is None else runner.expert_alignment
        if runner is not None and experts is not None and experts.wire_format.dtype.is_quantized:
            readings = runner.readings(experts, Layout.ROWS)
            self._reading = next(each for each in readings if each.format == experts.wire_format)
        # One rounding on this rank, and one for each addition of the reduce-scatter.
        self.num_roundings = self._world_size

    def dispatch(self, batch: RankBatch) -> RowsDispatchOutput:
        """Gather tokens and routing, and number the pairs of this rank's experts.

        Collective: yes, with the same T.   Host sync: once, for counts; none with num_slots.
        """
        ids, num_local = self._gathered(batch.topk_ids), self._num_experts // self._world_size
        first_expert = self._rank * num_local
        counts = count_experts(ids, self._num_experts)[first_expert : first_expert + num_local]
        index, slot_weights = index_slots(
            ids.int(),
            self._gathered(batch.topk_weights),
            counts,
            self._num_slots or counts.tolist(),
            first_expert=first_expert,
            expert_alignment=self._expert_alignment,
        )
        return RowsDispatchOutput(
            hidden_states=self._gather_rows(batch.x),
            index=index,
            slot_weights=slot_weights,
            weights_applied_by=WeightsAppliedBy.COMBINE,
            handle=Handle(owner=self, num_tokens=batch.x.shape[0]),
        )

    def _gather_rows(self, x: Tensor) -> WireTensor:
        if self._reading is None:
            return WireTensor(data=self._gathered(x), format=WireFormat.of(x.dtype))
        rows, layout = quantizer_for(x.device)(x, self._reading.format), self._reading.scale_layout
        assert rows.scales is not None, "quantised rows have scales"
        return WireTensor(
            data=self._gathered(rows.data),
            format=rows.format,
            scales=arrange_scales(self._gathered(rows.scales), layout),
            scale_layout=layout,
        )

    def group(self, dispatched: RowsDispatchOutput) -> Grouped:
        return Grouped(
            rows=pack(dispatched.hidden_states.data, dispatched.index),
            num_rows_per_expert=dispatched.num_tokens_per_expert,
            first_row=dispatched.index.first_slot[:-1],
        )

    def combine(self, results: Tensor, dispatched: RowsDispatchOutput) -> Tensor:
        """Sum this rank's results for each token, then those of all ranks.

        The sums of a rank are float32 and cast once; the sum over ranks is made in the dtype of the
        results, because the bytes that it sends limit this alternative.

        Collective: yes.   Host sync: none.
        """
        sums = reduce_rows(results, slots_by_row(dispatched.index), dispatched.slot_weights)
        y = sums.new_empty(sums.shape[0] // self._world_size, sums.shape[1])
        reduce_scatter(y, sums)
        return y

    def sent_bytes(self, batch: RankBatch) -> BufferTraffic:
        """Count W - 1 blocks per rank, as a ring or a direct exchange sends them."""
        num_tokens = (self._world_size - 1) * batch.x.shape[0]
        row_bytes = batch.x.shape[1] * batch.x.element_size()
        routing_bytes = batch.topk_ids.shape[1] * (INT_BYTES + _WEIGHT_BYTES)
        return BufferTraffic(
            dispatch_bytes=num_tokens * (row_bytes + routing_bytes),
            combine_bytes=num_tokens * row_bytes,
        )

    def _gathered(self, tensor: Tensor) -> Tensor:
        """Gather the tensors [N, ...] of all ranks into [W * N, ...]."""
        # Collectives have no 8-bit floats.
        sent = tensor.contiguous().view(torch.uint8)
        found = sent.new_empty(self._world_size * sent.shape[0], *sent.shape[1:])
        all_gather(found, sent)
        return found.view(tensor.dtype)
