"""Imitate fused_deep_moe(): dispatch, experts and combine in one call, by two operators."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor

from fakes.ascend.deep_ep import exchange
from fakes.ascend.deep_ep.config import FuseMode, settings
from fakes.ascend.deep_ep.dispatch_ffn_combine import DISPATCH_FFN_COMBINE
from fakes.ascend.deep_ep.fused_call import NAME, Experts, FusedCall, FusedOperator
from fakes.ascend.deep_ep.fused_deep_moe import FUSED_DEEP_MOE
from fakes.ascend.int8 import quantize_rows
from fakes.ascend.limits import require

OPERATORS: Mapping[int, FusedOperator] = MappingProxyType(
    {
        FuseMode.FUSED_DEEP_MOE: FUSED_DEEP_MOE,
        FuseMode.DISPATCH_FFN_COMBINE: DISPATCH_FFN_COMBINE,
    }
)


def fused_moe(
    group: dist.ProcessGroup,
    call: FusedCall,
    fuse_mode: int,
    quant_mode: int,
    operators: Mapping[int, FusedOperator] = OPERATORS,
) -> tuple[Tensor, Tensor]:
    """Compute y, bfloat16 [T, H], and the counts of the operator; collective.

    operators: by fuse_mode.

    A row of zeros has undefined codes and the scale 0, so its results are zeros (in mode 2 unless
    these codes overflow float16); other tokens are not affected.

    Raises:
        RuntimeError: on all ranks or on none.
    """

    def check() -> Sequence[int]:
        settings()
        modes = {int(mode) for mode in operators}
        require(NAME, fuse_mode in modes, f"fuse_mode is one of {modes}, got {fuse_mode}")
        # quant_mode has no effect; 0 does not mean that nothing is quantised.
        require(NAME, quant_mode in (0, 1), f"quant_mode is 0 or 1, got {quant_mode}")
        operator = operators[fuse_mode]
        operator.check(call)
        shared_limit = 0 if operator.limits_rows else call.limit
        sizes = (call.x.shape[1], call.ids.shape[1], call.w13.shape[2], call.num_experts)
        return [fuse_mode, *sizes, shared_limit]

    exchange.agree(group, NAME, check)
    operator, ids = operators[fuse_mode], call.ids.long()
    codes, scales = quantize_rows(call.x, operator.profile)
    pairs = exchange.pairs_of(ids, call.num_experts)
    received = exchange.send(group, pairs, codes[pairs.tokens], scales[pairs.tokens])
    if operator.limits_rows:
        _agree_on_capacity(group, received.rows.shape[0], call.limit)
    rows = _through_experts(operator.experts(call), received)
    y = exchange.combine(group, NAME, rows, received.counts, ids, call.weights)
    return y, operator.counts(received.counts)


def _agree_on_capacity(group: dist.ProcessGroup, num_rows: int, max_rows: int) -> None:
    """Raise on all ranks if there are more rows than the limit; the device drops them silently."""

    def check() -> Sequence[int]:
        rule = (
            f"{num_rows} rows received, max_output_size (num_max_dispatch_tokens_per_rank with "
            f"fuse_mode 2) is {max_rows}; pass tokens of a rank * ranks * K"
        )
        require(NAME, num_rows <= max_rows, rule)
        return []

    exchange.agree(group, NAME, check)


def _through_experts(experts: Experts, received: exchange.Received) -> Tensor:
    """Compute the experts of the received rows, bfloat16 [N, H]."""
    assert received.scales is not None, "INT8 rows have scales"
    sizes = received.per_expert().tolist()
    parts = zip(received.rows.split(sizes), received.scales.split(sizes), strict=True)
    outputs = []
    for expert, (codes, scales) in enumerate(parts):
        outputs.append(experts.output(expert, experts.hidden(expert, codes, scales)))
    return torch.cat(outputs)
