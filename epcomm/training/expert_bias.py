"""Balance the load of experts by the bias of their selection, without an auxiliary loss."""

import torch
from torch import Tensor

from epcomm.errors import ConfigError, ShapeError
from epcomm.group import EPGroup


@torch.no_grad()
def update_expert_bias(bias: Tensor, load: Tensor, group: EPGroup, *, rate: float = 1e-3) -> None:
    """Raise the bias of experts with less than the mean load of all ranks, and lower the others'.

    bias += rate * sign(mean(load) - load), with the load of all ranks. Call it once a step, between
    the optimizer's steps, with the counts since the last call: the table minus its values then.
    Only a table that no LoadRecorder reads may be zeroed instead.

    Args:
        bias: [E], floating point, equal on all ranks, which routing adds to scores for the
            selection; written in place. It should be float32: in bfloat16 small steps are lost.
        load: [E] or [N, E], integer, on the device of the group: how many tokens of this rank chose
            each logical expert, in any of N rows.
        group: the ranks whose tokens count.
        rate: the step, in units of the scores; DeepSeek-V3 trained with 1e-3.

    Collective: yes, one all-gather of E counts.   Host sync: as the transport.
    Deterministic: yes; equal on all ranks to the bit.
    Raises:
        ShapeError: other shapes or dtypes, on this rank, before the exchange.
        ConfigError: rate is not a finite number above 0, on this rank, before the exchange.
    Source: "Auxiliary-Loss-Free Load Balancing" (DeepSeek), as in Megatron's expert bias.
    """
    if bias.dim() != 1 or not bias.is_floating_point():
        raise ShapeError(
            f"update_expert_bias: bias is {bias.dtype} {list(bias.shape)}, expected floating point "
            f"[E] ({group.where}); pass the correction bias of the routing, flat"
        )
    is_counts = load.dim() in (1, 2) and load.shape[-1:] == bias.shape
    if not is_counts or load.is_floating_point() or load.dtype is torch.bool:
        raise ShapeError(
            f"update_expert_bias: load is {load.dtype} {list(load.shape)}, expected integers "
            f"{list(bias.shape)} or [N, {bias.shape[0]}] ({group.where}); pass counts of tokens by "
            "logical expert"
        )
    if not 0 < rate < float("inf"):
        raise ConfigError(
            f"update_expert_bias: rate is {rate}, expected a finite number above 0 "
            f"({group.where}); 1e-3 is usual"
        )
    own = load.reshape(-1, bias.shape[0]).sum(0, dtype=torch.int64).to(group.device)
    total = group.collectives.all_gather(own, phase="update_expert_bias").sum(0)
    # Compared with the mean as integers, so that no rounding decides on a sign.
    step = torch.sign(total.sum() - total * total.shape[0])
    bias.add_(step.to(bias.device, bias.dtype), alpha=rate)
