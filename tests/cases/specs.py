from dataclasses import replace

import torch

from epcomm.spec import BufferSpec
from epcomm.types import WireFormat

BF16 = WireFormat.of(torch.bfloat16)


def buffer_spec(
    hidden_size: int,
    top_k: int,
    num_local_experts: int,
    max_tokens_per_rank: int | None = None,
    *,
    rows: WireFormat = BF16,
    **changes: object,
) -> BufferSpec:
    spec = BufferSpec(
        hidden_size=hidden_size,
        top_k=top_k,
        num_local_experts=num_local_experts,
        dispatch_format=rows,
        hidden_format=rows,
        max_tokens_per_rank=max_tokens_per_rank,
    )
    return replace(spec, **changes)
