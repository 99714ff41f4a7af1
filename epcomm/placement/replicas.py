"""Convert logical ids of experts to physical ones, by tables on the device."""

from dataclasses import replace

import torch
from torch import Tensor

from epcomm.config import EPConfig
from epcomm.errors import ConfigError
from epcomm.placement.expert_placement import ExpertPlacement
from epcomm.records import ReplicaTable, TopKOutput
from epcomm.spec import HostLayout, MoESpec


def first_placement(
    config: EPConfig, spec: MoESpec, world_size: int, where: str, hosts: HostLayout | None = None
) -> ExpertPlacement | None:
    """Return the placement of a new layer, the same on all ranks; None: experts in their order.

    hosts: the hosts of the ranks, or None if they are not known.

    Local.
    """
    if config.redundant_experts is None:
        return None
    num_logical = spec.num_experts - config.redundant_experts
    if num_logical < spec.top_k:
        raise ConfigError(
            f"ExpertParallelExperts: {config.redundant_experts} of {spec.num_experts} experts are "
            f"redundant, expected at least top_k = {spec.top_k} others ({where}); set "
            "EPConfig.redundant_experts to the copies beyond one of each"
        )
    num_hosts = 1
    # A placement takes hosts of equally many neighbouring ranks.
    in_order = hosts is not None and sorted(hosts.host_of_rank) == list(hosts.host_of_rank)
    if hosts is not None and hosts.is_even and in_order:
        num_hosts = hosts.num_hosts
    return ExpertPlacement.spread(
        num_experts=num_logical,
        num_ranks=world_size,
        num_hosts=num_hosts,
        num_physical_experts=spec.num_experts,
    )


class ReplicaTables:
    """The copies of each expert, for kernels and graphs: the tables keep their addresses.

    logical_of_physical: [P], int64, the logical expert of each physical one.

    Ranks with their own tokens begin with different copies, and their calls take turns. Ranks that
    share their tokens (replicated) must choose alike even if one has missed a call, so their calls
    take no turns; nor do calls with gradients, so that recomputation chooses as the first run.
    """

    def __init__(
        self,
        placement: ExpertPlacement,
        *,
        rank: int,
        is_replicated: bool,
        device: torch.device,
        sum_groups: int | None = None,
    ) -> None:
        """Allocate the tables for any placement of these sizes, and write this one."""
        self._group_size = sum_groups and placement.num_experts // sum_groups
        num_experts, num_physical = placement.num_experts, placement.num_physical_experts
        most = min(placement.num_ranks, num_physical - num_experts + 1)
        self._rank = rank
        self.logical_of_physical = torch.empty(num_physical, dtype=torch.int64, device=device)
        self._in_turn = ReplicaTable(
            replicas=torch.empty(num_experts, most, dtype=torch.int32, device=device),
            num_replicas=torch.empty(num_experts, dtype=torch.int32, device=device),
            calls=None if is_replicated else torch.zeros((), dtype=torch.int64, device=device),
            # Ranks begin with different replicas.
            first=0 if is_replicated else rank,
        )
        self._alike = replace(self._in_turn, calls=None)
        self.write(placement)

    @property
    def table(self) -> ReplicaTable:
        """The table for a call in the current grad mode."""
        return self._alike if torch.is_grad_enabled() else self._in_turn

    def write(self, placement: ExpertPlacement) -> None:
        """Write another placement of the same sizes into the tables. Local; host sync."""
        table, replicas = self._in_turn, placement.replicas_for(self._rank)
        width = table.replicas.shape[1]
        rows = [(*copies, *[-1] * (width - len(copies))) for copies in replicas]
        table.replicas.copy_(torch.tensor(rows, device="cpu"))
        table.num_replicas.copy_(torch.tensor([len(copies) for copies in replicas], device="cpu"))
        self.logical_of_physical.copy_(torch.tensor(placement.physical_to_logical, device="cpu"))

    def choose(self, topk: TopKOutput) -> TopKOutput:
        """Return the entries with physical ids from ReplicaTable.choose(), and their groups.

        Physical ids are returned unchanged, and so are ids that are no [T, K] of int64 on this
        device, which the dispatcher refuses on all ranks.

        Local.   Host sync: none.   Graph capture: yes.   Deterministic: yes.
        """
        ids, table = getattr(topk, "topk_ids", None), self.table
        if not isinstance(ids, Tensor) or ids.dtype is not torch.int64 or ids.dim() != 2:
            return topk
        if ids.device != table.replicas.device:
            return topk
        if not topk.is_physical:
            topk = replace(topk, topk_ids=table.choose(ids), is_physical=True)
        if self._group_size is None:
            return topk
        known = topk.topk_ids.clamp(0, self.logical_of_physical.shape[0] - 1)
        return replace(topk, topk_groups=self.logical_of_physical[known] // self._group_size)
